"""A source on the embedded log: where it starts, what it lets in, what it commits."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs
from structlog.typing import EventDict

from headrace.consumer.ready_queue import PolledRecords
from headrace.consumer.source import Source
from headrace.consumer.source_settings import SourceSettings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.inflight import RECORD_OVERHEAD_BYTES, AssignedPartition, InFlightAck
from headrace.delivery.source_offsets import SourceOffsets
from headrace.log.errors import LogUnavailable
from headrace.log.memory import MemoryLog
from headrace.log.port import Committed, Consumer, NewRecord, Record, TopicInfo
from headrace.protocol.messages import Envelope, Request
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.logs import RecordingListener, write_to
from tests.support.sources import (
    GROUP,
    ONE,
    TOPIC,
    Stage,
    commit,
    committed,
    fill,
    make_source,
    progress,
    reading,
)
from tests.support.tuning import QUICK


@pytest.fixture
async def log() -> MemoryLog:
    """With the topic, of two partitions."""
    log = MemoryLog()
    await log.create_topics([TopicInfo(TOPIC, 2, {})], replication_factor=1)
    return log


async def test_source_starts_at_base_and_skips_answered_records(log: MemoryLog) -> None:
    """A successor reads from the committed base, and runs nothing that the metadata has."""
    await fill(log, 8)
    await commit(log, AckedOffsets(2, [(4, 6)]).committable())

    async with reading(log) as stage:
        await eventually(lambda: len(stage.offsets) == 4)
        assert stage.offsets == [2, 3, 6, 7]
        stage.ack_all()
        await eventually(lambda: _is(log, AckedOffsets(8)))


async def _is(log: MemoryLog, expected: AckedOffsets) -> bool:
    return await progress(log) == expected


async def test_waiting_source_does_not_keep_last_records(log: MemoryLog) -> None:
    """A poll may have many megabytes, and those that were answered are charged to no budget."""

    def kept() -> int:
        gc.collect()
        return sum(type(each) is PolledRecords for each in gc.get_objects()) - before

    source = make_source(log)
    before = 0
    before = kept()
    async with asyncio.TaskGroup() as tasks, source:
        running = tasks.create_task(source.run())
        await fill(log, 3)
        polled = await source.receive()
        assert polled is not None
        del polled

        await eventually(lambda: kept() == 0)

        source.stop_reading()
        await source.close_down(5)
        await running


async def test_source_without_commit_starts_at_beginning(log: MemoryLog) -> None:
    """Nothing that the log holds is left out."""
    await fill(log, 3)
    log.faults.partitions.trim(ONE, 1)

    async with reading(log) as stage:
        await eventually(lambda: stage.offsets == [1, 2])


async def test_acked_records_are_committed_in_background(log: MemoryLog) -> None:
    """The base and what is answered above it, without anybody waiting for it."""
    await fill(log, 5)
    async with reading(log) as stage:
        await eventually(lambda: len(stage.offsets) == 5)
        stage.ack([0, 3])
        await eventually(lambda: _is(log, AckedOffsets(1, [(3, 4)])))
        stage.ack([1, 2])
        await eventually(lambda: _is(log, AckedOffsets(4)))


async def test_only_one_commit_is_in_flight(log: MemoryLog) -> None:
    """While the log answers slowly there is no second commit, not at the end either."""
    await fill(log, 5)
    groups = log.faults.groups

    async with reading(log) as stage:
        await eventually(lambda: len(stage.offsets) == 5)
        groups.hold_commits()
        stage.ack([0])
        await eventually(lambda: groups.held_commits == 1)
        stage.ack_all()
        closing = asyncio.create_task(stage.source.close_down(5))
        for _ in range(20):
            await asyncio.sleep(0)
            assert groups.held_commits == 1
        groups.release_commits()
        await closing
    assert await progress(log) == AckedOffsets(5)


@pytest.mark.parametrize(("answered", "figures"), [([1, 3], (2, 2)), ([1, 2, 3, 4], (0, 4))])
async def test_stop_without_last_commit_logs_how_much_it_leaves(
    log: MemoryLog, answered: list[int], figures: tuple[int, int]
) -> None:
    """Answers whose offsets are not committed are repeated, so an operator must see them."""
    consumer = replace(QUICK.consumer, last_commit_timeout_s=0.01)
    await fill(log, 5)
    with capture_logs() as lines:
        async with reading(log, replace(QUICK, consumer=consumer)) as stage:
            await eventually(lambda: len(stage.offsets) == 5)
            stage.ack([0])
            await eventually(lambda: _is(log, AckedOffsets(1)))
            log.faults.groups.hold_commits()
            stage.ack(answered)
            stage.source.stop_reading()
            await stage.source.close_down(0)
            assert not stage.source.is_drained

    assert _left(lines) == [figures]


def _left(lines: Sequence[EventDict]) -> list[tuple[int, int]]:
    """Requests in flight and answers not committed, of each line that reports them."""
    found = [line for line in lines if line["event"] == Event.DRAIN_INCOMPLETE]
    return [(line["in_flight"], line["uncommitted"]) for line in found]


async def test_end_without_drain_logs_how_much_it_leaves(log: MemoryLog) -> None:
    """A source ends without a drain when a stage fails or a second signal comes."""
    await fill(log, 5)
    source = make_source(log)
    stage = Stage(source, CollectorRegistry())
    with capture_logs() as lines:
        async with asyncio.TaskGroup() as tasks:
            async with source:
                reader = tasks.create_task(source.run())
                work = tasks.create_task(stage.run())
                await eventually(lambda: len(stage.offsets) == 5)
                log.faults.groups.hold_commits()
                stage.ack([1, 3])
            await reader
            work.cancel()

    assert _left(lines) == [(3, 2)]
    assert not source.is_drained


async def test_stop_with_slow_commit_waits_for_it_and_leaves_nothing(log: MemoryLog) -> None:
    """The last commit has what is left of the drain deadline, beyond its own time-out."""
    consumer = replace(QUICK.consumer, last_commit_timeout_s=0.0)
    await fill(log, 2)
    with capture_logs() as lines:
        async with reading(log, replace(QUICK, consumer=consumer)) as stage:
            await eventually(lambda: len(stage.offsets) == 2)
            log.faults.groups.hold_commits()
            stage.ack_all()
            stage.source.stop_reading()
            closing = asyncio.create_task(stage.source.close_down(DEADLINE_S))
            await eventually(lambda: log.faults.groups.held_commits)
            log.faults.groups.release_commits()
            await closing
            assert stage.source.is_drained

    assert _left(lines) == []
    assert await progress(log) == AckedOffsets(2)


async def test_failed_commit_is_retried(log: MemoryLog) -> None:
    """When the broker is back, what is true then is committed."""
    await fill(log, 3)
    async with reading(log) as stage:
        await eventually(lambda: len(stage.offsets) == 3)
        log.faults.brokers.take_down()
        stage.ack_all()
        await eventually(lambda: stage.source.snapshot().commit.failures)
        log.faults.brokers.bring_back()
        await eventually(lambda: _is(log, AckedOffsets(3)))


async def test_unchanged_offsets_are_committed_again(log: MemoryLog) -> None:
    """A broker forgets offsets of topics that nobody subscribes to, so that they are renewed."""
    delivery = replace(QUICK.delivery, commit_refresh_interval_s=0.05)
    async with reading(log, tuning=replace(QUICK, delivery=delivery)):
        await eventually(lambda: committed(log))
        log.faults.groups.forget_commits(GROUP)
        await eventually(lambda: committed(log))


async def test_reading_pauses_over_budget_and_resumes(log: MemoryLog) -> None:
    """Bytes in flight are bounded, and what is acknowledged makes room."""
    await fill(log, 500)
    async with reading(log, budget_bytes=1000) as stage:
        await eventually(lambda: stage.source.snapshot().paused)
        await fill(log, 500)
        await eventually(lambda: stage.offsets)
        before = len(stage.offsets)
        assert before < 1000
        stage.ack_all()
        await eventually(lambda: len(stage.offsets) > before)


async def test_waiting_small_records_are_charged_their_overhead(log: MemoryLog) -> None:
    """Behind a slow stage, empty records fill the budget as well: reading does not run away."""
    source = make_source(log, budget_bytes=100 * RECORD_OVERHEAD_BYTES)
    async with asyncio.TaskGroup() as tasks, source:
        running = tasks.create_task(source.run())
        await source.assigned.wait()
        await write_to(log, ONE, *[b""] * 5000)
        await eventually(lambda: source.snapshot().paused)

        assert source.snapshot().in_flight_bytes <= 1024 * RECORD_OVERHEAD_BYTES
        await source.close_down(0)
        await running


@pytest.mark.parametrize(
    "large",
    [
        NewRecord(b"k" * 10_000, b""),
        NewRecord(None, b"", [("name", b"v" * 10_000)]),
        NewRecord(None, b"", [("n" * 10_000, b"")]),
        NewRecord(None, b"", [("n", b"")] * 100),
    ],
    ids=["key", "header", "header name", "many headers"],
)
async def test_waiting_large_keys_and_headers_pause_reading(
    log: MemoryLog, large: NewRecord
) -> None:
    """Nothing takes what waits out of the ready queue; the budget counts more than its values."""
    source = make_source(log, budget_bytes=1_000_000)
    async with asyncio.TaskGroup() as tasks, source:
        running = tasks.create_task(source.run())
        await source.assigned.wait()
        async with log.producer() as producer:
            for sent in await producer.send(ONE, [large] * 500):
                await sent.acknowledged
        await eventually(lambda: source.snapshot().paused == "budget")

        assert source.snapshot().in_flight_bytes > 1_000_000
        await source.close_down(0)
        await running


async def test_revoked_partition_drains_and_is_committed(log: MemoryLog) -> None:
    """The rebalance waits for what is in flight, within the deadline; nothing new is let in."""
    await fill(log, 4)
    async with reading(log) as stage, AsyncExitStack() as stack:
        await eventually(lambda: len(stage.offsets) == 4)
        other = RecordingListener()
        joining = asyncio.create_task(stack.enter_async_context(log.member(GROUP, [TOPIC], other)))
        await joining
        await eventually(lambda: log.faults.groups.is_rebalancing(GROUP))
        await fill(log, 4)
        stage.ack_all()
        await eventually(lambda: other.assignments)

        assert stage.offsets[:4] == [0, 1, 2, 3]
        assert (await progress(log) or AckedOffsets(0)).base == 4


async def test_work_unanswered_at_stop_deadline_is_revoked(log: MemoryLog) -> None:
    """Requests unanswered at the deadline are revoked, and the next owner answers them."""
    await fill(log, 3)
    async with reading(log) as stage:
        await eventually(lambda: len(stage.offsets) == 3)
        stage.ack([0])
        stage.source.stop_reading()
        await stage.source.close_down(0)

        assert all(ack_handle.revoked for ack_handle in stage.ack_handles)
        assert await progress(log) == AckedOffsets(1)


async def test_work_undrained_at_deadline_is_revoked(log: MemoryLog) -> None:
    """After the deadline an ack moves nothing, and the next owner reads the records again."""
    await fill(log, 4)
    async with reading(log, drain_timeout_s=0.05) as stage, AsyncExitStack() as stack:
        await eventually(lambda: len(stage.offsets) == 4)
        stage.ack([1])
        late = list(stage.ack_handles)
        other = RecordingListener()
        await stack.enter_async_context(log.member(GROUP, [TOPIC], other))
        await eventually(lambda: other.assignments)

        assert all(ack_handle.revoked for ack_handle in late)
        assert await progress(log) == AckedOffsets(0, [(1, 2)])
        for ack_handle in late:
            stage.ack_handles.remove(ack_handle)
            ack_handle.ack()
        assert await progress(log) == AckedOffsets(0, [(1, 2)])


async def test_work_of_member_that_group_removed_is_revoked_at_once(log: MemoryLog) -> None:
    """It cannot be committed any more: what is answered meanwhile would be answered once more."""
    consumer = replace(QUICK.consumer, revocation_timeout_s=3600)
    await fill(log, 4)
    async with reading(log, replace(QUICK, consumer=consumer), drain_timeout_s=3600) as stage:
        await eventually(lambda: len(stage.offsets) == 4)
        (member_id,) = log.faults.groups.members(GROUP)
        log.faults.groups.expire_session(GROUP, member_id)
        await eventually(lambda: stage.offsets[4:] == [0, 1, 2, 3])

        assert [ack_handle.revoked for ack_handle in stage.ack_handles] == [True] * 4 + [False] * 4
        stage.ack_all()
        await eventually(lambda: _is(log, AckedOffsets(4)))


async def test_assignment_waits_for_broker(log: MemoryLog) -> None:
    """A broker that is unavailable during an assignment delays reading, and ends nothing."""
    await fill(log, 3)
    async with reading(log) as stage:
        await eventually(lambda: len(stage.offsets) == 3)
        stage.ack_all()
        await eventually(lambda: _is(log, AckedOffsets(3)))
        log.faults.brokers.fail_requests(2)  # nothing is left to commit: these look up offsets
        log.faults.groups.force_rebalance(GROUP)
        await eventually(lambda: not log.faults.brokers.requests_to_fail)
        await fill(log, 1)
        await eventually(lambda: stage.offsets == [0, 1, 2, 3])


async def test_records_deleted_while_reading_are_skipped_and_counted(log: MemoryLog) -> None:
    """Records that are gone are skipped; what follows closes the gap."""
    await fill(log, 3)
    async with reading(log, budget_bytes=20) as stage:
        await eventually(lambda: stage.source.snapshot().paused and len(stage.offsets) == 3)
        await fill(log, 10)
        log.faults.partitions.trim(ONE, 8)
        stage.ack_all()
        await eventually(lambda: stage.offsets == [0, 1, 2, *range(8, 13)])
        stage.ack_all()
        await eventually(lambda: _is(log, AckedOffsets(13)))

        assert stage.registry.get_sample_value("headrace_skipped_records_total") == 5


async def test_records_deleted_before_start_are_skipped(log: MemoryLog) -> None:
    """A base below what the log still holds moves up."""
    await fill(log, 10)
    await commit(log, AckedOffsets(2, [(3, 4)]).committable())
    log.faults.partitions.trim(ONE, 6)

    async with reading(log) as stage:
        await eventually(lambda: stage.offsets == [6, 7, 8, 9])
        stage.ack_all()
        await eventually(lambda: _is(log, AckedOffsets(10)))


async def test_topic_recreated_between_polls_is_read_from_beginning(log: MemoryLog) -> None:
    """Its requests get their answers, although others with their offsets had theirs."""
    await fill(log, 9)
    async with reading(log) as stage:
        await eventually(lambda: len(stage.offsets) == 9)
        stage.ack_all()
        await eventually(lambda: _is(log, AckedOffsets(9)))
        stage.offsets.clear()
        log.faults.topics.replace(TOPIC)
        await fill(log, 3)
        await eventually(lambda: stage.offsets == [0, 1, 2])
        stage.ack_all()
        await eventually(lambda: _is(log, AckedOffsets(3)))


async def test_lost_end_of_log_keeps_answered_offsets(log: MemoryLog) -> None:
    """Reading goes on at the new end, and what is written there is answered."""
    await fill(log, 9)
    async with reading(log) as stage:
        await eventually(lambda: len(stage.offsets) == 9)
        stage.ack([0, 1, 2, 4, 5, 6, 7, 8])
        log.faults.partitions.truncate(ONE, 7)
        stage.ack([3])
        await eventually(lambda: _is(log, AckedOffsets(7)))
        stage.offsets.clear()
        await fill(log, 2)
        await eventually(lambda: stage.offsets == [7, 8])
        stage.ack_all()
        await eventually(lambda: _is(log, AckedOffsets(9)))


async def test_ack_of_lost_record_does_not_count_for_its_successor(log: MemoryLog) -> None:
    """It is awaited until the drain deadline, and revoked from then on."""
    await fill(log, 9)
    async with reading(log, drain_timeout_s=0.01) as stage:
        await eventually(lambda: len(stage.offsets) == 9)
        stage.ack(range(8))
        lost = list(stage.ack_handles)
        log.faults.partitions.truncate(ONE, 8)
        await eventually(lambda: lost[0].revoked)
        await fill(log, 1)
        await eventually(lambda: stage.offsets[9:] == [8])
        lost[0].ack()
        stage.ack_handles.remove(lost[0])
        await eventually(lambda: _is(log, AckedOffsets(8)))


async def test_log_end_lost_before_start_keeps_answered_offsets(log: MemoryLog) -> None:
    """Offsets committed beyond the end belong to records that are gone."""
    await fill(log, 9)
    await commit(log, AckedOffsets(3, [(4, 5), (7, 9)]).committable())
    log.faults.partitions.truncate(ONE, 8)

    async with reading(log) as stage:
        await eventually(lambda: stage.offsets == [3, 5, 6])
        await fill(log, 1)
        await eventually(lambda: stage.offsets == [3, 5, 6, 8])
        stage.ack_all()


async def test_recreated_topic_begins_like_assignment(log: MemoryLog) -> None:
    """Its keys keep their order, and those who hold something of the former one are told."""
    await fill(log, 3)
    told: list[bool] = []

    async with reading(log, on_revoked=lambda: told.append(True), chains_keys=True) as stage:
        await eventually(lambda: stage.offsets == [0, 1, 2])
        stage.ack_all()
        told.clear()
        log.faults.topics.replace(TOPIC)
        await fill(log, 2)
        await eventually(lambda: stage.offsets == [0, 1, 2, 0, 1])
        assignment = stage.source.tracker.get(ONE)
        assert assignment is not None
        assert assignment.chains is not None
        assert told == [True]
        stage.ack_all()


async def test_separate_ingest_starts_at_answers_and_commits_nothing(
    log: MemoryLog,
) -> None:
    """Its membership is in a group of its own; the progress is the responder's."""
    await fill(log, 5)
    await commit(log, Committed(3))

    async with reading(log, group="group.ingest", commits=False) as stage:
        await eventually(lambda: stage.offsets == [3, 4])
        stage.ack_all()

    assert await committed(log) == Committed(3)
    assert await log.committed("group.ingest", [ONE]) == {ONE: None}


