"""How long a thread that waits for work is kept off the interpreter by an event loop that is busy.

    python -m benchmarks.dispatcher_wakeup [--seconds N] [--busy-us N] [--out FILE]

A dispatcher thread waits on a queue, as an instance's thread does for its batches. The loop hands
it a moment in time now and then, and goes on being busy, in the forms that a loop can be busy: in
Python code without a pause; in many short callbacks; in such callbacks with a sleep of 50 us of the
whole thread in each turn while work is pending. What is measured is the time from the hand-over
until the thread has the interpreter, at the default switch interval (5 ms) and at 0.5 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe_machine

HAND_OVER_EVERY_S = 0.005
NAP_S = 50e-6
SWITCH_INTERVALS_S = (0.005, 0.0005)


class Dispatcher:
    """A thread that notes how late it got each moment that it was handed."""

    def __init__(self) -> None:
        self.waits_us: list[float] = []
        self.pending = 0
        self._handed: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="dispatcher")

    def __enter__(self) -> Dispatcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._handed.put(None)
        self._thread.join()

    def hand(self) -> None:
        """Give it something to do."""
        self.pending += 1
        self._handed.put(time.perf_counter_ns())

    def _serve(self) -> None:
        while (since_ns := self._handed.get()) is not None:
            self.waits_us.append((time.perf_counter_ns() - since_ns) / 1000)
            self.pending -= 1


def burn(us: float) -> None:
    """Python code for so long."""
    until_ns = time.perf_counter_ns() + round(us * 1000)
    while time.perf_counter_ns() < until_ns:
        pass


async def never_idle(dispatcher: Dispatcher, until_s: float, busy_us: float) -> None:
    """The loop is never left: one callback that does not end."""
    handed_s = 0.0
    while (now_s := time.monotonic()) < until_s:
        if now_s >= handed_s + HAND_OVER_EVERY_S and not dispatcher.pending:
            handed_s = now_s
            dispatcher.hand()
        burn(busy_us)


async def short_turns(dispatcher: Dispatcher, until_s: float, busy_us: float) -> None:
    """The loop turns all the time, and there is always something ready."""
    handed_s = 0.0
    while (now_s := time.monotonic()) < until_s:
        if now_s >= handed_s + HAND_OVER_EVERY_S and not dispatcher.pending:
            handed_s = now_s
            dispatcher.hand()
        burn(busy_us)
        await asyncio.sleep(0)


async def with_naps(dispatcher: Dispatcher, until_s: float, busy_us: float) -> None:
    """The same, but the thread sleeps for a moment in each turn while work is pending."""
    handed_s = 0.0
    while (now_s := time.monotonic()) < until_s:
        if now_s >= handed_s + HAND_OVER_EVERY_S and not dispatcher.pending:
            handed_s = now_s
            dispatcher.hand()
        burn(busy_us)
        if dispatcher.pending:
            time.sleep(NAP_S)  # noqa: ASYNC251 - it is the interpreter that has to be given up
        await asyncio.sleep(0)


async def idle(dispatcher: Dispatcher, until_s: float, _busy_us: float) -> None:
    """The loop sleeps in between: what the wake-up costs at least."""
    while time.monotonic() < until_s:
        dispatcher.hand()
        await asyncio.sleep(HAND_OVER_EVERY_S)


FORMS: dict[str, Callable[..., Any]] = {
    "idle loop": idle,
    "never idle": never_idle,
    "short turns": short_turns,
    "short turns with naps": with_naps,
}


def measure(form: Callable[..., Any], seconds: float, busy_us: float) -> dict[str, float]:
    """One form of being busy: how long the dispatcher waited, in microseconds."""
    with Dispatcher() as dispatcher:
        asyncio.run(form(dispatcher, time.monotonic() + seconds, busy_us))
    waits = np.array(dispatcher.waits_us)
    return {
        "hand_overs": len(waits),
        "p50_us": float(np.quantile(waits, 0.5)),
        "p99_us": float(np.quantile(waits, 0.99)),
        "max_us": float(waits.max()),
    }


def main() -> None:
    """Measure every form at every switch interval, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--busy-us", type=float, default=50.0)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/dispatcher_wakeup.json")
    )
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    print("| loop | switch interval | wake-up p50 | p99 | longest |\n|---|---:|---:|---:|---:|")
    before_s = sys.getswitchinterval()
    try:
        for interval_s in SWITCH_INTERVALS_S:
            sys.setswitchinterval(interval_s)
            for name, form in FORMS.items():
                measured = measure(form, given.seconds, given.busy_us)
                found.append({"loop": name, "switch_interval_s": interval_s, **measured})
                print(
                    f"| {name} | {interval_s * 1000:g} ms | {measured['p50_us']:,.0f} us "
                    f"| {measured['p99_us']:,.0f} us | {measured['max_us']:,.0f} us |"
                )
    finally:
        sys.setswitchinterval(before_s)
    report = {
        "machine": describe_machine(),
        "load_average": os.getloadavg()[0],
        "busy_us": given.busy_us,
        "forms": found,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
