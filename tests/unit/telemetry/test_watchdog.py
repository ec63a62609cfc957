"""Whether stuck loops and activities are found, and no others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace
from structlog.testing import capture_logs

from headrace.telemetry.watchdog import Activity, LoopWatchdog
from headrace.tuning import TUNING, RuntimeTuning
from tests.support.conditions import DEADLINE_S, eventually

LIMIT_S = 0.2
TUNED = replace(TUNING.runtime, loop_stall_s=LIMIT_S, loop_check_interval_s=0.02)


@contextmanager
def watched_loop(
    tuning: RuntimeTuning = TUNED,
) -> Iterator[tuple[Callable[[Callable[[], None]], object], LoopWatchdog]]:
    """A loop in a thread of its own, with its watch; the first gives it something to call."""
    ready, stopping, loops = threading.Event(), asyncio.Event(), []
    watch = LoopWatchdog(tuning)

    async def live() -> None:
        with watch:
            loops.append(asyncio.get_running_loop())
            ready.set()
            await stopping.wait()

    thread = threading.Thread(target=asyncio.run, args=(live(),), name="watched")
    thread.start()
    assert ready.wait(DEADLINE_S)
    try:
        yield loops[0].call_soon_threadsafe, watch
    finally:
        loops[0].call_soon_threadsafe(stopping.set)
        thread.join()


async def test_watchdog_reports_blocked_loop_and_its_recovery() -> None:
    """The log line, written from another thread, says where the loop is."""
    release = threading.Event()

    def block_on_purpose() -> None:
        release.wait()

    with capture_logs() as lines, watched_loop() as (call, watch):
        call(block_on_purpose)
        # A busy machine may have held up the loop before.
        await eventually(lambda: any(map(is_of_the_block, lines)))
        assert "event loop: no progress for" in watch.turns.fault()
        release.set()
        await eventually(lambda: not watch.turns.fault())


def is_of_the_block(line: Mapping[str, Any]) -> bool:
    """Whether a log line tells that the loop stands in `block_on_purpose`."""
    calls = line["loop_is_at"] if line["event"] == "process.stuck" else ()
    return any("block_on_purpose" in call for call in calls)


async def test_watchdog_reports_nothing_for_running_loop() -> None:
    """It is asked again and again, and answers."""
    with watched_loop(replace(TUNED, loop_stall_s=3600.0)) as (_, watch):
        await eventually(lambda: watch.turns.begun >= 5)
        assert watch.turns.fault() == ""


async def test_watchdog_leaves_no_thread() -> None:
    """Leaving waits for nothing but the thread's end."""
    with LoopWatchdog(replace(TUNED, loop_check_interval_s=0.01)) as watch:
        await eventually(lambda: watch.turns.begun)
    assert "loop-watch" not in {thread.name for thread in threading.enumerate()}


def test_idle_activity_is_not_stuck() -> None:
    """Neither before its first thing nor after its last."""
    activity = Activity("reader", 0.0)
    assert activity.fault() == ""
    activity.begin()
    activity.end()
    assert (activity.fault(), activity.for_s()) == ("", None)


def test_activity_without_progress_is_stuck() -> None:
    """The fault names it and says for how long."""
    activity = Activity("reader of requests", -1.0)
    activity.begin()
    assert activity.fault() == "reader of requests: no progress for 0 s"


def test_activity_with_progress_is_not_stuck() -> None:
    """Starting the next item counts as progress, as does having nothing to do."""
    activity = Activity("reader", 60.0)
    for _ in range(3):
        activity.begin()
    assert (activity.fault(), activity.begun) == ("", 3)
