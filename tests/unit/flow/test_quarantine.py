"""Records that a source lets in after an unclean end, and the crash markers that it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from headrace.consumer.source import Source
from headrace.consumer.source_settings import SourceSettings
from headrace.crash_isolation.isolation import Isolation
from headrace.crash_isolation.markers import NOBODY, CrashMarkers
from headrace.crash_isolation.poison_search import CLEAN, CrashMarker
from headrace.delivery.inflight import InFlightAck
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicInfo, TopicPartition
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from tests.support.conditions import eventually
from tests.support.logs import RecordingListener, write_to
from tests.support.tuning import QUICK

ONE, TWO = (TopicPartition("requests", number) for number in range(2))
NO_REQUEST = b"cancels another"


@pytest.fixture
async def log() -> MemoryLog:
    """With the topic, of two partitions, and ten records in the first."""
    log = MemoryLog()
    await log.create_topics([TopicInfo("requests", 2, {})], replication_factor=1)
    await write_to(log, ONE, *[b"value"] * 10)
    return log


class Stage:
    """A stage that admits what it receives and acknowledges when it is told to.

    Attributes:
        may_go_on: it receives no more while this is not set.
        may_end_alone: likewise, after what it received alone.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.ack_handles: list[InFlightAck] = []
        self.isolations: list[Isolation | None] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.may_end_alone = asyncio.Event()
        self.may_end_alone.set()
        self.registry = CollectorRegistry()

    async def run(self) -> None:
        while (delivery := await self.source.receive()) is not None:
            isolation = delivery.isolation
            self.isolations.append(isolation)
            if isolation is not None and isolation.isolated is not None:
                self.ack_handles.append(isolation.isolated.ack_handle)
                await self.may_end_alone.wait()
            else:
                for record in delivery.records:
                    if record.offset in delivery.assignment.progress:
                        delivery.assignment.skip_answered(record.offset)
                    elif record.value == NO_REQUEST:
                        delivery.assignment.ignore(record.offset)
                    elif isolation is not None and isolation.is_suspect(record.offset):
                        isolation.park_record(delivery.assignment, record)
                    else:
                        self.ack_handles.append(delivery.assignment.admit(record.offset, 10))
            await self.may_go_on.wait()

    @property
    def holds(self) -> list[str]:
        """Return the records in flight, as `partition:offset`."""
        return sorted(
            f"{one.assignment.partition.partition}:{one.offset}" for one in self.ack_handles
        )

    @property
    def alone(self) -> list[int]:
        """The offsets that were received alone, in order."""
        return [each.isolated.record.offset for each in self.isolations if each and each.isolated]

    def ack_all(self) -> None:
        ack_handles, self.ack_handles = self.ack_handles, []
        for ack_handle in ack_handles:
            ack_handle.ack()


@asynccontextmanager
async def reading(log: MemoryLog, *, dies: bool = False) -> AsyncIterator[Stage]:
    """A running source with a stage behind it; leaving stops it, or breaks it off at once."""
    settings = SourceSettings("requests", "group", "group", True, 1_000_000, 5.0, max_attempts=2)
    registry = CollectorRegistry()
    source = Source(log, settings, Metrics(registry), tuning=QUICK)
    stage = Stage(source)
    stage.registry = registry
    async with asyncio.TaskGroup() as tasks, source:
        running = tasks.create_task(source.run())
        work = tasks.create_task(stage.run())
        await source.assigned.wait()
        yield stage
        if dies:
            running.cancel()
            work.cancel()
        else:
            source.stop_reading()
            await work
            await source.close_down(0.1)
            await running


async def marked(log: MemoryLog, partition: TopicPartition = ONE) -> CrashMarker:
    """Return the crash marker of a partition."""
    return (await CrashMarkers(log, "group").read([partition]))[partition][0]


async def mark(log: MemoryLog, of: CrashMarker) -> None:
    """Leave a mark as a process that is no more would have."""
    await CrashMarkers(log, "group").write({ONE: of}, NOBODY)


async def test_crash_marker_is_written_before_first_record_is_admitted(log: MemoryLog) -> None:
    """While the mark cannot be written, nothing comes."""
    log.faults.groups.hold_commits()
    async with reading_soon(log) as stage:
        held = stage.holds
        log.faults.groups.release_commits()
        await eventually(lambda: len(stage.ack_handles) == 10)

        assert held == []
        assert (await marked(log)).is_open
        stage.ack_all()


