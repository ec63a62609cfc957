"""A request is cancelled while it waits, wherever the batcher is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from headrace.config import make_settings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.log.port import Headers, NewRecord, TopicPartition
from headrace.protocol.codec import encode_request
from headrace.topics import STAGES, Stage
from tests.support.conditions import eventually
from tests.support.logs import read, write_to
from tests.support.pipelines import Grouping, log_for, name_of, serving
from tests.support.python_models import MEETING, add_python_model

HELD_UP = """
from tests.support.python_models import MEETING
if (x == 1).any():
    MEETING.wait(20)
"""
REQUESTS = TopicPartition("headrace.requests", 2)
RESPONSES = TopicPartition("headrace.responses", 2)
GROUPINGS: list[Grouping] = [
    [STAGES],
    [(Stage.INGEST,), (Stage.BATCHER, Stage.EXECUTOR), (Stage.RESPONDER,)],
    [(Stage.INGEST, Stage.BATCHER, Stage.EXECUTOR), (Stage.RESPONDER,)],
]


def request_of(number: int) -> NewRecord:
    """A request for `number`; its model holds up the first."""
    value = encode_request(
        "application/msgpack", "model", {"x": np.full((1, 1), number, np.float32)}, id=str(number)
    )
    return NewRecord(b"key", value, [("kafka_correlationId", b"c-%d" % number)])


def cancelling(headers: Headers) -> NewRecord:
    """A record that is no request."""
    return NewRecord(None, None, headers)


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize("grouping", GROUPINGS, ids=name_of)
async def test_cancelling_ends_waiting_requests_and_not_running_ones(
    tmp_path: Path, grouping: Grouping, guarantee: str
) -> None:
    """A record cancels by place or correlation id. Every request has one answer; the cancelling
    records have none, and hold up no commit.
    """
    add_python_model(tmp_path, HELD_UP)
    settings = make_settings(
        {"models": {"repository": str(tmp_path)}, "delivery": {"guarantee": guarantee}}
    )
    log = await log_for(settings)
    await write_to(log, REQUESTS, request_of(1))
    async with log.reader([RESPONSES]) as reader, serving(settings, log, grouping):
        await eventually(lambda: MEETING.n_waiting == 1)
        await write_to(
            log,
            REQUESTS,
            request_of(2),
            request_of(3),
            request_of(4),
            cancelling([("x-cancel", b"headrace.requests/2/1")]),
            cancelling([("x-cancel", b""), ("kafka_correlationId", b"c-3")]),
            cancelling([("x-cancel", b"headrace.requests/2/0")]),
        )
        cancelled = await read(reader, 2)
        await asyncio.to_thread(MEETING.wait, 20)
        answered = await read(reader, 2)
        await write_to(log, REQUESTS, request_of(5))
        answered += await read(reader, 1)

        async def all_is_committed() -> bool:
            committed = (await log.committed("headrace", [REQUESTS]))[REQUESTS]
            return committed is not None and AckedOffsets.from_committed(committed) == AckedOffsets(
                8
            )

        await eventually(all_is_committed)

    assert [dict(one.headers)["x-status"] for one in cancelled] == [b"CANCELLED"] * 2
    assert {dict(one.headers)["kafka_correlationId"] for one in cancelled} == {b"c-2", b"c-3"}
    assert {
        dict(one.headers)["kafka_correlationId"]: dict(one.headers)["x-status"] for one in answered
    } == {
        b"c-1": b"ok",
        b"c-4": b"ok",
        b"c-5": b"ok",
    }
