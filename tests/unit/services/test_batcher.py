"""The batcher's shell: who pulls is served, what ends is answered, and it sleeps in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.crash_isolation.isolation import Isolated, IsolatedAck
from headrace.errors import Code, Rejected
from headrace.log.port import Record
from headrace.protocol.headers import BY_CORRELATION
from headrace.protocol.messages import Envelope, Request
from headrace.services.batcher.service import BatcherService
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.services import StillClock, counted, make_assignment, make_instruments
from tests.support.work import NOW_US, Limits, Tray, make_request, receipt_of

KEY = ("digits", "1")


class BatcherHarness:
    """A running batcher, the stream to it, and its answers."""

    def __init__(
        self, limits: Any, clock: StillClock | None = None, steady: StillClock | None = None
    ) -> None:
        self.clock = clock or StillClock()
        self.instruments = make_instruments(self.clock, steady)
        self.answers = Tray()
        self.batcher = self.items = BatcherService(self.answers, limits, "test", self.instruments)
        self.batch_queue = self.batcher.batch_queue

    def waiting(self) -> int:
        """How many requests wait."""
        return self.batcher.waiting().requests


@asynccontextmanager
async def running(
    limits: Any, clock: StillClock | None = None, steady: StillClock | None = None
) -> AsyncIterator[BatcherHarness]:
    """Run a batcher until the end of the context, when its stream is closed."""
    bench = BatcherHarness(limits, clock, steady)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.batcher.run())
        yield bench
        bench.items.close()


def limited(limits: Limits) -> Any:
    """The same limits for all models."""
    return lambda _name, _version: limits


async def test_waiting_batch_is_pulled_and_new_batch_wakes_consumer() -> None:
    """Waiting requests are pulled at once; a consumer that waits is given the next ones."""
    async with running(limited(Limits())) as bench:
        first = [make_request(), make_request()]
        waiting = asyncio.create_task(bench.batch_queue.consumer(KEY).pull())
        await bench.items.send(first)
        batch = await waiting
        assert batch is not None
        assert batch.requests == first

        second = [make_request()]
        await bench.items.send(second)
        batch = await bench.batch_queue.consumer(KEY).pull()
        assert batch is not None
        assert batch.requests == second


async def test_end_of_queue_delay_wakes_consumer() -> None:
    """When the delay is over the batch closes without anything new coming in."""
    async with running(limited(Limits(max_queue_delay_ms=20))) as bench:
        waiting = asyncio.create_task(bench.batch_queue.consumer(KEY).pull())
        await bench.items.send([make_request(ingested_us=NOW_US)])
        await asyncio.sleep(0)
        assert not waiting.done()

        bench.clock.now_us += 20_000
        batch = await asyncio.wait_for(waiting, DEADLINE_S)

    assert batch is not None
    assert batch.reason == "delay"


async def test_wall_clock_set_back_delays_no_batch() -> None:
    """The delay of what waits, and of what comes next, is of a clock that nobody sets."""
    wall, steady = StillClock(), StillClock(1_000_000)
    async with running(limited(Limits(max_queue_delay_ms=20)), wall, steady) as bench:
        batches = []
        for _ in range(2):
            waiting = asyncio.create_task(bench.batch_queue.consumer(KEY).pull())
            await bench.items.send([make_request(ingested_us=wall.now_us)])
            await eventually(lambda: bench.waiting() == 1)
            wall.now_us -= 120_000_000
            steady.now_us += 20_000
            batches.append(await asyncio.wait_for(waiting, DEADLINE_S))

    assert [batch and batch.reason for batch in batches] == ["delay", "delay"]


async def test_wall_clock_set_back_leaves_time_to_deadline_as_it_was() -> None:
    """A waiting request expires after the time that it had; the next one is in time."""
    wall, steady = StillClock(), StillClock(1_000_000)
    async with running(limited(Limits(max_queue_delay_ms=1000)), wall, steady) as bench:
        early = make_request(deadline_ms=wall.now_us // 1000 + 20)
        await bench.items.send([early])
        await eventually(lambda: bench.waiting() == 1)
        wall.now_us -= 120_000_000
        steady.now_us += 20_000
        await eventually(lambda: bench.answers.requests == [early])
        later = make_request(deadline_ms=wall.now_us // 1000 + 20)
        await bench.items.send([later])
        await eventually(lambda: bench.waiting() == 1)
        steady.now_us += 19_000
        batch = await bench.batch_queue.consumer(KEY).pull()

    assert batch is not None
    assert batch.requests == [later]


class SteppingClock(StillClock):
    """Goes on to a later moment after some more readings."""

    def step_to(self, later_us: int, after: int) -> None:
        """See above."""
        self._later_us, self._step_at = later_us, self.asked + after

    def __call__(self) -> int:
        if self.asked == getattr(self, "_step_at", None):
            self.now_us = self._later_us
        return super().__call__()


@pytest.mark.parametrize("readings", range(6))
async def test_queue_delay_ending_between_clock_reads_wakes_consumer(
    readings: int,
) -> None:
    """The timer is early by a moment, and the delay is over before the next one is set."""
    clock = SteppingClock()
    async with running(limited(Limits(max_queue_delay_ms=20)), clock) as bench:
        waiting = asyncio.create_task(bench.batch_queue.consumer(KEY).pull())
        await bench.items.send([make_request(ingested_us=NOW_US)])
        await eventually(lambda: clock.asked > 3)

        clock.now_us += 19_999
        clock.step_to(NOW_US + 20_001, after=readings)
        batch = await asyncio.wait_for(waiting, DEADLINE_S)

    assert batch is not None


async def test_request_expiring_without_consumer_is_answered() -> None:
    """Its answer does not wait for an executor to become free."""
    async with running(limited(Limits())) as bench:
        request = make_request(deadline_ms=NOW_US // 1000 + 20)
        await bench.items.send([request])
        bench.clock.now_us += 20_000
        await eventually(lambda: bench.answers.requests == [request])

    assert request.failure is not None
    assert request.failure.code == Code.DEADLINE_EXCEEDED
    assert request.failure.stage == "batcher"


async def test_batcher_sleeps_while_due_batch_waits_for_executor() -> None:
    """With every instance busy a batch that is due is no reason to look at the clock."""
    async with running(limited(Limits(max_queue_delay_ms=1))) as bench:
        await bench.items.send([make_request(ingested_us=NOW_US)])
        await eventually(lambda: bench.waiting() == 1)
        bench.clock.now_us += 10_000
        await bench.items.send([make_request(ingested_us=NOW_US)])
        for _ in range(10):
            await asyncio.sleep(0)
        before = bench.clock.asked
        for _ in range(200):
            await asyncio.sleep(0)

        assert bench.clock.asked - before < 5
        assert await bench.batch_queue.consumer(KEY).pull() is not None


async def test_request_of_unloaded_model_is_answered() -> None:
    """Nobody would pull it."""

    def gone(name: str, version: str) -> Limits:
        raise Rejected(Code.MODEL_NOT_READY, f"{name}/{version}: unloading")

    async with running(gone) as bench:
        await bench.items.send([make_request()])
        await eventually(lambda: bench.answers.requests)

    assert bench.answers.requests[0].failure is not None
    assert bench.answers.requests[0].failure.code == Code.MODEL_NOT_READY


async def test_revoked_request_is_passed_on_and_joins_no_batch() -> None:
    """It joins no batch, and its bytes are given back by whoever answers."""
    async with running(limited(Limits())) as bench:
        revoked, good = make_request(), make_request()
        receipt_of(revoked).revoked = True
        await bench.items.send([revoked, good])
        batch = await bench.batch_queue.consumer(KEY).pull()
        await eventually(lambda: bench.answers.requests == [revoked])

    assert batch is not None
    assert batch.requests == [good]


async def test_draining_batcher_releases_all_waiting_requests() -> None:
    """A stop waits for no delay; the pulls end when nothing is left."""
    bench = BatcherHarness(limited(Limits(max_batch_size=2, max_queue_delay_ms=3_600_000)))
    requests = [make_request() for _ in range(5)]
    pulled: list[Request] = []

    async def pull() -> None:
        consumer = bench.batch_queue.consumer(KEY)
        while (batch := await consumer.pull()) is not None:
            pulled.extend(batch.requests)

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.batcher.run())
        tasks.create_task(pull())
        await bench.items.send(requests)
        bench.items.close()

    assert pulled == requests
    assert bench.answers.closed


async def test_draining_batcher_waits_for_last_deadline() -> None:
    """With nobody to pull, draining ends when what waits has expired."""
    bench = BatcherHarness(limited(Limits()))
    request = make_request(deadline_ms=NOW_US // 1000 + 5)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.batcher.run())
        await bench.items.send([request])
        bench.items.close()
        await asyncio.sleep(0)
        bench.clock.now_us += 5000

    assert bench.answers.requests == [request]


async def test_batch_for_busy_instance_closes_at_its_announced_time() -> None:
    """Nothing comes in, and nobody asks again: the moment alone closes the batch."""
    async with running(limited(Limits())) as bench:
        await bench.items.send([make_request()])
        consumer = bench.batch_queue.consumer(KEY)
        waiting = asyncio.create_task(consumer.pull(close_at_us=NOW_US + 20_000))
        await asyncio.sleep(0)
        assert not waiting.done()

        bench.clock.now_us += 20_000
        batch = await asyncio.wait_for(waiting, DEADLINE_S)

    assert batch is not None
    assert batch.reason == "just_in_time"


async def test_instance_free_early_gets_waiting_requests() -> None:
    """Its run was shorter than predicted."""
    async with running(limited(Limits())) as bench:
        await bench.items.send([make_request()])
        consumer = bench.batch_queue.consumer(KEY)
        waiting = asyncio.create_task(consumer.pull(close_at_us=NOW_US + 3_600_000_000))
        await asyncio.sleep(0)

        consumer.now_idle()
        batch = await asyncio.wait_for(waiting, DEADLINE_S)

    assert batch is not None
    assert batch.reason == "idle"


async def test_cancelled_request_is_answered_and_cancelling_record_is_not() -> None:
    """The record names its target by place or correlation id; both are acknowledged and counted."""
    async with running(limited(Limits())) as bench:
        by_place, kept = make_request(), make_request()
        by_name = make_request(envelope=Envelope(correlation_id=b"mine"))
        await bench.items.send([by_place, kept, by_name])
        records = [
            make_request("", version="", envelope=envelope)
            for envelope in (
                Envelope(cancels=("t", 0, by_place.offset)),
                Envelope(cancels=BY_CORRELATION, correlation_id=b"mine"),
                Envelope(cancels=BY_CORRELATION, correlation_id=b"gone"),
            )
        ]

        await bench.items.send(records)
        await eventually(lambda: len(bench.answers.requests) == 2)

        assert {id(one) for one in bench.answers.requests} == {id(by_place), id(by_name)}
        assert [receipt_of(one).acked for one in records] == [1, 1, 1]
        assert counted(bench.instruments, "cancellations_total", outcome="ended") == 2
        assert counted(bench.instruments, "cancellations_total", outcome="none") == 1
        batch = await bench.batch_queue.consumer(KEY).pull()
        assert batch is not None
        assert batch.requests == [kept]


async def test_request_that_runs_alone_has_its_batch_in_epoch_time() -> None:
    """As in every other batch: answers and metrics have the time between it and other moments."""
    assignment = make_assignment()
    ack_handle = assignment.admit(0, 10)
    record = Record("headrace.requests", 0, 0, 0, None, b"", ())
    request = make_request()
    request.ack_handle = IsolatedAck(Isolated(assignment, record, ack_handle), 0)
    async with running(limited(Limits()), steady=StillClock(1_000_000)) as bench:
        await bench.items.send([request])
        batch = await bench.batch_queue.consumer(KEY).pull()

    assert batch is not None
    assert batch.reason == "alone"
    assert request.batch.formed_us == NOW_US
