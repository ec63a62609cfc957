"""The wall clock, as one function that tests can replace.

Deadlines and record timestamps are wall-clock times, and stamps that travel from one process to
another have to be; a duration within a process is measured by `time.monotonic` or
`time.perf_counter`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], int]
"""Answers the time in microseconds since the epoch."""


def wall_clock_us() -> int:
    """The time in microseconds since the epoch."""
    return time.time_ns() // 1000
