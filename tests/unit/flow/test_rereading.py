"""Deferred records are read a second time when there is room."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from headrace.consumer.deferring import Deferral, Refusal, Rereading
from headrace.consumer.ready_queue import PolledRecords, ReadyQueue
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget, BudgetShares
from headrace.delivery.inflight import Deferred, InFlightTracker
from headrace.log.errors import LogUnavailable
from headrace.log.memory import MemoryLog
from headrace.log.memory.consumer import MemoryReader
from headrace.log.port import TopicInfo, TopicPartition
from headrace.protocol.messages import Envelope, Failure, Request
from headrace.telemetry.metrics import Metrics
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.logs import write_to
from tests.support.tuning import QUICK

ONE, TWO = (TopicPartition("requests", number) for number in range(2))
FAR_AHEAD_MS = 4_000_000_000_000
AT_ONCE = replace(
    QUICK.consumer,
    deferral_grace_s=0,
    refusal_interval_s=0,
    reread_timeout_s=0.05,
    room_check_interval_s=0,
    reread_idle_s=0.01,
)


class UnsureLog(MemoryLog):
    """A log that does not say where a partition begins when it is asked first."""

    def __init__(self) -> None:
        super().__init__()
        self.is_unsure = True

    def reader(self, partitions: Sequence[TopicPartition]) -> Any:
        return UnsureReader(super().reader(partitions), self)


class UnsureReader:
    """A reader of `UnsureLog`."""

    def __init__(self, reader: MemoryReader, log: UnsureLog) -> None:
        self.reader = reader
        self.log = log

    async def __aenter__(self) -> Self:
        await self.reader.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.reader.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reader, name)

    async def beginning_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        if self.log.is_unsure:
            self.log.is_unsure = False
            raise LogUnavailable("no broker answers")
        return await self.reader.beginning_offsets(partitions)


class RereadingHarness:
    """Partitions whose records are of 100 bytes, as is what one model may hold."""

    def __init__(self, log: MemoryLog | None = None, refusal: Refusal | None = None) -> None:
        self.log = log or MemoryLog()
        self.budget = Budget(200)
        self.tracker = InFlightTracker(self.budget, self._notify)
        self.assignment = self.tracker.assign(ONE, AckedOffsets(0))
        self.tracker.assign(TWO, AckedOffsets(0))
        self.deferral = Deferral(BudgetShares(self.budget, 0.5, 1.0), refusal, tuning=AT_ONCE)
        self.metrics = Metrics(CollectorRegistry())
        self.ready = ReadyQueue()
        self.is_wanted = True
        self.lost_ends: dict[TopicPartition, int] = {}

    def _notify(self) -> None:
        self.deferral.freed()

    async def read(self, count: int) -> list[Request]:
        """Write and read so many records. Returns those that are let in."""
        await self.log.create_topics([TopicInfo(ONE.topic, 2, {})], replication_factor=1)
        await write_to(self.log, ONE, *[b"value"] * count)
        return await self.let_in([self.request(offset) for offset in range(count)])

    async def let_in(self, requests: list[Request]) -> list[Request]:
        """Let in what has room, and defer the others."""
        kept, over, _ = self.deferral.charge(requests, is_reread=False)
        return kept + await self.deferral.wait_for_room(over)

    def request(
        self, offset: int, of: TopicPartition = ONE, *, model: str = "m", deadline_ms: int = 0
    ) -> Request:
        """Admit the record at an offset."""
        assignment = self.tracker.get(of)
        assert assignment is not None
        ack_handle = assignment.admit(offset, 100)
        envelope = Envelope(deadline_ms=deadline_ms)
        origin = (of.partition, offset, ack_handle.previous, 0)
        return Request(ack_handle, *origin, None, b"", [], envelope, model=model)

    @asynccontextmanager
    async def rereading(self) -> AsyncIterator[None]:
        """Read what has room, while the context lasts."""
        rereading = Rereading(
            self.deferral,
            self.ready,
            lambda _: self.is_wanted,
            self.lost_ends.__setitem__,
            self.metrics,
            AT_ONCE,
        )
        task = asyncio.create_task(rereading.run(self.log))
        yield
        task.cancel()
        await asyncio.wait([task])

    async def next(self) -> PolledRecords:
        """Return the records that are read next."""
        delivery = await self.ready.next()
        assert delivery is not None
        return delivery


async def test_deferred_records_are_read_again_as_budget_allows() -> None:
    """In their order, each when the one before it is answered; all is covered in the end."""
    bench = RereadingHarness()
    (first,) = await bench.read(3)
    assert list(bench.assignment.deferred) == [1, 2]
    first.ack_handle.ack()
    read: list[int] = []
    async with bench.rereading():
        for _ in range(2):
            delivery = await bench.next()
            assert delivery.is_reread
            read += [record.offset for record in delivery.records]
            requests = [bench.request(record.offset) for record in delivery.records]
            (kept,), _, _ = bench.deferral.charge(requests, is_reread=True)
            kept.ack_handle.ack()

    assert read == [1, 2]
    assert bench.assignment.progress == AckedOffsets(3)
    assert bench.budget.used_bytes == 0


async def test_deadline_holds_after_failed_reading_and_clock_set_back() -> None:
    """A record that was picked because it was late, and could not be read, is late once more."""
    bench = RereadingHarness()
    await bench.let_in([bench.request(offset, deadline_ms=100) for offset in range(2)])
    records = bench.deferral.records
    picked = records.pick(100_000, 0.0)
    assert [each.offset for each in picked[bench.assignment]] == [1]

    records.put_back(picked[bench.assignment])

    assert records.pick(50_000, 0.0) == {}
    assert records.pick(100_000, 0.0) == picked


async def test_cancelling_records_are_not_deferred() -> None:
    """Read again later, they would find nothing to cancel. On `items` they have ack handles."""
    bench = RereadingHarness()
    await bench.read(2)
    cancelling = [bench.request(offset, TWO, model="") for offset in range(3)]
    for each in cancelling:
        each.envelope = Envelope(cancels=("requests", 0, 1))

    assert bench.deferral.charge(cancelling, is_reread=False) == (cancelling, [], [])


async def test_rereading_skips_and_counts_deleted_records() -> None:
    """Retention may take what is deferred; nobody can answer it then, and the base goes on."""
    bench = RereadingHarness()
    (first,) = await bench.read(3)
    bench.log.faults.partitions.trim(ONE, 2)
    first.ack_handle.ack()
    async with bench.rereading():
        delivery = await bench.next()
        assert delivery.skipped == 1
        bench.assignment.admit(delivery.skipped, 0).ack()
        delivery = await bench.next()

    assert [record.offset for record in delivery.records] == [2]
    assert bench.metrics.registry.get_sample_value("headrace_skipped_records_total") == 1
    assert bench.assignment.progress == AckedOffsets(2)


async def test_rereading_skips_and_counts_unreadable_records() -> None:
    """A record that a broker damaged while it was deferred is passed over, as it is at first."""
    bench = RereadingHarness()
    await bench.log.create_topics([TopicInfo(ONE.topic, 2, {})], replication_factor=1)
    await write_to(bench.log, ONE, b"value")
    bench.log.faults.partitions.write_unreadable(ONE, 1)
    await write_to(bench.log, ONE, b"value")
    (first,) = await bench.let_in([bench.request(offset) for offset in range(3)])
    first.ack_handle.ack()
    async with asyncio.timeout(DEADLINE_S), bench.rereading():
        delivery = await bench.next()
        assert delivery.skipped == 1
        bench.assignment.admit(delivery.skipped, 0).ack()
        delivery = await bench.next()

    assert [record.offset for record in delivery.records] == [2]
    unreadable = {"code": "INVALID_REQUEST"}
    assert (
        bench.metrics.registry.get_sample_value("headrace_unreadable_records_total", unreadable)
        == 1
    )
    assert bench.assignment.progress == AckedOffsets(2)


@pytest.mark.parametrize("end", [0, 1])
async def test_rereading_reports_lost_end_of_log(end: int) -> None:
    """The next deferred record lies beyond the new end, or exactly there."""
    bench = RereadingHarness()
    (first,) = await bench.read(4)
    bench.log.faults.partitions.truncate(ONE, end)
    first.ack_handle.ack()
    async with bench.rereading():
        await eventually(lambda: bench.lost_ends)

    assert bench.lost_ends[ONE] >= end


async def test_rereading_of_revoked_partition_frees_reserved_budget() -> None:
    """A record that was read again for nobody keeps no room from others."""
    bench = RereadingHarness()
    (first,) = await bench.read(2)
    first.ack_handle.ack()
    async with bench.rereading():
        await bench.next()
        assert bench.budget.used_bytes == 100
        bench.tracker.revoke(ONE)
        bench.deferral.records.forget_revoked()

    assert bench.budget.used_bytes == 0
    assert not bench.deferral.records.partitions()


async def test_rereading_error_of_one_partition_leaves_others_read() -> None:
    """Records picked of both partitions are given back, and picked again when the log answers."""
    bench = RereadingHarness(UnsureLog())
    (first,) = await bench.read(2)
    await write_to(bench.log, TWO, *[b"value"] * 2)
    (second,) = await bench.let_in([bench.request(offset, TWO, model="n") for offset in range(2)])
    bench.log.faults.partitions.trim(ONE, 2)
    bench.log.faults.partitions.trim(TWO, 2)
    first.ack_handle.ack()
    second.ack_handle.ack()
    async with asyncio.timeout(DEADLINE_S), bench.rereading():
        lost = {(await bench.next()).assignment.partition for _ in range(2)}

    assert lost == {ONE, TWO}


async def test_answered_deferred_requests_are_forgotten_before_their_deadlines() -> None:
    """However far a caller's deadline lies ahead, no memory is kept until then."""
    bench = RereadingHarness()
    (first,) = await bench.let_in([bench.request(0)])
    for offset in range(1, 5000):
        await bench.let_in([bench.request(offset, deadline_ms=FAR_AHEAD_MS)])
        first.ack_handle.ack()
        bench.deferral.pick()
        (first,) = bench.deferral.charge([bench.request(offset)], is_reread=True).kept

    assert _living(Deferred) < 2500


