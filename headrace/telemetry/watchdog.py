"""Watchdogs of a process: activities that report progress, and a watch on the event loop.

An activity reports when it begins something, and when it becomes idle. It is stuck if it stays at
one thing beyond its limit. The event loop cannot report on itself, so a thread posts a call to it
every second and waits for the call to run.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Self

import structlog

from headrace.telemetry.logs import Event
from headrace.tuning import TUNING, RuntimeTuning

log = structlog.get_logger(__name__)

READER_LIMIT_S = 60.0
RUN_GRACE_S = 10.0


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