async def test_stop_drops_records_not_admitted(log: MemoryLog) -> None:
    """Records that no stage has admitted are the next owner's; what is in flight is awaited."""
    await fill(log, 1)
    async with reading(log) as stage:
        await eventually(lambda: stage.offsets == [0])
        stage.source.stop_reading()
        await fill(log, 5)
        closing = asyncio.create_task(stage.source.close_down(5))
        await eventually(lambda: stage.ended)
        assert not closing.done()
        stage.ack_all()
        await closing

    assert stage.offsets == [0]
    assert await progress(log) == AckedOffsets(1)


async def test_consumer_is_not_closed_under_poll(log: MemoryLog) -> None:
    """A source that is left before it has come to its end lets its poll return first."""
    source = make_source(log)
    async with asyncio.TaskGroup() as tasks:
        async with source:
            running = tasks.create_task(source.run())
            await source.assigned.wait()
        await running

    assert running.exception() is None


async def test_draining_and_last_commit_share_one_deadline() -> None:
    """The group does not wait for a member whose commit nobody answers, or evicts it."""
    log = MemoryLog(request_timeout_s=3600.0, rebalance_timeout_s=3600.0)
    await log.create_topics([TopicInfo(TOPIC, 2, {})], replication_factor=1)
    consumer = replace(QUICK.consumer, revocation_timeout_s=0.2, last_commit_timeout_s=0.1)
    await fill(log, 4)
    async with (
        reading(log, tuning=replace(QUICK, consumer=consumer)) as stage,
        AsyncExitStack() as stack,
    ):
        await eventually(lambda: len(stage.offsets) == 4)
        log.faults.groups.hold_commits()
        stage.ack([0])
        other = RecordingListener()
        await stack.enter_async_context(log.member(GROUP, [TOPIC], other))
        await eventually(lambda: other.assignments)
        log.faults.groups.release_commits()
        stage.ack_handles.clear()


