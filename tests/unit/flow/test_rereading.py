"""Deferred records are read a second time when there is room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from headrace.consumer.deferring import Deferral, DeferringTimes
from headrace.consumer.ready_queue import Arrivals, Delivery
from headrace.consumer.rereading import Rereading, RereadingTimes
from headrace.delivery.acked_offsets import Progress
from headrace.delivery.budget import Budget, FairQueue
from headrace.delivery.inflight import InFlightTracker
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicInfo, TopicPartition
from headrace.protocol.messages import Envelope, Request
from headrace.telemetry.metrics import Metrics
from tests.support.logs import write_to

ONE = TopicPartition("requests", 0)


class Bench:
    """A partition whose records are of 100 bytes, as is what one model may hold."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.budget = Budget(200)
        self.tracker = InFlightTracker(self.budget, self._notify)
        self.assignment = self.tracker.assign(ONE, Progress(0))
        self.deferral = Deferral(FairQueue(self.budget, 0.5, 1.0), None, DeferringTimes(grace_s=0))
        self.metrics = Metrics(CollectorRegistry())
        self.ready = Arrivals()
        self.is_wanted = True

    def _notify(self) -> None:
        self.deferral.freed()

    async def read(self, count: int) -> list[Request]:
        """Write and read so many records. Returns those that are let in."""
        await self.log.create_topics([TopicInfo(ONE.topic, 1, {})], replication_factor=1)
        await write_to(self.log, ONE, *[b"value"] * count)
        requests = [self.request(offset) for offset in range(count)]
        kept, over, _ = self.deferral.sort_out(requests, again=False)
        return kept + await self.deferral.wait_for_room(over)

    def request(self, offset: int) -> Request:
        """Admit the record at an offset."""
        ack_handle = self.assignment.admit(offset, 100)
        envelope = Envelope()
        return Request(
            ack_handle, 0, offset, ack_handle.previous, 0, None, b"", [], envelope, model="m"
        )

    @asynccontextmanager
    async def rereading(self) -> AsyncIterator[None]:
        """Read what has room, while the context lasts."""
        rereading = Rereading(
            self.deferral,
            self.ready,
            lambda _: self.is_wanted,
            self.metrics,
            RereadingTimes(pace_s=0, keep_s=0.01),
        )
        task = asyncio.create_task(rereading.run(self.log))
        yield
        task.cancel()
        await asyncio.wait([task])

    async def next(self) -> Delivery:
        """What is read next."""
        delivery = await self.ready.next()
        assert delivery is not None
        return delivery


async def test_records_are_read_again_one_after_the_other_as_there_is_room() -> None:
    """In their order, each when the one before it is answered; all is covered in the end."""
    bench = Bench()
    (first,) = await bench.read(3)
    assert list(bench.assignment.deferred) == [1, 2]
    first.ack_handle.ack()
    read: list[int] = []
    async with bench.rereading():
        for _ in range(2):
            delivery = await bench.next()
            assert delivery.again
            read += [record.offset for record in delivery.records]
            requests = [bench.request(record.offset) for record in delivery.records]
            (kept,), _, _ = bench.deferral.sort_out(requests, again=True)
            kept.ack_handle.ack()

    assert read == [1, 2]
    assert bench.assignment.progress == Progress(3)
    assert bench.budget.used_bytes == 0


async def test_deleted_records_are_skipped_and_counted() -> None:
    """Retention may take what is deferred; nobody can answer it then, and the base goes on."""
    bench = Bench()
    (first,) = await bench.read(3)
    bench.log.faults.trim(ONE, 2)
    first.ack_handle.ack()
    async with bench.rereading():
        delivery = await bench.next()
        assert delivery.skipped == 1
        bench.assignment.admit(delivery.skipped, 0).ack()
        delivery = await bench.next()

    assert [record.offset for record in delivery.records] == [2]
    assert bench.metrics.registry.get_sample_value("headrace_skipped_total") == 1
    assert bench.assignment.progress == Progress(2)


async def test_revoked_assignment_gives_back_what_is_reserved() -> None:
    """A record that was read again for nobody keeps no room from others."""
    bench = Bench()
    (first,) = await bench.read(2)
    first.ack_handle.ack()
    async with bench.rereading():
        await bench.next()
        assert bench.budget.used_bytes == 100
        bench.tracker.revoke(ONE)
        bench.deferral.forget()

    assert bench.budget.used_bytes == 0
    assert not bench.deferral.partitions()
