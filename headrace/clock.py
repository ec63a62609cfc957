"""Clocks, as functions that tests can replace.

Deadlines, record timestamps and times sent to other processes are wall-clock times. The wall clock
can be set back or forward, so durations within a process are measured with a monotonic clock:
`steady_clock_us` where a rule takes `now_us`, `time.monotonic` or `time.perf_counter` elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], int]
"""Return microseconds, since the epoch or on a clock that is only used for durations."""


def wall_clock_us() -> int:
    """Return microseconds since the epoch."""
    return time.time_ns() // 1000


def steady_clock_us() -> int:
    """Return microseconds on a clock that cannot be set; its zero has no meaning."""
    return time.monotonic_ns() // 1000


class AnchoredClock:
    """Wall clock that is read once and then advanced by a steady clock.

    All times of one piece of work come from one such clock, so that the durations between them are
    correct even if the wall clock is set meanwhile.
    """

    __slots__ = ("_ahead_us", "_steady")

    def __init__(self, wall: Clock, steady: Clock) -> None:
        self._steady = steady
        self._ahead_us = wall() - steady()

    def __call__(self) -> int:
        """Return microseconds since the epoch."""
        return self._steady() + self._ahead_us
