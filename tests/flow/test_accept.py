"""Answers in an accepted content type: by Kafka, over HTTP and on the command line."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace.cli.outcome import Exit
from headrace.client import Client, InferenceError
from headrace.config import make_settings
from headrace.protocol.headers import HeaderName
from headrace.topics import STAGES, Stage
from tests.support.command_line import Call
from tests.support.gateways import Served, gateway_of
from tests.support.models import add_version, identity, segmenter
from tests.support.pipelines import log_for, serving

MASK = """
[transform.image]
max_images = 1
[answer.mask]
"""
CLASSES = """
[transform.record]
[transform.record.inputs]
x = [{ path = "cat" }, { path = "dog" }]
[answer.classes]
"""
ENRICHING = """
[transform.record]
pass_through = true
[transform.record.inputs]
x = [{ path = "cat" }, { path = "dog" }]
"""
CSV = b"cat,dog\n1,2\n"
MSGPACK, JSON, OCTETS = "application/msgpack", "application/json", "application/octet-stream"


def png() -> bytes:
    """A black image of 16 x 16 pixels."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with models that answer with a mask, with classes and with the record."""
    models = tmp_path / "models"
    add_version(models, "parts", 1, segmenter(), MASK)
    add_version(models, "animals", 1, identity("FP32", ("batch", 2)), CLASSES)
    add_version(models, "scored", 1, identity("FP32", ("batch", 2)), ENRICHING)
    return models


@pytest.mark.parametrize("groups", [[list(STAGES)], [[stage] for stage in STAGES]])
async def test_answer_is_of_accepted_content_type(
    repository: Path, groups: list[list[Stage]]
) -> None:
    """The answer is in the model's own form, which is the default, or tensors in an encoding."""
    settings = make_settings({"models": {"repository": str(repository)}})
    log = await log_for(settings)
    async with serving(settings, log, groups), Client(log=log, settings=settings) as client:

        async def content_type_of(accept: str, model: str, payload: bytes, kind: str) -> str:
            answer = await client.infer_raw(model, payload, kind, accept=accept)
            if answer.payload is None:
                assert answer.outputs["y"].shape[0] == 1  # its own outputs, by name
            return (dict(answer.headers)[HeaderName.CONTENT_TYPE] or b"").decode()

        for accept, expected in (
            ("", "image/png"),
            ("*/*", "image/png"),
            ("image/*", "image/png"),
            (JSON, JSON),
            (f"{MSGPACK}, image/png;q=0.5", MSGPACK),
            ("image/png;q=0, */*", JSON),
        ):
            assert await content_type_of(accept, "parts", png(), "image/png") == expected
        for accept, expected in (("", "text/csv"), ("text/csv", "text/csv"), (JSON, JSON)):
            assert await content_type_of(accept, "scored", CSV, "text/csv") == expected
        classes = await client.infer_raw("animals", CSV, "text/csv", accept=JSON)
        assert classes.payload is not None  # both are JSON, and the model's own is preferred
        tensors = await client.infer_raw("animals", CSV, "text/csv", accept=MSGPACK)
        assert tensors.outputs["y"].tolist() == [[1, 2]]


@pytest.mark.parametrize("groups", [[list(STAGES)], [[stage] for stage in STAGES]])
async def test_tensors_are_answered_in_accepted_encoding(
    repository: Path, groups: list[list[Stage]]
) -> None:
    """A request in MessagePack may be answered in JSON, beside others that are not."""
    settings = make_settings({"models": {"repository": str(repository)}})
    log = await log_for(settings)
    async with serving(settings, log, groups), Client(log=log, settings=settings) as client:
        given = {"x": np.ones((1, 2), np.float32)}
        plain = await client.infer("animals", given)
        accepting = await client.infer("animals", given, headers=[("accept", JSON.encode())])

    types = [dict(each.headers)[HeaderName.CONTENT_TYPE] for each in (plain, accepting)]
    assert types == [MSGPACK.encode(), JSON.encode()]
    assert plain.outputs["y"].tolist() == accepting.outputs["y"].tolist() == [[1, 1]]


@pytest.mark.parametrize("groups", [[list(STAGES)], [[stage] for stage in STAGES]])
async def test_request_that_accepts_no_answer_is_refused_by_ingest(
    repository: Path, groups: list[list[Stage]]
) -> None:
    """Before its payload is converted; the error says what there is."""
    settings = make_settings({"models": {"repository": str(repository)}})
    log = await log_for(settings)
    async with serving(settings, log, groups), Client(log=log, settings=settings) as client:
        with pytest.raises(InferenceError) as of_payload:
            await client.infer_raw("animals", b"no records", "text/csv", accept="image/png")
        given = {"x": np.ones((1, 2), np.float32)}
        with pytest.raises(InferenceError) as of_tensors:
            await client.infer("animals", given, headers=[("accept", b"text/csv")])

    assert of_payload.value.code == of_tensors.value.code == "INVALID_REQUEST"
    assert of_payload.value.message == (
        "header accept: expected at least one of application/json, application/msgpack, "
        "application/vnd.msgpack, application/x-msgpack, got image/png"
    )
    assert "header accept: expected at least one of application/msgpack" in of_tensors.value.message


