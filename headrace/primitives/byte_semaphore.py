"""Semaphore that counts bytes: callers wait while there are not enough free."""

from __future__ import annotations

import asyncio


class ByteSemaphore:
    """Limit in bytes. A caller that alone exceeds it is admitted once all others have released."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0
        self._released = asyncio.Event()

    async def acquire(self, size_bytes: int) -> None:
        """Wait until so many bytes are free, and take them."""
        while self.used_bytes and self.used_bytes + size_bytes > self._limit_bytes:
            self._released.clear()
            await self._released.wait()
        self.used_bytes += size_bytes

    def acquire_now(self, size_bytes: int) -> None:
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
