"""Event-loop lag: a task sleeps, and measures how much longer it slept than requested."""

from __future__ import annotations

import asyncio

from headrace.telemetry.bulk import BatchedHistogram


class LoopLag:
    """Measures one event loop, in `run`.

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
