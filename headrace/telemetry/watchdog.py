"""Watchdogs of a process: activities that report progress, and a watch on the event loop.

An activity reports when it begins something, and when it becomes idle. It is stuck if it stays at
one thing beyond its limit. The event loop cannot report on itself, so a thread posts a call to it
every second and waits for the call to run. `FaulthandlerWatchdog` ends a process in which no Python
thread can run.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import threading
import time
import traceback
from typing import Self

import structlog

from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import BatchedHistogram
from headrace.tuning import TUNING, RuntimeTuning

log = structlog.get_logger(__name__)


class Activity:
    """Something that must make progress.

    Args:
        name: for display.
        limit_s: how long it may stay at one thing.

    Attributes:
        begun: how many things it has begun.
    """

    __slots__ = ("_since_s", "begun", "limit_s", "name")

    def __init__(self, name: str, limit_s: float) -> None:
        self.name = name
        self.limit_s = limit_s
        self.begun = 0
        self._since_s: float | None = None

    def begin(self) -> None:
        """Begin something; the previous one is over."""
        self.begun += 1
        self._since_s = time.monotonic()

    def end(self) -> None:
        """Become idle."""
        self._since_s = None

    def for_s(self) -> float | None:
        """Return how long the activity has been at one thing; None while it is idle."""
        since_s = self._since_s
        return None if since_s is None else time.monotonic() - since_s

    def fault(self) -> str:
        """Return why the activity is stuck; empty if it is not."""
        for_s = self.for_s()
        if for_s is None or for_s <= self.limit_s:
            return ""
        return f"{self.name}: no progress for {for_s:.0f} s"


class LoopWatchdog:
    """A thread that watches an event loop. Enter it on the loop to watch.

    Attributes:
        turns: the loop's activity; safe to read from any thread.
    """

    def __init__(self, tuning: RuntimeTuning = TUNING.runtime) -> None:
        self._tuning = tuning
        self.turns = Activity("event loop", tuning.loop_stall_s)
        self._answered = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._watch,
            args=(loop, threading.get_ident()),
            name="loop-watch",
            daemon=True,
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._answered.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, loop: asyncio.AbstractEventLoop, loop_thread: int) -> None:
        while not self._closing.wait(self._tuning.loop_check_interval_s):
            self._answered.clear()
            if self._closing.is_set():
                return
            self.turns.begin()
            try:
                loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:  # the loop is closed
                return
            if not self._answered.wait(self.turns.limit_s):
                log.error(
                    Event.STUCK,
                    reason=f"the event loop has not turned for {self.turns.limit_s:g} s",
                    loop_is_at=_calls(loop_thread, self._tuning.stall_stack_frames),
                )
                self._answered.wait()
            self.turns.end()


def _calls(thread: int, most: int) -> list[str]:
    """Return a thread's innermost calls, outermost first; without values of variables."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return []
    calls = traceback.extract_stack(frame)[-most:]
    return [f"{call.filename}:{call.lineno} {call.name}" for call in calls]


# --- native code that holds the interpreter ------------------------------------------------------


_STDERR = 2


class FaulthandlerWatchdog:
    """While the context lasts, an event loop stalled for `limit_s` ends the process (exit 1).

    Native code that holds the interpreter lock stops every Python thread, including any watchdog in
    Python. `faulthandler` has a watchdog thread in C that needs no lock: unless it is re-armed in
    time it writes the traceback of each thread, and ends the process
    (https://docs.python.org/3/library/faulthandler.html). The event loop re-arms it.

    There is one per process, so only the composition root may enter it.

    Args:
        limit_s: in seconds; 0 disables it.
        rearms_per_limit: how often the event loop re-arms the watchdog within the limit.
    """

    def __init__(
        self, limit_s: float, rearms_per_limit: int = TUNING.runtime.stall_rearms_per_limit
    ) -> None:
        self._limit_s = limit_s
        self._interval_s = limit_s / rearms_per_limit
        self._next: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if self._limit_s:
            self._rearm()
        return self

    def __exit__(self, *_: object) -> None:
        if self._next is not None:
            self._next.cancel()
            faulthandler.cancel_dump_traceback_later()

    def _rearm(self) -> None:
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=_STDERR)
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(self._interval_s, self._rearm)


# --- lag -----------------------------------------------------------------------------------------


class LoopLag:
    """Measures the lag of an event loop in `run`: how much longer a sleep took than requested.

    Args:
        histogram: receives each measurement.
        interval_s: time between two measurements.

    Attributes:
        last_s: the last measurement, in seconds.
    """

    def __init__(self, histogram: BatchedHistogram, interval_s: float) -> None:
        self._histogram = histogram
        self._interval_s = interval_s
        self.last_s = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self.last_s = max(0.0, loop.time() - due_s)
            self._histogram.observe((), self.last_s)
