"""What lies ahead of a source, on the embedded log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from headrace.flow import backlog as backlog_module
from headrace.flow.source import Source
from headrace.flow.source_settings import SourceSettings
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicInfo, TopicPartition
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.snapshots import SourceSnapshot
from tests.support.conditions import eventually
from tests.support.logs import write_to

TOPIC = "work"
FIRST = TopicPartition(TOPIC, 0)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look and ask so often that no test has to wait."""
    monkeypatch.setattr(backlog_module, "LOOK_S", 0.01)
    monkeypatch.setattr(backlog_module, "ASK_S", 0.01)


@asynccontextmanager
async def reading(log: MemoryLog) -> AsyncIterator[Source]:
    """A source that reads and commits."""
    await log.create_topics([TopicInfo(TOPIC, 1, {})], replication_factor=1)
    settings = SourceSettings(TOPIC, "group", "group", True, 1_000_000, 1.0)
    source = Source(log, settings, Metrics(CollectorRegistry()))
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

    await eventually(is_so, deadline_s=5.0, what=f"{expected}")
    return source.snapshot()


async def test_what_is_read_and_unanswered_is_backlog_and_lag() -> None:
    """Until it is answered it is in flight; until it is committed it is lag."""
    async with MemoryLog() as log, reading(log) as source:
        await write_to(log, FIRST, *[b"value"] * 5)
        delivery = await source.receive()
        assert delivery is not None
        receipts = [delivery.assignment.admit(r.offset, 5) for r in delivery.records]
        while len(receipts) < 5:
            more = await source.receive()
            assert more is not None
            receipts += [more.assignment.admit(r.offset, 5) for r in more.records]
        snapshot = await seen(source, end=5, in_flight=5, span_records=5, lag_records=5)
        assert (snapshot.backlog_records, snapshot.in_flight_bytes) == (5, 25)

        for receipt in receipts[2:]:
            receipt.settle()
        snapshot = await seen(source, in_flight=2, span_records=5, lag_records=5)
        (partition,) = snapshot.partitions
        assert (partition.answered_records, partition.answered_ranges) == (3, 1)
        assert snapshot.backlog_records == 2
        await eventually(lambda: source.snapshot().partitions[0].metadata_characters)

        for receipt in receipts[:2]:
            receipt.settle()
        snapshot = await seen(source, base=5, lag_records=0, metadata_characters=0)
        assert (snapshot.backlog_records, snapshot.time_to_drain_s) == (0, 0.0)
        assert (snapshot.oldest_age_s, snapshot.commit.age_s) == (0.0, 0.0)
        assert snapshot.throughput_per_s is not None


async def test_a_log_that_does_not_answer_leaves_the_last_ends() -> None:
    """What is known does not become unknown."""
    async with MemoryLog() as log, reading(log) as source:
        await write_to(log, FIRST, b"value")
        await seen(source, end=1)
        log.faults.take_down()
        await asyncio.sleep(0)
        await seen(source, end=1)
        log.faults.bring_back()


async def test_a_commit_that_fails_grows_old() -> None:
    """Its age, its failures and their reason are there to see; success clears the age."""
    async with MemoryLog() as log, reading(log) as source:
        await seen(source, committed=0)
        log.faults.take_down()
        await eventually(lambda: source.last_contact_s() > 0)
        (assignment,) = source.ledger.assignments
        assignment.admit(0, 5).settle()
        await eventually(lambda: source.snapshot().commit.failures, deadline_s=5.0)
        commit = source.snapshot().commit
        assert commit.age_s > 0
        assert "unavailable" in commit.last_failure
        log.faults.bring_back()
        await eventually(lambda: source.snapshot().commit.age_s == 0, deadline_s=5.0)
