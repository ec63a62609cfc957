"""The ring under random schedules of its three threads and its three streams."""

from __future__ import annotations

import pytest

from tests.support.ring_schedule import Schedule

SCHEDULES = 2000
BATCHES = 8


@pytest.mark.slow
def test_ring_has_no_race_in_two_thousand_schedules() -> None:
    """Every access is ordered, failed runs in between, and every answer is of its own batch."""
    for seed in range(SCHEDULES):
        schedule = Schedule(seed)
        schedule.run(BATCHES)
        assert schedule.answered == BATCHES