@asynccontextmanager
async def reading_soon(log: MemoryLog) -> AsyncIterator[Stage]:
    """A source that has not been assigned anything yet."""
    settings = SourceSettings("requests", "group", "group", True, 1_000_000, 5.0, max_attempts=2)
    registry = CollectorRegistry()
    source = Source(log, settings, Metrics(registry), tuning=QUICK)
    stage = Stage(source)
    stage.registry = registry
    async with asyncio.TaskGroup() as tasks, source:
        running = tasks.create_task(source.run())
        work = tasks.create_task(stage.run())
        await asyncio.sleep(0)
        yield stage
        source.stop_reading()
        await work
        await source.close_down(5)
        await running


async def test_clean_end_leaves_clean_crash_marker(log: MemoryLog) -> None:
    """The next owner suspects nothing."""
    async with reading(log) as stage:
        await eventually(lambda: len(stage.ack_handles) == 10)
        stage.ack_all()

    assert await marked(log) == CLEAN


async def test_clean_end_with_unfinished_work_leaves_clean_crash_marker(log: MemoryLog) -> None:
    """Records that were not answered in time are not suspects, as nothing ended a process."""
    async with reading(log) as stage:
        await eventually(lambda: len(stage.ack_handles) == 10)

    assert await marked(log) == CLEAN


async def test_stop_during_rebalance_leaves_clean_crash_marker(log: MemoryLog) -> None:
    """What is assigned while the process ends is marked as being read, and never is."""
    groups, may_rejoin = log.faults.groups, asyncio.Event()
    may_rejoin.set()

    async def wait(partitions: Sequence[TopicPartition]) -> None:
        await may_rejoin.wait()

    other = RecordingListener(revoked=wait)
    async with log.member("group", ["requests"], other), reading(log, dies=True) as stage:
        await eventually(lambda: other.held and stage.source.tracker.assignments)
        (partition,) = {ONE, TWO} - other.held
        stage.ack_all()
        may_rejoin.clear()
        groups.force_rebalance("group")
        await eventually(_becomes(log, CLEAN, partition))
        groups.hold_commits()
        may_rejoin.set()
        await eventually(lambda: groups.held_commits == 1)
        stage.source.stop_reading()
        await stage.source.close_down(0.1)
        groups.release_commits()
        for _ in range(50):
            await asyncio.sleep(0)

    assert [await marked(log, each) for each in (ONE, TWO)] == [CLEAN, CLEAN]


async def test_crash_marker_that_was_not_closed_in_time_is_no_unclean_end(log: MemoryLog) -> None:
    """The member that wrote it gets its partition back: no process has ended."""
    with capture_logs() as lines:
        async with reading(log) as stage:
            stage.may_go_on.clear()
            await eventually(lambda: len(stage.ack_handles) == 10)
            stage.ack_all()
            await eventually(_is_answered(log, 10))
            await write_to(log, ONE, b"left in the log by the rebalance")
            log.faults.groups.hold_commits()
            log.faults.groups.force_rebalance("group")
            await eventually(lambda: any(line["event"] == Event.REVOKED for line in lines))
            log.faults.groups.release_commits()
            stage.may_go_on.set()
            await eventually(lambda: len(stage.ack_handles) == 1)
            stage.ack_all()

    assert Event.QUARANTINE_STARTED not in [line["event"] for line in lines]


def _is_answered(log: MemoryLog, base: int) -> Callable[[], Awaitable[bool]]:
    async def is_answered() -> bool:
        found = (await log.committed("group", [ONE]))[ONE]
        return found is not None and found.offset == base

    return is_answered


async def test_first_unclean_end_delays_no_record(log: MemoryLog) -> None:
    """Admitted records are let in again with all others, and the marker counts the end."""
    async with reading(log, dies=True) as stage:
        await eventually(lambda: len(stage.ack_handles) == 10)
    async with reading(log) as stage:
        await write_to(log, TWO, b"later")
        await eventually(lambda: len(stage.ack_handles) == 11)
        during = await marked(log)
        stage.ack_all()
        await eventually(_becomes(log, CrashMarker(True)))

    assert during == CrashMarker(True, 10, 1)


@pytest.mark.parametrize(("ends", "started"), [(0, []), (1, [0])])
async def test_quarantine_is_logged_from_second_unclean_end(
    log: MemoryLog, ends: int, started: list[int]
) -> None:
    """The first one changes nothing; after the second what runs is marked, with no suspect yet."""
    await mark(log, CrashMarker(True, 10, ends))
    with capture_logs() as lines:
        async with reading(log) as stage:
            await eventually(lambda: len(stage.ack_handles) == 10)
            stage.ack_all()

    assert [
        line["offsets"] for line in lines if line["event"] == Event.QUARANTINE_STARTED
    ] == started


def _becomes(
    log: MemoryLog, mark: CrashMarker, partition: TopicPartition = ONE
) -> Callable[[], Awaitable[bool]]:
    async def is_marked() -> bool:
        return await marked(log, partition) == mark

    return is_marked


