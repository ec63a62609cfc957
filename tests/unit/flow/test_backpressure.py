"""Which partitions are not read for now, and why."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from headrace.consumer.backpressure import Backpressure
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget, BudgetShares
from headrace.delivery.inflight import AssignedPartition, InFlightAck, InFlightTracker
from headrace.log.memory import MemoryLog
from headrace.log.port import Committed, Consumer, TopicInfo, TopicPartition
from headrace.protocol.messages import Envelope
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.logs import RecordingListener
from tests.support.tuning import QUICK

ONE, TWO = TopicPartition("t", 0), TopicPartition("t", 1)


class Reading:
    """A consumer that has two partitions, and notes what it is told."""

    def __init__(self) -> None:
        self.paused: set[TopicPartition] = set()

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset({ONE, TWO})

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self.paused.update(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self.paused.difference_update(partitions)


class BackpressureHarness:
    """Two assigned partitions, whose pauses follow the rules that a test asks for."""

    def __init__(self, *, bounds_metadata: bool = False, shares: bool = False) -> None:
        self.tracker = InFlightTracker(Budget(1000), lambda: None)
        self.one, self.two = (self.tracker.assign(each, AckedOffsets(0)) for each in (ONE, TWO))
        self.pauses = Backpressure(
            self.tracker, bounds_metadata=bounds_metadata, shares=shares, tuning=QUICK
        )
        self.consumer = Reading()

    def update(self) -> bool:
        """One round."""
        consumer = cast(Consumer, self.consumer)
        return self.pauses.update(consumer, 0, stopping=False)

    def read(
        self, assignment: AssignedPartition, count: int, size_bytes: int = 0
    ) -> list[InFlightAck]:
        """Read so many records."""
        first = assignment.last_read + 1
        assignment.last_read += count
        return [assignment.admit(first + each, size_bytes) for each in range(count)]


def test_partition_whose_ranges_might_not_fit_metadata_is_paused_alone() -> None:
    """With a long span and many unanswered in it; with fewer unanswered it is read again."""
    bench = BackpressureHarness(bounds_metadata=True)
    ack_handles = bench.read(bench.one, TUNING.delivery.safe_span_offsets)
    bench.read(bench.two, 10)

    assert not bench.update()
    assert bench.consumer.paused == {ONE}
    assert bench.pauses.reasons == {ONE: "metadata"}

    for ack_handle in ack_handles[TUNING.delivery.safe_unanswered_offsets :]:
        ack_handle.ack()
    bench.update()
    assert bench.consumer.paused == {ONE}
    ack_handles[1].ack()
    bench.update()
    assert bench.consumer.paused == set()


def test_topic_between_stages_is_not_paused() -> None:
    """Records that have no room in the metadata are run again after a crash, and recognised."""
    bench = BackpressureHarness()
    bench.read(bench.one, 2 * TUNING.delivery.safe_span_offsets)

    bench.update()
    assert bench.consumer.paused == set()


def test_partition_in_order_is_limited_to_its_share_of_budget() -> None:
    """One that is stuck fills its own half, and the other is read."""
    bench = BackpressureHarness(shares=True)
    stuck = bench.read(bench.one, 10, 50)
    bench.read(bench.two, 1, 10)

    assert not bench.update()
    assert bench.consumer.paused == set()
    stuck += bench.read(bench.one, 1, 50)
    assert not bench.update()
    assert bench.consumer.paused == {ONE}
    assert bench.pauses.reasons == {ONE: "order"}

    for ack_handle in stuck[:6]:
        ack_handle.ack()
    bench.update()
    assert bench.consumer.paused == set()


async def test_separate_ingest_follows_commits_of_responder() -> None:
    """An ingest that stands apart acknowledges what it wrote on; answered it is only later."""
    log = MemoryLog()
    await log.create_topics([TopicInfo("t", 2, {})], replication_factor=1)
    bench = BackpressureHarness(bounds_metadata=True)
    for assignment in (bench.one, bench.two):
        bench.pauses.follow(assignment.partition, assignment.progress.copy())
    for ack_handle in bench.read(bench.one, TUNING.delivery.safe_span_offsets):
        ack_handle.ack()
    bench.update()
    assert bench.consumer.paused == {ONE}

    watching = asyncio.create_task(bench.pauses.watch(log, "g"))
    listener = RecordingListener()
    async with log.member("g", ["t"], listener) as member:
        await eventually(lambda: listener.held)
        await member.commit({ONE: Committed(TUNING.delivery.safe_span_offsets - 100)})
        await eventually(lambda: not bench.update() and not bench.consumer.paused)
    watching.cancel()
    await asyncio.wait([watching])


@pytest.mark.parametrize("in_order", [False, True])
def test_separate_ingest_bounds_unanswered_records(
    in_order: bool,
) -> None:
    """Records count as unanswered until the responder's progress shows their answers."""
    bench = BackpressureHarness(shares=in_order)
    known = bench.one.progress.copy()
    bench.pauses.follow(ONE, known)
    for ack_handle in bench.read(bench.one, TUNING.consumer.max_unanswered_records):
        ack_handle.ack()
    bench.update()
    assert bench.pauses.reasons == {ONE: "ahead"}

    known.mark_acked(10, 11)
    bench.update()
    assert bench.consumer.paused == set()


def test_partition_with_many_deferred_requests_pauses_alone() -> None:
    """It resumes when a quarter of them has gone; the other partition goes on."""
    bench = BackpressureHarness()
    share = BudgetShares(bench.tracker.budget, 0.5, 0.5).share("model", "")
    deferred = [
        ack_handle.defer(share, 1, Envelope())
        for ack_handle in bench.read(bench.one, TUNING.consumer.max_deferred_records)
    ]
    paused = []
    for count in (0, 1, TUNING.consumer.max_deferred_records // 4, 1):
        for _ in range(count):
            bench.one.admit(deferred.pop().offset, 0).ack()
        bench.update()
        paused.append(dict(bench.pauses.reasons))

    assert paused == [{ONE: "share"}, {ONE: "share"}, {}, {}]
