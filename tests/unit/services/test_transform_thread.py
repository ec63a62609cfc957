"""Transforms of a user's, in their thread: none of them stops anybody else's."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.config import LimitSettings
from headrace.delivery.inflight import RECORD_OVERHEAD_BYTES, InFlightAck, key_and_header_bytes
from headrace.errors import Code, Fatal
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.headers import NO_HEADERS
from headrace.protocol.messages import Request
from headrace.services.ingest.decode import IngestRules
from headrace.services.ingest.service import IngestService
from headrace.transforms.workers import PendingTransform, TransformPool, TransformThread
from headrace.tuning import TUNING, Tuning
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.python_models import BEGUN, GATE, shut_gate
from tests.support.services import (
    RecordSource,
    delivery,
    digits_models,
    digits_value,
    make_instruments,
)
from tests.support.work import Tray

RAW = [("content-type", b"text/plain"), ("x-model", b"digits")]
TRANSFORM = """
import numpy as np
from tests.support.python_models import BEGUN, GATE

def transform(payload, content_type):
    if payload == b"endless":
        try:
            while True:
                pass
        except Exception:
            pass
    if payload == b"deaf":
        try:
            while True:
                pass
        except:
            pass
    if payload == b"waits":
        BEGUN.set()
        GATE.wait()
    if payload == b"wrong":
        raise SystemExit("wrong")
    return {"pixels": np.full((1, 64), len(payload), np.float32)}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With `digits`, its transform to be written by `digits_models`."""
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "transform.py").write_text(TRANSFORM)
    return tmp_path


async def ingest(
    repository: Path,
    *payloads: bytes,
    tuning: Tuning = TUNING,
    max_execution_s: float = 0.5,
) -> tuple[list[Request], list[Request]]:
    """Those that can run, and those that have ended."""
    models = digits_models(
        repository, f'transform = "python"\nmax_execution_s = {max_execution_s}\n'
    )
    items, answers = Tray(), Tray()
    service = IngestService(
        RecordSource(delivery(*payloads, headers=RAW)),  # type: ignore[arg-type]  # what is used
        items,
        answers,
        IngestRules(models.catalog, LimitSettings()),
        make_instruments(),
        tuning,
    )
    await service.run()
    return items.requests, answers.requests


async def test_transform_thread_turns_payloads_into_inputs(repository: Path) -> None:
    """In order, with the model's version and what they are charged."""
    able, ended = await ingest(repository, b"a", b"bb", b"ccc")

    assert ended == []
    assert [bytes(one.inputs[0].data[:4]) for one in able] == [
        b"\0\0\x80?",
        b"\0\0\0@",
        b"\0\0@@",
    ]
    assert {(one.model, one.version, one.size_bytes) for one in able} == {("digits", "1", 256)}
    beside = key_and_header_bytes(b"key", RAW)
    assert [ack_handle.size_bytes for ack_handle in map(ledgers, able)] == [
        RECORD_OVERHEAD_BYTES + beside + 256 + length for length in (1, 2, 3)
    ]


async def test_thread_returns_when_inputs_of_some_size_are_made(repository: Path) -> None:
    """Others are made once these are charged to their models' shares."""
    version = digits_models(repository, 'transform = "python"\n').catalog.lookup("digits", None)
    payloads = [
        PendingTransform(
            Request(NULL_ACK, 0, place, place - 1, 0, None, b"a", [], NO_HEADERS),
            version,
            b"a",
            "text/plain",
        )
        for place in range(5)
    ]
    thread = TransformPool([TransformThread()], transformed_bytes=300)
    done = [await thread.run(payloads), await thread.run(payloads[4:])]
    thread.close()

    assert done == [2, 1]
    assert [payload.inputs is None for payload in payloads] == [False, False, True, True, False]


async def test_every_payload_is_passed_on_if_few_fit_at_once(repository: Path) -> None:
    """In order, with those that are refused."""
    tuning = replace(TUNING, ingest=replace(TUNING.ingest, transformed_bytes=300))
    able, ended = await ingest(repository, b"a", b"bb", b"wrong", b"dddd", b"eeeee", tuning=tuning)

    assert [one.offset for one in able] == [0, 1, 3, 4]
    assert [one.offset for one in ended] == [2]


def ledgers(request: Request) -> InFlightAck:
    """The ack handle, which is charged."""
    assert isinstance(request.ack_handle, InFlightAck)
    return request.ack_handle


async def test_endless_transform_is_interrupted_and_others_continue(repository: Path) -> None:
    """Only its own request fails, with the limit that it has passed."""
    able, ended = await ingest(repository, b"a", b"endless", b"bb")

    assert [one.offset for one in able] == [0, 2]
    (request,) = ended
    assert request.failure is not None
    assert request.failure.code == Code.MODEL_FAILED
    assert "max_execution_s = 0.5 s" in request.failure.message


async def test_transform_that_catches_interruption_fails_late_and_others_continue(
    repository: Path,
) -> None:
    """A bare `except` swallows the interruption; what comes after it is too late."""
    async with asyncio.timeout(DEADLINE_S):
        able, ended = await ingest(repository, b"a", b"deaf", b"bb")

    assert [one.offset for one in able] == [0, 2]
    (request,) = ended
    assert request.failure is not None
    assert "max_execution_s = 0.5 s" in request.failure.message


async def test_transform_that_raises_system_exit_is_refused(repository: Path) -> None:
    """`SystemExit` is an error like any other."""
    able, ended = await ingest(repository, b"wrong", b"a")

    assert [one.offset for one in able] == [1]
    assert [one.failure.code for one in ended if one.failure] == [Code.INVALID_REQUEST]


async def test_uninterruptible_transform_ends_process(repository: Path) -> None:
    """Native code hears of nothing; what it is at is found by the next owner."""
    tuning = replace(TUNING, transforms=replace(TUNING.transforms, interrupt_grace_s=0.1))

    with shut_gate(), pytest.raises(ExceptionGroup) as raised:
        await ingest(repository, b"waits", tuning=tuning, max_execution_s=0.1)

    assert raised.group_contains(Fatal, match="did not end")


async def test_event_loop_runs_during_transform(repository: Path) -> None:
    """A transform that waits for something that happens on the loop gets it, and ends."""
    with shut_gate():
        ingesting = asyncio.create_task(ingest(repository, b"waits", max_execution_s=3600.0))
        await eventually(BEGUN.is_set)
        GATE.set()
        able, _ = await ingesting

    assert len(able) == 1


async def test_tensor_requests_use_no_transform_thread(repository: Path) -> None:
    """Requests in MessagePack are decoded without the thread."""
    models = digits_models(repository, 'transform = "python"\n')
    items, answers = Tray(), Tray()
    before = set(threading.enumerate())
    service = IngestService(
        RecordSource(delivery(digits_value())),  # type: ignore[arg-type]  # what is used of it
        items,
        answers,
        IngestRules(models.catalog, LimitSettings()),
        make_instruments(),
    )
    await service.run()

    assert "transforms" not in {thread.name for thread in set(threading.enumerate()) - before}
    assert len(items.requests) == 1
