"""Backlog and lag of a source, on the embedded log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from headrace.consumer.lag import Stall
from headrace.consumer.source import Source
from headrace.consumer.source_settings import SourceSettings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, TopicInfo, TopicPartition
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.snapshots import SourceSnapshot
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.logs import write_to
from tests.support.tuning import QUICK

TOPIC = "work"
FIRST = TopicPartition(TOPIC, 0)


@asynccontextmanager
async def reading(log: MemoryLog) -> AsyncIterator[Source]:
    """A source that reads and commits."""
    await log.create_topics([TopicInfo(TOPIC, 1, {})], replication_factor=1)
    settings = SourceSettings(TOPIC, "group", "group", True, 1_000_000, 1.0)
    source = Source(log, settings, Metrics(CollectorRegistry()), tuning=QUICK)
    async with source, asyncio.TaskGroup() as tasks:
        tasks.create_task(source.run(), name="source")
        await source.assigned.wait()
        try:
            yield source
        finally:
            source.stop_reading()
            await source.close_down(0)


async def seen(source: Source, **expected: object) -> SourceSnapshot:
    """The snapshot once its one partition is as expected."""

    def is_so() -> bool:
        (partition,) = source.snapshot().partitions
        return all(getattr(partition, name) == value for name, value in expected.items())

    await eventually(is_so, what=f"{expected}")
    return source.snapshot()


async def test_unanswered_record_counts_as_backlog_and_lag() -> None:
    """A record is in flight until it is answered, and counts as lag until it is committed."""
    async with MemoryLog() as log, reading(log) as source:
        await write_to(log, FIRST, *[b"value"] * 5)
        delivery = await source.receive()
        assert delivery is not None
        ack_handles = [delivery.assignment.admit(r.offset, 5) for r in delivery.records]
        while len(ack_handles) < 5:
            more = await source.receive()
            assert more is not None
            ack_handles += [more.assignment.admit(r.offset, 5) for r in more.records]
        snapshot = await seen(source, end=5, in_flight=5, span_records=5, lag_records=5)
        assert (snapshot.backlog_records, snapshot.in_flight_bytes) == (5, 25)

        for ack_handle in ack_handles[2:]:
            ack_handle.ack()
        snapshot = await seen(source, in_flight=2, span_records=5, lag_records=5)
        (partition,) = snapshot.partitions
        assert (partition.answered_records, partition.answered_ranges) == (3, 1)
        assert snapshot.backlog_records == 2
        await eventually(lambda: source.snapshot().partitions[0].metadata_characters)

        for ack_handle in ack_handles[:2]:
            ack_handle.ack()
        snapshot = await seen(source, base=5, lag_records=0, metadata_characters=0)
        assert (snapshot.backlog_records, snapshot.time_to_drain_s) == (0, 0.0)
        assert (snapshot.oldest_age_s, snapshot.commit.age_s) == (0.0, 0.0)
        assert snapshot.throughput_per_s is not None


async def test_record_without_timestamp_is_as_old_as_its_reading() -> None:
    """Kafka's -1 is no time: its age would be that of the epoch, which sets off an alert."""
    async with MemoryLog() as log, reading(log) as source:
        async with log.producer() as producer:
            for sent in await producer.send(FIRST, [NewRecord(None, b"value", timestamp_ms=-1)]):
                await sent.acknowledged
        delivery = await source.receive()
        assert delivery is not None
        ack_handle = delivery.assignment.admit(0, 5)
        snapshot = await seen(source, in_flight=1)
        ack_handle.ack()

    assert snapshot.oldest_age_s < DEADLINE_S


async def test_unreachable_log_keeps_last_known_ends() -> None:
    """Ends that were read before the log became unavailable stay known."""
    async with MemoryLog() as log, reading(log) as source:
        await write_to(log, FIRST, b"value")
        await seen(source, end=1)
        log.faults.brokers.take_down()
        await asyncio.sleep(0)
        await seen(source, end=1)
        log.faults.brokers.bring_back()


async def test_failed_commit_grows_commit_age() -> None:
    """Its age, its failures and their reason are there to see; success clears the age."""
    async with MemoryLog() as log, reading(log) as source:
        await seen(source, committed=0)
        log.faults.brokers.take_down()
        await eventually(lambda: source.last_contact_s() > 0)
        (assignment,) = source.tracker.assignments
        assignment.admit(0, 5).ack()
        await eventually(lambda: source.snapshot().commit.failures)
        commit = source.snapshot().commit
        assert commit.age_s > 0
        assert "unavailable" in commit.last_failure
        log.faults.brokers.bring_back()
        await eventually(lambda: source.snapshot().commit.age_s == 0)


async def test_stall_grows_while_no_waiting_record_is_answered() -> None:
    """An answer ends it, as does an empty log."""
    log = MemoryLog()
    async with reading(log) as source:
        await write_to(log, FIRST, b"1", b"2")
        delivery = await source.receive()
        assert delivery is not None
        ack_handles = [delivery.assignment.admit(each.offset, 1) for each in delivery.records]
        await eventually(lambda: source.snapshot().stalled_s > 0.05)
        ack_handles[0].ack()
        assert source.snapshot().stalled_s == 0
        await eventually(lambda: source.snapshot().stalled_s > 0)
        for ack_handle in ack_handles[1:]:
            ack_handle.ack()
        await eventually(lambda: source.snapshot().backlog_records == 0)
        assert source.snapshot().stalled_s == 0


async def test_revoked_work_does_not_end_stall() -> None:
    """An owner that loses its partitions again and again does not count as one that gets on."""
    log = MemoryLog()
    async with reading(log) as source:
        await write_to(log, FIRST, b"1")
        delivery = await source.receive()
        assert delivery is not None
        ack_handle = delivery.assignment.admit(0, 1)
        await eventually(lambda: source.snapshot().stalled_s > 0)
        source.tracker.assign(FIRST, AckedOffsets(0))
        ack_handle.ack()

        assert source.snapshot().stalled_s > 0


def test_stall_without_waiting_records_is_zero() -> None:
    """An idle source is not stalled, however long ago its last answer was."""
    stall = Stall()
    stall.observe(100.0, 5, waits=False)
    assert stall.for_s(1000.0, 5) == 0
    stall.observe(1000.0, 5, waits=True)
    assert stall.for_s(1030.0, 5) == 30
    stall.observe(1031.0, 6, waits=True)
    assert stall.for_s(1040.0, 6) == 9


async def test_end_offset_without_record_is_not_lag() -> None:
    """The marker of a transaction takes an offset, and nobody will ever answer it."""
    log = MemoryLog()
    async with reading(log) as source:
        async with log.transactional_producer("writer", "group of a caller") as producer:
            await producer.commit_transaction({FIRST: [NewRecord(None, b"1")]}, {})
        delivery = await source.receive()
        assert delivery is not None
        delivery.assignment.admit(delivery.records[0].offset, 1).ack()
        (partition,) = (await seen(source, end=2)).partitions
        looks: list[float] = []

        def look_often() -> bool:
            looks.append(source.snapshot().stalled_s)
            return len(looks) > 5

        await eventually(look_often)

        assert partition.backlog_records == 1
        assert not any(looks)
