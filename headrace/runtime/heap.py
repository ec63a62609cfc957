"""Return freed memory to the system, but not between two requests.

glibc's allocator returns the free memory at the end of its heap as soon as there are a few hundred
kilobytes, or a few megabytes. The next request faults in each page again, which takes microseconds
in a virtual machine. So a process that serves lets it keep more (`keep_freed_memory`).

Other free memory it does not return at all. Large requests and answers are freed in another order
than they were allocated, so one small block keeps all memory below it, and the resident size of a
process stays at its peak, or grows from peak to peak. `malloc_trim` returns every free page. It
takes tens of milliseconds for hundreds of megabytes, on a thread, and blocks other threads that
allocate; so it is called when hardly anything is in flight, otherwise at most once a minute. With
another allocator nothing is done.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from headrace.primitives.resident_memory import resident_bytes
from headrace.telemetry.logs import Event
from headrace.tuning import TUNING, RuntimeTuning

log = structlog.get_logger(__name__)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(tuning: RuntimeTuning = TUNING.runtime) -> None:
    """Let the allocator keep freed memory for the next requests, within a bound.

    What the environment says of the allocator's thresholds stays as it is.
    """
    if any(name in os.environ for name in _SET_BY_USER):
        return
    try:
        set_parameter = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    set_parameter.argtypes = [ctypes.c_int, ctypes.c_int]
    set_parameter(_TRIM_THRESHOLD, tuning.heap_kept_bytes)
    set_parameter(_MMAP_THRESHOLD, tuning.heap_largest_block_bytes)


class TrimRule:
    """Decide when to trim."""

    def __init__(self, tuning: RuntimeTuning) -> None:
        self._tuning = tuning
        self._floor_bytes = 0
        self._trimmed_s = 0.0

    def is_due(self, now_s: float, resident_bytes: int, in_flight_bytes: int) -> bool:
        """True if a trim is due. The first call only records the resident size."""
        if not self._floor_bytes:
            self.trimmed(now_s, resident_bytes)
            return False
        # Measure growth from the smallest size since the last trim.
        self._floor_bytes = min(self._floor_bytes, resident_bytes)
        if resident_bytes - self._floor_bytes < self._tuning.heap_growth_bytes:
            return False
        is_idle = in_flight_bytes <= self._tuning.heap_idle_bytes
        return is_idle or now_s - self._trimmed_s >= self._tuning.heap_busy_interval_s

    def trimmed(self, now_s: float, resident_bytes: int) -> None:
        """Record a trim and the resident size after it."""
        self._trimmed_s = now_s
        self._floor_bytes = resident_bytes


def find_trim() -> Callable[[], object] | None:
    """Return the function that trims the heap; None if the allocator has none."""
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = [ctypes.c_size_t]
    return lambda: function(0)


async def trim_now_and_then(
    in_flight_bytes: Callable[[], int],
    trimmed: Callable[[int], None],
    tuning: RuntimeTuning = TUNING.runtime,
) -> None:
    """Trim the heap whenever it is due, until cancelled.

    Args:
        in_flight_bytes: returns the bytes that the process has in flight.
        trimmed: called with the bytes that each trim has returned.
        tuning: decides when a trim is due.
    """
    trim, rule = find_trim(), TrimRule(tuning)
    if trim is None or resident_bytes() is None:
        return
    loop = asyncio.get_running_loop()
    while True:
        before_bytes = resident_bytes() or 0
        if rule.is_due(loop.time(), before_bytes, in_flight_bytes()):
            await asyncio.to_thread(trim)
            after_bytes = resident_bytes() or 0
            rule.trimmed(loop.time(), after_bytes)
            released_bytes = max(0, before_bytes - after_bytes)
            trimmed(released_bytes)
            log.debug(Event.HEAP_TRIMMED, bytes=released_bytes, resident_bytes=after_bytes)
        await asyncio.sleep(tuning.heap_check_interval_s)


@asynccontextmanager
async def trimming(
    in_flight_bytes: Callable[[], int],
    trimmed: Callable[[int], None],
    tuning: RuntimeTuning = TUNING.runtime,
) -> AsyncIterator[None]:
    """Trim the heap whenever it is due while the context lasts."""
    task = asyncio.create_task(
        trim_now_and_then(in_flight_bytes, trimmed, tuning), name="trim-heap"
    )
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
