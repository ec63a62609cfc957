"""Something may have changed: for one task that waits, with a deadline."""

from __future__ import annotations

import asyncio


class AutoResetEvent:
    """Given any number of times; who waits next hears of it once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def give(self) -> None:
        """Wake who waits."""
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Until it is given from now on, or the time is over."""
        self._event.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            pass
