"""Gives memory that was freed back to the system.

The allocator of glibc gives back what lies at the end of its heap. Large requests and answers are
freed in another order than they were made, so a small block that stays holds up all below it, and
the resident size of a process stays where its largest moment was, or grows from one such moment to
the next. `malloc_trim` gives back every free page. It takes tens of milliseconds for hundreds of
megabytes, on a thread, and holds up others that allocate; so it is done when hardly anything is in
flight, or else once a minute at most. With another allocator nothing is done.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class TrimSettings:
    """When memory is given back.

    Attributes:
        look_s: between two looks.
        growth_bytes: so much larger than after the last time the resident size has to be.
        idle_bytes: with no more than this in flight, a process counts as idle.
        busy_s: one that is not idle waits for so long between two times.
    """

    look_s: float = 5.0
    growth_bytes: int = 32 * 1024 * 1024
    idle_bytes: int = 1024 * 1024
    busy_s: float = 60.0


class TrimRule:
    """Says when to give memory back."""

    def __init__(self, settings: TrimSettings) -> None:
        self._settings = settings
        self._floor_bytes = 0
        self._trimmed_s = 0.0

    def is_due(self, now_s: float, resident_bytes: int, in_flight_bytes: int) -> bool:
        """Whether it is time to. The first look only notes how large the process is."""
        settings = self._settings
        if not self._floor_bytes:
            self.trimmed(now_s, resident_bytes)
            return False
        # What is in use by now and is freed later counts from where the process stands then.
        self._floor_bytes = min(self._floor_bytes, resident_bytes)
        if resident_bytes - self._floor_bytes < settings.growth_bytes:
            return False
        is_idle = in_flight_bytes <= settings.idle_bytes
        return is_idle or now_s - self._trimmed_s >= settings.busy_s

    def trimmed(self, now_s: float, resident_bytes: int) -> None:
        """Memory was given back, and this is what is left."""
        self._trimmed_s = now_s
        self._floor_bytes = resident_bytes


def resident_bytes() -> int | None:
    """Return the resident size of this process; None where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return None


def find_trim() -> Callable[[], object] | None:
    """Return what gives free memory back; None where the allocator has nothing of the kind."""
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = [ctypes.c_size_t]
    return lambda: function(0)


async def trim_now_and_then(
    in_flight_bytes: Callable[[], int],
    metrics: Metrics,
    settings: TrimSettings = TrimSettings(),
) -> None:
    """Give memory back when it is time to, until cancelled.

    Args:
        in_flight_bytes: what the process has in flight now.
        metrics: told how much was given back.
        settings: when it is time.
    """
    trim, rule = find_trim(), TrimRule(settings)
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
            metrics.heap_trimmed.inc(released_bytes)
            log.debug(Event.HEAP_TRIMMED, bytes=released_bytes, resident_bytes=after_bytes)
        await asyncio.sleep(settings.look_s)


@asynccontextmanager
async def trimming(in_flight_bytes: Callable[[], int], metrics: Metrics) -> AsyncIterator[None]:
    """Give memory back now and then while the context lasts."""
    task = asyncio.create_task(trim_now_and_then(in_flight_bytes, metrics), name="trim-heap")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