@pytest.fixture
async def served(repository: Path) -> AsyncIterator[Served]:
    """A gateway in front of the models."""
    async with gateway_of(repository) as served:
        yield served


async def test_payload_over_http_is_answered_as_it_accepts(served: Served) -> None:
    """The mask itself, tensors behind JSON, or the protocol's JSON, which is the default."""
    url, sent = "/v2/models/parts/infer", {"Content-Type": "image/png"}
    usual = await served.post(url, png(), headers=sent)
    in_json = await served.post(url, png(), headers={**sent, "Accept": "application/json"})
    mask = await served.post(url, png(), headers={**sent, "Accept": "image/webp, image/png"})
    tensors = await served.post(url, png(), headers={**sent, "Accept": OCTETS})
    refused = await served.post(url, png(), headers={**sent, "Accept": "image/webp"})
    record = await served.post(
        "/v2/models/scored/infer", CSV, headers={"Content-Type": "text/csv", "Accept": "text/csv"}
    )

    assert usual.json["outputs"] == in_json.json["outputs"]
    assert usual.json["outputs"][0]["name"] == "record"
    assert (mask.status, mask.headers["Content-Type"]) == (200, "image/png")
    with Image.open(io.BytesIO(mask.body), formats=["PNG"]) as image:
        assert image.size == (16, 16)
    assert tensors.headers["Content-Type"] == OCTETS
    (output,) = tensors.json["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("y", "INT64", [1, 8, 8])
    assert np.frombuffer(tensors.tensors, np.int64).reshape(8, 8)[0].tolist() == list(range(8))
    assert refused.status == 406
    assert refused.json["error_details"] == {"code": "INVALID_REQUEST", "retriable": False}
    assert refused.json["error"] == (
        "header accept: expected at least one of application/json, image/png, "
        "application/octet-stream, got image/webp"
    )
    assert (record.headers["Content-Type"], record.body.splitlines()[0]) == (
        "text/csv",
        b"cat,dog,y",
    )
    assert served.counted(406) == 1


async def test_classes_over_http_are_body_where_json_is_accepted(served: Served) -> None:
    """`Accept` names JSON or any application type; otherwise the protocol's JSON has them."""
    url, sent = "/v2/models/animals/infer", {"Content-Type": "text/csv"}
    accepted = [
        await served.post(url, CSV, headers={**sent, "Accept": accept})
        for accept in (JSON, "application/*", f"text/html, {JSON};q=0.9, */*;q=0.1")
    ]
    usual = [await served.post(url, CSV, headers=sent | more) for more in ({}, {"Accept": "*/*"})]

    classes = [{"classes": [{"index": 1, "value": 2.0}, {"index": 0, "value": 1.0}]}]
    assert [(each.headers["Content-Type"], each.json) for each in accepted] == [(JSON, classes)] * 3
    for each in usual:
        (output,) = each.json["outputs"]
        assert (output["name"], json.loads(output["data"][0])) == ("record", classes)


async def test_tensors_over_http_are_answered_as_they_accept(served: Served) -> None:
    """Binary tensors without a flag in the body; nothing else but JSON."""
    url = "/v2/models/animals/infer"
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    body = json.dumps({"inputs": [tensor]}).encode()
    binary = await served.post(url, body, headers={"Accept": OCTETS})
    refused = await served.post(url, body, headers={"Accept": "text/html"})
    browser = await served.post(url, body, headers={"Accept": "text/html, */*;q=0.8"})
    older = await served.post(
        "/v1/models/animals:predict", b'{"instances": [[1, 2]]}', headers={"Accept": OCTETS}
    )

    assert np.frombuffer(binary.tensors, np.float32).tolist() == [1, 2]
    assert browser.json["outputs"][0]["data"] == [1, 2]
    assert (refused.status, older.status) == (406, 406)


async def test_unknown_model_over_http_is_404_whatever_is_accepted(served: Served) -> None:
    """The content types of a model that does not exist are unknown, so no `Accept` is refused."""
    statuses = [
        (await served.post("/v2/models/none/infer", CSV, headers=headers)).status
        for headers in (
            {"Content-Type": "text/csv"},
            {"Content-Type": "text/csv", "Accept": "application/json"},
            {"Content-Type": "text/csv", "Accept": "text/csv"},
        )
    ]

    assert statuses == [404, 404, 404]


def test_file_that_answer_cannot_be_is_refused_on_the_command_line(
    call: Call, repository: Path, tmp_path: Path
) -> None:
    """Instead of JSON in a file of another kind; records are written as they are."""
    (tmp_path / "animals.csv").write_bytes(CSV)

    refused = call("infer", "animals", "--file", "animals.csv", "--output", "mask.png")
    written = call("infer", "scored", "--file", "animals.csv", "--output", "scored.csv")
    in_json = call("infer", "scored", "--file", "animals.csv", "--output", "scored.json")

    assert refused.exit_code == Exit.FAILED
    assert "header accept: expected at least one of application/json" in refused.stderr
    assert "got image/png" in refused.stderr
    assert not (tmp_path / "mask.png").exists()
    assert written.exit_code == in_json.exit_code == Exit.DONE
    assert (tmp_path / "scored.csv").read_bytes().startswith(b"cat,dog,y\r\n")
    assert json.loads((tmp_path / "scored.json").read_text())["outputs"][0]["name"] == "record"
