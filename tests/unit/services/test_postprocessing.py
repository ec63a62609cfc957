"""Code behind the model, as a worker of an instance gets its requests."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from headrace.errors import Code
from headrace.models.registry import Models
from headrace.protocol.messages import Envelope, Request
from headrace.protocol.tensors import from_array
from headrace.services.executor.postprocessing import DEFAULT_OPTIONS, Postprocessor
from headrace.telemetry.metrics import Metrics
from tests.support.conditions import eventually
from tests.support.models import add_numbers, settings_for
from tests.support.python_models import BEGUN, GATE, shut_gate
from tests.support.services import StillClock
from tests.support.work import make_request, receipt_of

CODE = """
from tests.support.python_models import BEGUN, GATE

def postprocess(outputs, request):
    if request.payload == b"waits":
        BEGUN.set()
        GATE.wait()
    return {"y": outputs["y"] + len(request.payload)}
"""
PLAIN_BYTES = 4 * 2**20


@pytest.fixture
def postprocessor(tmp_path: Path) -> Iterator[Postprocessor]:
    """That of a model which adds the length of the payload to its outputs."""
    add_numbers(tmp_path, CODE, max_execution_s=3600)
    models = Models(settings_for(tmp_path), executes=True)
    models.open()
    (version,) = models.catalog.versions()
    with closing(
        Postprocessor(version, DEFAULT_OPTIONS, Metrics(CollectorRegistry()))
    ) as postprocessor:
        yield postprocessor


def request_of(value: bytes, **headers: Any) -> Request:
    """A request with a payload that has run."""
    envelope = Envelope(content_type="application/json", model="numbers", **headers)
    request = make_request("numbers", envelope=envelope)
    request.value = value
    request.outputs = (from_array("y", np.zeros((1, 2), np.float32)),)
    return request


async def test_payloads_are_decompressed_one_at_a_time(postprocessor: Postprocessor) -> None:
    """Those of a whole batch would take memory that is charged to nothing."""
    value = gzip.compress(b" " * PLAIN_BYTES)
    requests = [request_of(value, content_encoding="gzip") for _ in range(24)]
    tracemalloc.start()
    try:
        await postprocessor.run(requests)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    data = [one for each in requests for one in each.output_data or ()]
    answers = [np.frombuffer(one, np.float32).tolist() for one in data]
    assert answers == [[PLAIN_BYTES] * 2] * len(requests)
    assert peak_bytes < len(requests) / 2 * PLAIN_BYTES


async def test_code_does_not_run_for_requests_that_have_ended_before_their_turn(
    postprocessor: Postprocessor,
) -> None:
    """A slow request of the same run has taken their time, or their partition was revoked."""
    clock = StillClock()
    now_ms = clock.now_us // 1000
    slow, late = request_of(b"waits"), request_of(b"late", deadline_ms=now_ms + 1)
    revoked, in_time = request_of(b"revoked"), request_of(b"time", deadline_ms=now_ms + 60_000)
    requests = [slow, late, revoked, in_time]
    with shut_gate():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(postprocessor.run(requests, clock))
            await eventually(BEGUN.is_set)
            clock.now_us += 1_000_000
            receipt_of(revoked).revoked = True
            GATE.set()

    codes = [each.failure and each.failure.code for each in requests]
    assert codes == [None, Code.DEADLINE_EXCEEDED, Code.CANCELLED, None]
    (data,) = in_time.output_data or ()
    assert np.frombuffer(data, np.float32).tolist() == [len(b"time")] * 2
