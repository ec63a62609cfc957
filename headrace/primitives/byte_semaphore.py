"""Room for bytes: who brings more than there is room for waits."""

from __future__ import annotations

import asyncio


class Room:
    """A bound in bytes. What alone exceeds it is let in when all else is gone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0
        self._freed = asyncio.Event()

    async def enter(self, size_bytes: int) -> None:
        """Take room as soon as there is enough."""
        while self.used_bytes and self.used_bytes + size_bytes > self._limit_bytes:
            self._freed.clear()
            await self._freed.wait()
        self.used_bytes += size_bytes

    def take(self, size_bytes: int) -> None:
        """Take room, be there enough or not; see `enough`."""
        self.used_bytes += size_bytes

    async def enough(self) -> None:
        """Wait until the limit is kept."""
        while self.used_bytes > self._limit_bytes:
            self._freed.clear()
            await self._freed.wait()

    def leave(self, size_bytes: int) -> None:
        """Give room back."""
        self.used_bytes -= size_bytes
        self._freed.set()
