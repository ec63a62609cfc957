"""Code behind the model, as a worker of an instance gets its requests."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from headrace.models.registry import Models
from headrace.protocol.messages import Envelope, Request
from headrace.protocol.tensors import from_array
from headrace.services.executor.postprocessing import DEFAULT_OPTIONS, Postprocessor
from headrace.telemetry.metrics import Metrics
from tests.support.models import add_version, identity, settings_for
from tests.support.work import make_request

CONFIG = """
[transform.record]
[transform.record.inputs]
x = [{ path = "number" }, { path = "number" }]
[answer.python]
"""
CODE = 'def postprocess(outputs, request):\n    return {"y": outputs["y"] + len(request.payload)}\n'
PLAIN_BYTES = 4 * 2**20


def compressed_request() -> Request:
    """A request that has run, whose payload is a thousand times as large as its value."""
    envelope = Envelope(content_type="application/json", content_encoding="gzip", model="numbers")
    request = make_request("numbers", envelope=envelope)
    request.value = gzip.compress(b" " * PLAIN_BYTES)
    request.outputs = (from_array("y", np.zeros((1, 2), np.float32)),)
    return request


async def test_payloads_are_decompressed_one_at_a_time(tmp_path: Path) -> None:
    """Those of a whole batch would take memory that is charged to nothing."""
    directory = add_version(tmp_path, "numbers", 1, identity("FP32"), CONFIG)
    (directory.parent / "postprocess.py").write_text(CODE)
    models = Models(settings_for(tmp_path), executes=True)
    models.open()
    (version,) = models.catalog.versions()
    requests = [compressed_request() for _ in range(24)]
    postprocessor = Postprocessor(version, DEFAULT_OPTIONS, Metrics(CollectorRegistry()))
    tracemalloc.start()
    try:
        await postprocessor.run(requests)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        postprocessor.close()

    data = [one for each in requests for one in each.output_data or ()]
    answers = [np.frombuffer(one, np.float32).tolist() for one in data]
    assert answers == [[PLAIN_BYTES] * 2] * len(requests)
    assert peak_bytes < len(requests) / 2 * PLAIN_BYTES
