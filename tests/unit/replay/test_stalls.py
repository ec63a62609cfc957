"""Stalls of the machine, told apart from slow turns and drawn by how long the loop works."""

from __future__ import annotations

import random

import pytest

from headrace.tools.replay.service_times import ServiceTime
from headrace.tools.replay.simulated_loop import LoopTime, Stalls, apart_from_stalls

USUAL = [(1, 500.0)] * 20


def test_a_turn_that_was_held_up_is_no_slow_turn() -> None:
    """What it took beyond its size's usual time is a stall, at its place in the work."""
    free, stalls = apart_from_stalls([*USUAL, (1, 10_500.0), *USUAL])

    assert free == [*USUAL, *USUAL]
    assert stalls == Stalls(41 * 500.0, ((20.5 * 500.0, 10_000.0),))


def test_a_turn_that_is_somewhat_slow_is_its_own_affair() -> None:
    """Below a millisecond more, or twice what is usual, nothing held it up."""
    turns = [*USUAL, (1, 1400.0), *[(64, 5000.0)] * 5, (64, 9000.0)]

    free, stalls = apart_from_stalls(turns)

    assert free == turns
    assert stalls.seen == ()


def test_stalls_come_by_time_worked() -> None:
    """However the work is cut into turns, it is held up as often and as long as was seen."""
    stalls = Stalls(100_000.0, ((30_000.0, 4000.0), (90_000.0, 7000.0)))

    for work_us in (50, 333, 250_000):
        held_up_us = stalls.drawn(random.Random(3))
        turns = 10_000_000 // work_us
        total_us = sum(held_up_us(work_us) for _ in range(turns))
        assert total_us == pytest.approx(turns * work_us / 100_000 * 11_000, abs=11_000)


def test_a_stall_lengthens_the_turn_that_it_comes_upon() -> None:
    """The answers are later by it if it comes before they are written, and the loop in any case."""
    times = LoopTime(
        ServiceTime((), (1000, 0)), ServiceTime((), (4000, 0)), Stalls(4000.0, ((3999.0, 2000.0),))
    )
    turn = times.drawn(random.Random(1))

    turns = [turn(1) for _ in range(8)]

    assert {each.busy_us for each in turns} == {6000}
    assert {each.answered_us for each in turns} <= {1000, 3000}
    assert len({each.answered_us for each in turns}) == 1
