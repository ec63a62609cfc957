"""The clocks, as functions that tests can replace.

Deadlines and record timestamps are wall-clock times, and stamps that travel from one process to
another have to be. The wall clock can be set, back as well as forward, so a duration within a
process is measured by a monotonic clock: by `steady_clock_us` where a rule takes `now_us`, by
`time.monotonic` or `time.perf_counter` elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], int]
"""Return the time in microseconds, of the epoch or of a clock that is only read for durations."""


def wall_clock_us() -> int:
    """The time in microseconds since the epoch."""
    return time.time_ns() // 1000


def steady_clock_us() -> int:
    """The time in microseconds on a clock that nobody can set; its zero means nothing."""
    return time.monotonic_ns() // 1000


class AnchoredClock:
    """The wall clock of one moment, carried on by a steady clock.

    The stamps of one piece of work come from one of these, so that the durations between them are
    true though the wall clock is set meanwhile.
    """

    __slots__ = ("_ahead_us", "_steady")

    def __init__(self, wall: Clock, steady: Clock) -> None:
        self._steady = steady
        self._ahead_us = wall() - steady()

    def __call__(self) -> int:
        """The time in microseconds since the epoch."""
        return self._steady() + self._ahead_us
