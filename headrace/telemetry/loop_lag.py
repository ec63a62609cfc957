"""Event-loop lag: a task sleeps, and measures how much longer it slept than requested."""

from __future__ import annotations

import asyncio

from headrace.telemetry.bulk import BatchedHistogram

PERIOD_S = 0.1


class LoopLag:
    """Measures one event loop, in `run`.

    Attributes:
        last_s: the last measurement, in seconds.
    """

    def __init__(self, histogram: BatchedHistogram) -> None:
        self._histogram = histogram
        self.last_s = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.last_s = max(0.0, loop.time() - due_s)
            self._histogram.observe((), self.last_s)
