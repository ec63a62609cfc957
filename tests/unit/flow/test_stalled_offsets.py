"""Bases that stand still though their requests were passed on."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from headrace.consumer.lag import StalledOffsetMonitor
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import AssignedPartition, InFlightTracker
from headrace.log.port import Committed, TopicPartition
from headrace.telemetry.logs import Event

ONE = TopicPartition("requests", 0)
LIMIT_S = 100.0


@pytest.fixture
def tracker() -> InFlightTracker:
    """With the partition, of which nothing was read yet."""
    tracker = InFlightTracker(Budget(1000), lambda: None)
    tracker.assign(ONE, AckedOffsets(3))
    return tracker


def pass_on(tracker: InFlightTracker, count: int) -> None:
    """Read so many records, and write them to the next topic."""
    assignment = tracker.get(ONE)
    assert isinstance(assignment, AssignedPartition)
    for _ in range(count):
        assignment.admit(assignment.last_delivered + 1, 1).ack()


def looked(tracker: InFlightTracker, *looks: tuple[int, float]) -> StalledOffsetMonitor:
    """Bases after looks at what was committed: an offset, and when."""
    bases = StalledOffsetMonitor(tracker, LIMIT_S)
    for offset, now_s in looks:
        bases.observe({ONE: AckedOffsets(offset, [(20, 25)]).committable()}, now_s)
    return bases


def test_passed_on_base_that_stands_still_is_stalled(
    tracker: InFlightTracker,
) -> None:
    """It is told of once, with the record that has no answer."""
    pass_on(tracker, 10)
    with capture_logs() as lines:
        bases = looked(tracker, (5, 0.0), (5, 99.0), (5, 100.0), (5, 130.0))

    assert (bases.age_s(ONE, 130.0), bases.is_stuck(ONE, 130.0)) == (130.0, True)
    assert lines == [
        {
            "event": Event.BASE_STUCK,
            "record": "requests/0/5",
            "age_s": 100,
            "log_level": "error",
        }
    ]


def test_moving_base_is_not_stalled(tracker: InFlightTracker) -> None:
    """However slowly; and whoever was told of before is forgotten."""
    pass_on(tracker, 10)
    bases = looked(tracker, (5, 0.0), (5, 120.0), (6, 150.0))

    assert (bases.age_s(ONE, 160.0), bases.is_stuck(ONE, 160.0)) == (10.0, False)


def test_unread_backlog_is_not_stalled(tracker: InFlightTracker) -> None:
    """A backlog may be older than any retention."""
    bases = looked(tracker, (3, 0.0), (3, 1000.0))

    assert (bases.age_s(ONE, 1000.0), bases.is_stuck(ONE, 1000.0)) == (0.0, False)


def test_new_assignment_sends_records_from_base_again(tracker: InFlightTracker) -> None:
    """The time of a stalled offset begins anew with a new assignment."""
    pass_on(tracker, 10)
    bases = looked(tracker, (5, 0.0), (5, 120.0))
    tracker.assign(ONE, AckedOffsets(5))
    bases.observe({ONE: Committed(5)}, 130.0)
    unread = bases.age_s(ONE, 130.0)
    pass_on(tracker, 10)
    bases.observe({ONE: Committed(5)}, 140.0)

    assert (unread, bases.age_s(ONE, 150.0)) == (0.0, 10.0)
