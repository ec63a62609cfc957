"""Semaphore that counts bytes; taking them never waits."""

from __future__ import annotations

import asyncio


class ByteSemaphore:
    """Limit in bytes that may be exceeded: callers take bytes, then wait until use is within it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0
        self._released = asyncio.Event()

    def acquire(self, size_bytes: int) -> None:
        """Take bytes without waiting, even beyond the limit; see `wait_within_limit`."""
        self.used_bytes += size_bytes

    async def wait_within_limit(self) -> None:
        """Wait until use is within the limit."""
        while self.used_bytes > self._limit_bytes:
            self._released.clear()
            await self._released.wait()

    def release(self, size_bytes: int) -> None:
        """Release bytes."""
        self.used_bytes -= size_bytes
        self._released.set()