async def test_second_unclean_end_starts_poison_search(log: MemoryLog) -> None:
    """Records that the stage works on are marked, and none is held up."""
    await mark(log, CrashMarker(True, 10, 1))
    async with reading(log) as stage:
        stage.may_go_on.clear()
        await eventually(lambda: len(stage.ack_handles) == 10)
        during = await marked(log)
        stage.may_go_on.set()
        await eventually(_becomes(log, CrashMarker(True, 10, 2)))
        stage.ack_all()
        await eventually(_becomes(log, CrashMarker(True)))

    assert during == CrashMarker(True, 10, 2, ((0, 10),))


async def test_suspects_of_unclean_end_run_alone(log: MemoryLog) -> None:
    """Everything else comes as it would; each of these is marked, and survives by itself."""
    await mark(log, CrashMarker(True, 10, 2, ((3, 4), (6, 7))))
    await write_to(log, TWO, b"other")
    async with reading(log) as stage:
        stage.may_end_alone.clear()
        await eventually(lambda: stage.alone == [3])
        during = await marked(log)
        stage.may_end_alone.set()
        await eventually(lambda: stage.alone == [3, 6] and len(stage.ack_handles) == 11)
        stage.ack_all()
        await eventually(_becomes(log, CrashMarker(True)))

    assert during == CrashMarker(True, 10, 3, ((3, 4),), 0, {}, ((3, 4), (6, 7)))


async def test_unclean_end_while_suspect_ran_alone_condemns_at_max_attempts(log: MemoryLog) -> None:
    """At the second one the stage is told, and it does not come alone any more."""
    await mark(log, CrashMarker(True, 10, 3, ((3, 4),), 0, {(3, 0): 1}, ((3, 4), (6, 7))))
    async with reading(log) as stage:
        await eventually(lambda: len(stage.ack_handles) == 10)
        isolation = stage.isolations[0]
        suspects = stage.registry.get_sample_value("headrace_quarantined_records")
        stage.ack_all()
        await eventually(
            lambda: stage.registry.get_sample_value("headrace_quarantined_records") == 0
        )
        attempts = stage.registry.get_sample_value("headrace_isolated_crashes_total")
        poisoned = stage.registry.get_sample_value("headrace_poisoned_requests_total")

    assert isolation is not None
    assert isolation.poisoned == {(3, 0)}
    assert (attempts, poisoned, stage.alone) == (1, 1, [6])
    assert suspects is not None


async def test_suspect_offsets_without_request_are_forgotten(log: MemoryLog) -> None:
    """Records that nobody answers, and offsets without any, keep no search going."""
    await write_to(log, ONE, NO_REQUEST)
    log.faults.partitions.skip_offsets(ONE, 3)
    await mark(log, CrashMarker(True, 14, 2, ((9, 14),)))
    async with reading(log) as stage:
        await eventually(lambda: len(stage.ack_handles) == 10)
        stage.ack_all()
        await eventually(
            lambda: stage.registry.get_sample_value("headrace_quarantined_records") == 0
        )


async def test_suspects_beyond_what_log_holds_are_forgotten(log: MemoryLog) -> None:
    """The topic is another one than that which was marked."""
    await mark(log, CrashMarker(True, 500, 2, ((400, 500),)))
    async with reading(log) as stage:
        await eventually(lambda: len(stage.ack_handles) == 10)
        stage.ack_all()
        await write_to(log, ONE, b"new")
        await eventually(lambda: stage.holds == ["0:10"])
        stage.ack_all()

    assert await marked(log) == CLEAN


async def test_poison_search_continues_after_rebalance(log: MemoryLog) -> None:
    """Suspects stay suspects until they are answered, and a rebalance is not an attempt."""
    await mark(log, CrashMarker(False, 10, 3, suspects=((3, 5),)))
    async with reading(log) as stage:
        await eventually(lambda: stage.alone == [3, 4])
        log.faults.groups.force_rebalance("group")
        stage.ack_all()
        await eventually(_becomes(log, CrashMarker(True)))
        attempts = stage.registry.get_sample_value("headrace_isolated_crashes_total")

    assert attempts == 0


async def test_failed_crash_marker_write_is_retried(log: MemoryLog) -> None:
    """Meanwhile nothing is let in; no suspect ever runs unmarked."""
    await mark(log, CrashMarker(True, 10, 1))
    async with reading(log) as stage:
        await eventually(lambda: len(stage.ack_handles) == 10)
        await write_to(log, ONE, b"new")
        log.faults.groups.hold_commits()
        await write_to(log, TWO, b"new")
        held = stage.holds
        log.faults.groups.release_commits()
        await eventually(lambda: len(stage.ack_handles) == 12)
        stage.ack_all()

    assert "1:0" not in held
