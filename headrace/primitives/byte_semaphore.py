"""Semaphore that counts bytes: callers wait while there is not enough room."""

from __future__ import annotations

import asyncio


class Room:
    """Limit in bytes. A caller that alone exceeds it is admitted once all others have left."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0
        self._freed = asyncio.Event()

    async def enter(self, size_bytes: int) -> None:
        """Wait until there is enough room, and take it."""
        while self.used_bytes and self.used_bytes + size_bytes > self._limit_bytes:
            self._freed.clear()
            await self._freed.wait()
        self.used_bytes += size_bytes

    def take(self, size_bytes: int) -> None:
        """Take room without waiting, even beyond the limit; see `enough`."""
        self.used_bytes += size_bytes

    async def enough(self) -> None:
        """Wait until use is within the limit."""
        while self.used_bytes > self._limit_bytes:
            self._freed.clear()
            await self._freed.wait()

    def leave(self, size_bytes: int) -> None:
        """Release room."""
        self.used_bytes -= size_bytes
        self._freed.set()
