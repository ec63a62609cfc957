"""Requests that carry bytes to a model of floats, and get labels of its scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.log.port import NewRecord, TopicPartition
from headrace.protocol.codec import Answer, decode_response, encode_request
from headrace.topics import STAGES
from tests.support.logs import read, write_to
from tests.support.models import add_version, digits
from tests.support.pipelines import Grouping, log_for, name_of, serving, settings_of

CONFIG = """
postprocess = ["softmax", "top_k:2"]
labels = "labels.txt"
ring = {ring}

[preprocess.pixels]
datatype = "UINT8"
scale = 0.001
"""
GROUPINGS: list[Grouping] = [[STAGES], [[stage] for stage in STAGES]]


@pytest.mark.parametrize("ring", ["false", "true"])
@pytest.mark.parametrize("grouping", GROUPINGS, ids=name_of)
async def test_image_bytes_are_answered_with_labels(
    tmp_path: Path, grouping: Grouping, ring: str
) -> None:
    """One process and four, with a ring and without, in MessagePack and JSON, give labels."""
    add_version(tmp_path, "digits", 1, digits(), CONFIG.format(ring=ring))
    labels = "\n".join(f"class {number}" for number in range(10))
    (tmp_path / "digits" / "labels.txt").write_text(labels, encoding="utf-8")
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    requests, responses = (
        TopicPartition(f"headrace.{name}", 0) for name in ("requests", "responses")
    )
    pixels = np.full((3, 64), 7, np.uint8)
    packed = encode_request("application/msgpack", "digits", {"pixels": pixels})
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": [1, 64], "data": [7] * 64}
    plain = json.dumps({"model_name": "digits", "inputs": [tensor]}).encode()
    wide = json.dumps({"model_name": "digits", "inputs": [{**tensor, "datatype": "FP32"}]}).encode()
    as_json = [("content-type", b"application/json")]
    for value, headers in ((packed, []), (plain, as_json), (wide, as_json)):
        await write_to(log, requests, NewRecord(None, value, headers))

    async with log.reader([responses]) as reader, serving(settings, log, grouping):
        records = await read(reader, 3)

    answers = {
        dict(record.headers)["x-request"]: decode_response(record.headers, record.value)
        for record in records
    }
    for offset, rows in ((0, 3), (1, 1)):
        answer = answers[f"headrace.requests/0/{offset}".encode()]
        assert isinstance(answer, Answer)
        assert answer.outputs["scores_indices"].tolist() == [[9, 8]] * rows
        assert answer.outputs["scores_labels"].tolist() == [[b"class 9", b"class 8"]] * rows
        assert answer.outputs["scores_top_k"].shape == (rows, 2)
    refused = answers[b"headrace.requests/0/2"]
    assert not isinstance(refused, Answer)
    assert "expected UINT8" in str(refused)
