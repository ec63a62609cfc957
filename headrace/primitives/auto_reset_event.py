"""Event for a single waiting task, with a timeout; reset by each wait."""

from __future__ import annotations

import asyncio


class AutoResetEvent:
    """Event that each `wait` resets first: only a later `set` wakes the waiting task."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake the waiting task."""
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Reset the event, then wait until it is set or `timeout_s` has passed."""
        self._event.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            pass