async def test_refusals_of_ended_deferred_requests_are_forgotten() -> None:
    """A record that was read again, since it would be late, may be refused before it is asked."""
    is_late = False
    bench = RereadingHarness(
        refusal=lambda _envelope, _rows: Late("OVERLOADED", "", "") if is_late else None
    )
    await bench.let_in([bench.request(0)])
    for offset in range(1, 100):
        is_late = False
        await bench.let_in([bench.request(offset, deadline_ms=FAR_AHEAD_MS)])
        is_late = True
        assert bench.deferral.pick()
        bench.request(offset).ack_handle.ack()

    assert _living(Late) < 10


class Late(Failure):
    """A failure that the garbage collector knows."""


def _living(kind: type) -> int:
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


async def test_requests_of_one_record_are_charged_deferred_and_read_again_together() -> None:
    """A record is over its share with all of its requests, however many of them ended before."""
    bench = RereadingHarness()
    (first,) = await bench.read(1)
    await write_to(bench.log, ONE, b"value")
    requests = [bench.request(1, deadline_ms=FAR_AHEAD_MS + 5)]
    requests[0].ack_handle.parts = 3  # type: ignore[attr-defined]
    for deadline_ms in (FAR_AHEAD_MS, 0):
        request = Request(requests[0].ack_handle, 0, 2, 1, 0, None, b"", [], Envelope(), model="m")
        request.envelope = Envelope(deadline_ms=deadline_ms)
        requests.append(request)

    kept = await bench.let_in(requests)
    deferred = bench.assignment.deferred[1]
    first.ack_handle.ack()
    async with bench.rereading():
        delivery = await bench.next()

    assert kept == []
    assert (deferred.rows, deferred.envelope.deadline_ms) == (3, FAR_AHEAD_MS)
    assert [record.offset for record in delivery.records] == [1]
    assert bench.assignment.in_flight == 0