async def test_partition_paused_for_share_resumes_after_lost_end(
    log: MemoryLog,
) -> None:
    """The deferred records are gone, so that it need not wait until the log has grown."""
    consumer = replace(
        QUICK.consumer,
        max_deferred_records=2,
        resume_deferred_records=1,
        deferral_grace_s=0,
        reread_timeout_s=0.05,
    )
    await fill(log, 6)
    source = make_source(log, replace(QUICK, consumer=consumer), budget_bytes=1000, model_share=0.5)
    stage = DeferringStage(source)
    async with asyncio.TaskGroup() as tasks, source:
        running = tasks.create_task(source.run())
        work = tasks.create_task(stage.run())
        await source.assigned.wait()
        await eventually(lambda: _reasons(source) == {"share"})
        log.faults.partitions.truncate(ONE, 3)
        stage.answers = True
        stage.answer_all()
        await eventually(lambda: not _reasons(source))
        await fill(log, 1)
        await eventually(lambda: stage.offsets[-1:] == [3])
        stage.answer_all()
        await eventually(lambda: _is(log, AckedOffsets(4)))
        source.stop_reading()
        await work
        await source.close_down(5)
        await running

    assert stage.offsets == [0, 1, 2, 3]


def _reasons(source: Source) -> set[str]:
    return {each.paused for each in source.snapshot().partitions if each.paused}


