"""Answers at least once: bounded in bytes, and nobody waits for a target that stalls."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import InFlightTracker
from headrace.log.port import TopicPartition
from headrace.protocol.messages import Request
from headrace.services.responder.ordered import OrderBy
from headrace.telemetry.logs import Event
from headrace.tuning import TUNING
from tests.support.answering import (
    MINE,
    RESPONSES,
    ResponderHarness,
    answerable,
    running,
)
from tests.support.conditions import eventually
from tests.support.services import counted
from tests.support.work import make_request, receipt_of


async def test_stalled_target_delays_no_other_answers() -> None:
    """Answers of any number of chunks are put aside, and sent when the target is back."""
    tuning = replace(TUNING.responder, target_stalled_after_s=0.02)
    async with running(tuning=tuning) as bench:
        bench.log.faults.topics.take_leaders(MINE.topic)
        stuck = [answerable(kafka_replyTopic=b"headrace.mine") for _ in range(40)]
        for request in stuck:
            await bench.incoming.send([request])
        await bench.answer(*[answerable() for _ in range(10)])
        assert not any(receipt_of(one).acked for one in stuck)

        bench.log.faults.topics.elect(MINE.topic)
        await eventually(lambda: all(receipt_of(one).acked == 1 for one in stuck))
        assert len(await bench.records(MINE.topic)) == 40


async def test_stall_of_several_chunks_is_logged_once() -> None:
    """All chunks under way to a target stall with it; 16 of them wrote the same line."""
    tuning = replace(TUNING.responder, target_stalled_after_s=0.1, max_unacknowledged_chunks=3)
    mine = TopicPartition(MINE.topic, 0)
    theirs = TopicPartition(RESPONSES.topic, 0)

    async def send_to(target: TopicPartition) -> None:
        """Send an answer, and wait until it is written."""
        end_offset = partial(bench.log.faults.partitions.end_offset, target)
        before = end_offset()
        await bench.incoming.send([answerable(kafka_replyTopic=target.topic.encode())])
        await eventually(lambda: end_offset() > before)

    async with running(tuning=tuning) as bench:
        faults = bench.log.faults
        faults.acknowledgements.hold()
        with capture_logs() as lines:
            for target in [mine] * 3 + [theirs] * 3:  # theirs have room when all of mine stall
                await send_to(target)
        faults.acknowledgements.release()
    stalled = [line["topic"] for line in lines if line["event"] == Event.ANSWERS_STALLED]
    assert stalled.count(str(mine)) == 1


async def test_many_answers_for_one_target_are_written_in_parts() -> None:
    """So many wait for a target that was stalled or looked up; encoding all of them at once would
    block the event loop for a second.
    """
    tuning = replace(TUNING.responder, max_step_answers=8)
    target = TopicPartition(MINE.topic, 0)
    requests = [answerable(kafka_replyTopic=b"headrace.mine") for _ in range(20)]
    async with running(tuning=tuning) as bench:
        bench.log.faults.acknowledgements.hold()
        await bench.incoming.send(list(requests))
        await eventually(lambda: bench.log.faults.partitions.end_offset(target))
        assert bench.log.faults.partitions.end_offset(target) == 8
        bench.log.faults.acknowledgements.release()
        await eventually(lambda: all(receipt_of(one).acked == 1 for one in requests))
        assert len(await bench.records(MINE.topic)) == 20


@pytest.mark.parametrize("order", ["none", "partition"])
async def test_revoked_answers_are_not_retried(order: OrderBy) -> None:
    """Another process answers it; of those that have failed before, the others are answered."""
    ours, revoked = answerable(), answerable()
    tracker = InFlightTracker(Budget(1_000_000), lambda: None)
    assignments = [
        tracker.assign(TopicPartition("headrace.requests", number), AckedOffsets(0))
        for number in (0, 1)
    ]
    for request, assignment in zip((ours, revoked), assignments, strict=True):
        request.partition, request.offset, request.previous = assignment.partition[1], 0, -1
        request.ack_handle = assignment.admit(0, 10)
    async with running(order_by=order, tracker=tracker) as bench:
        bench.log.faults.topics.take_leaders(RESPONSES.topic)
        await bench.incoming.send([ours, revoked])
        await eventually(lambda: counted(bench.instruments, "retries_total", operation="send") >= 4)
        tracker.revoke(assignments[1].partition)
        await eventually(lambda: not assignments[1].in_flight)
        bench.log.faults.topics.elect(RESPONSES.topic)
        await eventually(lambda: not tracker.budget.used_bytes)
        answers = await bench.responses()

    assert [dict(each.headers)["x-request"] for each in answers] == [b"headrace.requests/0/0"]
    assert counted(bench.instruments, "revoked_requests_total") == 1


@pytest.mark.parametrize("order", ["none", "partition"])
async def test_revoked_fallback_is_not_retried(order: OrderBy) -> None:
    """An answer that its topic refuses goes to `responses`, as long as the partition is ours."""
    tracker = InFlightTracker(Budget(1_000_000), lambda: None)
    assignment = tracker.assign(TopicPartition("headrace.requests", 0), AckedOffsets(0))
    request = answerable(kafka_replyTopic=b"headrace.compacted")
    request.key = None
    request.partition, request.offset, request.previous = 0, 0, -1
    request.ack_handle = assignment.admit(0, 10)
    async with running(order_by=order, tracker=tracker) as bench:
        bench.log.faults.topics.take_leaders(RESPONSES.topic)
        await bench.incoming.send([request])
        await eventually(lambda: counted(bench.instruments, "retries_total", operation="send") >= 2)
        tracker.revoke(assignment.partition)
        await eventually(lambda: not tracker.budget.used_bytes)


@pytest.mark.parametrize("order", ["key", "partition"])
async def test_chunk_in_order_is_acked_only_whole(
    order: OrderBy,
) -> None:
    """One that counted while an earlier one on another topic did not would let a later one pass
    that, after a restart.
    """
    tracker = InFlightTracker(Budget(1_000_000), lambda: None)
    assignment = tracker.assign(TopicPartition("headrace.requests", 0), AckedOffsets(0))
    requests = [answerable(), answerable(kafka_replyTopic=b"headrace.mine")]
    for offset, request in enumerate(requests):
        request.partition, request.offset, request.previous = 0, offset, offset - 1
        request.ack_handle = assignment.admit(offset, 10)
    async with running(order_by=order, tracker=tracker) as bench:
        bench.log.faults.topics.take_leaders(RESPONSES.topic)
        await bench.incoming.send(requests)
        await eventually(lambda: counted(bench.instruments, "retries_total", operation="send") >= 2)
        assert len(await bench.records(MINE.topic)) == 1
        assert assignment.progress == AckedOffsets(0)

        bench.log.faults.topics.elect(RESPONSES.topic)
        await eventually(lambda: assignment.progress == AckedOffsets(2))


async def test_waiting_outputs_are_charged_to_budget() -> None:
    """A broker that is slow to take answers makes reading pause, before memory runs out."""
    tracker = InFlightTracker(Budget(1_000_000), lambda: None)
    assignment = tracker.assign(TopicPartition("headrace.requests", 0), AckedOffsets(0))
    request = answerable()
    request.ack_handle = assignment.admit(0, 10)
    request.outputs = make_request(inputs={"y": np.zeros((1, 500), np.float32)}).inputs
    async with running() as bench:
        bench.log.faults.acknowledgements.hold()
        await bench.incoming.send([request])
        await eventually(lambda: tracker.budget.used_bytes == 2010)
        bench.log.faults.acknowledgements.release()
        await eventually(lambda: not tracker.budget.used_bytes)


async def test_chunks_with_large_outputs_wait_for_room() -> None:
    """Answers wait, and hold up earlier stages, while too many bytes are unacknowledged."""
    tuning = replace(TUNING.responder, max_unacknowledged_bytes=3000)
    requests = [answerable() for _ in range(6)]
    for request in requests:
        request.outputs = make_request(inputs={"y": np.zeros((1, 250), np.float32)}).inputs
    async with running(tuning=tuning) as bench:
        bench.log.faults.acknowledgements.hold()
        async with asyncio.TaskGroup() as tasks:
            sending_all = tasks.create_task(send_singly(bench, requests))
            written = TopicPartition(RESPONSES.topic, 0)
            await eventually(lambda: bench.log.faults.partitions.end_offset(written) == 3)
            for _ in range(20):
                await asyncio.sleep(0)
            assert bench.log.faults.partitions.end_offset(written) == 3
            assert not sending_all.done()
            bench.log.faults.acknowledgements.release()
        await eventually(lambda: all(receipt_of(one).acked for one in requests))


async def send_singly(bench: ResponderHarness, requests: list[Request]) -> None:
    """Each in a chunk of its own."""
    for request in requests:
        await bench.incoming.send([request])
