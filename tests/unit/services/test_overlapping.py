"""Answers at least once: bounded in bytes, and nobody waits for a target that stalls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from headrace.flow import sending
from headrace.flow.answered import Progress
from headrace.flow.inflight import Budget, Ledger
from headrace.log.errors import LogUnavailable
from headrace.log.memory.producer import MemoryProducer
from headrace.log.port import NewRecord, Run, TopicPartition
from headrace.messages import Request
from headrace.services.responder import overlapping
from tests.support.answering import (
    MINE,
    RESPONSES,
    Bench,
    answerable,
    running,
)
from tests.support.conditions import eventually
from tests.support.work import make_request, receipt_of


async def test_a_target_that_does_not_acknowledge_holds_up_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many chunks wait for it: its answers stand aside, and go when it is back."""
    monkeypatch.setattr(overlapping, "STALLED_S", 0.02)
    monkeypatch.setattr(sending, "wait_random_exponential", lambda **_: lambda _: 0.01)
    send, leaderless = MemoryProducer.send, True

    async def fail(
        producer: MemoryProducer, partition: TopicPartition, records: Sequence[NewRecord]
    ) -> Sequence[Run]:
        if leaderless and partition.topic == MINE.topic:
            raise LogUnavailable("the partition has no leader")
        return await send(producer, partition, records)

    monkeypatch.setattr(MemoryProducer, "send", fail)
    async with running() as bench:
        stuck = [answerable(kafka_replyTopic=b"headrace.mine") for _ in range(40)]
        for request in stuck:
            await bench.inlet.send([request])
        await bench.answer(*[answerable() for _ in range(10)])
        assert not any(receipt_of(one).settled for one in stuck)

        leaderless = False
        await eventually(lambda: all(receipt_of(one).settled == 1 for one in stuck))
        assert len(await bench.records(MINE.topic)) == 40


async def test_outputs_that_wait_are_charged_to_the_budget() -> None:
    """A broker that is slow to take answers makes reading pause, before memory runs out."""
    ledger = Ledger(Budget(1_000_000), lambda: None)
    assignment = ledger.assign(TopicPartition("headrace.requests", 0), Progress(0))
    request = answerable()
    request.receipt = assignment.admit(0, 10)
    request.outputs = make_request(inputs={"y": np.zeros((1, 500), np.float32)}).inputs
    async with running() as bench:
        bench.log.faults.hold_acknowledgements()
        await bench.inlet.send([request])
        await eventually(lambda: ledger.budget.used_bytes == 2010)
        bench.log.faults.release_acknowledgements()
        await eventually(lambda: not ledger.budget.used_bytes)


async def test_chunks_with_large_outputs_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many bytes are unacknowledged at most, and then the stages before are held up."""
    monkeypatch.setattr(overlapping, "UNACKNOWLEDGED_BYTES", 3000)
    requests = [answerable() for _ in range(6)]
    for request in requests:
        request.outputs = make_request(inputs={"y": np.zeros((1, 250), np.float32)}).inputs
    async with running() as bench:
        bench.log.faults.hold_acknowledgements()
        async with asyncio.TaskGroup() as tasks:
            sending_all = tasks.create_task(send_singly(bench, requests))
            written = bench.log._topics.partition(TopicPartition(RESPONSES.topic, 0))
            await eventually(lambda: written.end == 3)
            for _ in range(20):
                await asyncio.sleep(0)
            assert written.end == 3
            assert not sending_all.done()
            bench.log.faults.release_acknowledgements()
        await eventually(lambda: all(receipt_of(one).settled for one in requests))


async def send_singly(bench: Bench, requests: list[Request]) -> None:
    """Each in a chunk of its own."""
    for request in requests:
        await bench.inlet.send([request])
