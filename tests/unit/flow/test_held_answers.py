"""Held answers: a drain waits for the other records in flight alone."""

from __future__ import annotations

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import InFlightTracker
from headrace.log.port import TopicPartition

PARTITION = TopicPartition("requests", 0)


def test_record_is_held_once_all_its_unanswered_parts_are() -> None:
    """The part that is not held may be answered before or after the others are held."""
    tracker = InFlightTracker(Budget(1000), lambda: None)
    assignment = tracker.assign(PARTITION, AckedOffsets(0))
    first, second = assignment.admit(0, 10), assignment.admit(1, 10)
    first.parts = second.parts = 3

    first.hold()
    first.hold()
    assert tracker.unfinished() == 2
    first.ack()
    assert tracker.unfinished() == 1
    second.ack()
    second.hold()
    second.hold()
    assert tracker.unfinished([PARTITION]) == 0
    assert tracker.in_flight() == 2

    first.release()
    assert tracker.unfinished() == 1
    first.release()
    first.ack()
    first.ack()
    assert (tracker.unfinished(), tracker.in_flight()) == (0, 1)


def test_record_that_becomes_held_wakes_drain_of_its_partition() -> None:
    """A drain waits for acknowledgements, and there may be none any more."""
    woken: list[int] = []
    tracker = InFlightTracker(Budget(1000), lambda: woken.append(tracker.unfinished()))
    assignment = tracker.assign(PARTITION, AckedOffsets(0))
    before, after = assignment.admit(0, 10), assignment.admit(1, 10)

    before.hold()
    assert woken == []
    assignment.leaving = True
    after.hold()
    assert woken == [0]