class DeferringStage:
    """Lets requests of one model in as they have room.

    Attributes:
        answers: True if they are answered at once.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.offsets: list[int] = []
        self.answers = False
        self._ack_handles: list[InFlightAck] = []

    async def run(self) -> None:
        deferral = self.source.deferral
        assert deferral is not None
        while (delivery := await self.source.receive()) is not None:
            requests = [self._admit(delivery.assignment, each) for each in delivery.records]
            kept, over, _ = deferral.charge(requests, is_reread=delivery.is_reread)
            kept += await deferral.wait_for_room(over)
            for request in kept:
                assert isinstance(request.ack_handle, InFlightAck)
                self.offsets.append(request.ack_handle.offset)
                self._ack_handles.append(request.ack_handle)
            if self.answers:
                self.answer_all()

    def answer_all(self) -> None:
        while self._ack_handles:
            self._ack_handles.pop().ack()

    def _admit(self, assignment: AssignedPartition, record: Record) -> Request:
        ack_handle = assignment.admit(record.offset, 600)
        origin = (assignment.partition.partition, record.offset, ack_handle.previous, 0)
        return Request(ack_handle, *origin, None, b"", [], Envelope(), model="m")


class ReluctantSourceOffsets(SourceOffsets):
    """Cannot be assigned partitions before it is told to."""

    is_able = False

    async def on_assigned(self, consumer: Consumer, partitions: Sequence[int]) -> None:
        if not self.is_able:
            raise LogUnavailable("expected what is committed, got no answer")


async def test_retried_assignment_shows_its_duration(log: MemoryLog) -> None:
    """The duration is shown until the partitions are taken up, and not afterwards."""
    source_offsets = ReluctantSourceOffsets(log, TOPIC)
    settings = SourceSettings(TOPIC, GROUP, GROUP, True, 1_000_000, 5.0)
    source = Source(log, settings, Metrics(CollectorRegistry()), source_offsets, tuning=QUICK)
    async with asyncio.TaskGroup() as tasks, source:
        running = tasks.create_task(source.run())
        await eventually(lambda: source.snapshot().assigning_s > 0)
        source_offsets.is_able = True
        await source.assigned.wait()

        assert source.snapshot().assigning_s == 0
        await source.close_down(0)
        await running
