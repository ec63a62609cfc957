"""When runs of requests leave: at once, unless so many pass that they had better go together."""

from __future__ import annotations

import pytest

from headrace.transport.burst_limiter import PACE_S, Pace


def passed(pace: Pace, requests: int, every_s: float, times: int, now_s: float = 100.0) -> float:
    """Let runs leave at even distances, whatever the pace says; when the last one did."""
    for number in range(times):
        pace.left(requests, now_s + number * every_s)
    return now_s + (times - 1) * every_s


def test_the_first_run_leaves_at_once() -> None:
    """Nobody waits for a second one."""
    assert Pace().pause_s(100.0) == 0


@pytest.mark.parametrize("per_s", [500, 5000])
def test_a_flow_that_is_no_flood_is_never_held_back(per_s: int) -> None:
    """One request after the other, however long."""
    pace = Pace()
    last_s = passed(pace, 1, 1 / per_s, 1000)
    assert pace.pause_s(last_s + 0.002) == 0


def test_in_a_flood_what_gathers_in_a_while_leaves_together() -> None:
    """The pause counts from when the run before left."""
    pace = Pace()
    last_s = passed(pace, 20, 0.001, 200)
    assert pace.pause_s(last_s + 0.004) == pytest.approx(PACE_S - 0.004)
    assert pace.pause_s(last_s + PACE_S) == 0


def test_after_a_flood_there_are_no_pauses_soon() -> None:
    """However long the flood was."""
    pace = Pace()
    last_s = passed(pace, 500, 0.01, 1000)
    pace.left(1, last_s + 5 * PACE_S)
    assert pace.pause_s(last_s + 5 * PACE_S + 0.002) == 0


def test_a_burst_is_no_flood() -> None:
    """Sixty requests at once, and the next ones a moment later."""
    pace = Pace()
    pace.left(60, 100.0)
    assert pace.pause_s(100.002) == 0


def test_runs_to_several_partitions_leave_together() -> None:
    """The second one of a moment does not wait for the first one's pause."""
    pace = Pace()
    last_s = passed(pace, 500, 0.01, 10)
    assert pace.pause_s(last_s + 0.0002) == 0
