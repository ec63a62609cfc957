"""How late the event loop is: a task that sleeps, and looks how much longer it slept."""

from __future__ import annotations

import asyncio

from headrace.telemetry.bulk import BatchedHistogram

PERIOD_S = 0.1


class LoopLag:
    """Measures one event loop, in `run`.

    Attributes:
        last_s: what the last look found, in seconds.
    """

    def __init__(self, histogram: BatchedHistogram) -> None:
        self._histogram = histogram
        self.last_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.last_s = max(0.0, loop.time() - due_s)
            self._histogram.observe((), self.last_s)
