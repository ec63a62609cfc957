"""Calls that stay open while nothing is under way in them: how many, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.errors import Retriable


class EndedQuiet(Retriable):
    """The call was quiet for too long, or for longest among too many."""


class Room:
    """Room for bytes; there is some until their limit is passed."""

    def __init__(self, limit_bytes: int) -> None:
        self._left_bytes = limit_bytes
        self._is_free = asyncio.Event()
        self._is_free.set()

    def take(self, size_bytes: int) -> None:
        """Take room for bytes; give it back if negative."""
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            self._is_free.clear()
        else:
            self._is_free.set()

    async def wait(self) -> None:
        """Return once there is room."""
        await self._is_free.wait()


class QuietCalls:
    """The quiet calls of one kind, so that they cannot take the place of all others.

    Args:
        name: of one such call, for errors.
        limit: of quiet calls; a further one ends the one that has been quiet longest.
        timeout_s: a call ends when it has been quiet for so long; None for never.
        max_unread_bytes: of the answers that wait in all calls; more end the call whose caller has
            not read for longest, quiet or not. None for no limit.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        timeout_s: float | None,
        max_unread_bytes: int | None = None,
    ) -> None:
        self._name = name
        self._max_unread_bytes = max_unread_bytes
        self._unread: dict[QuietCall, int] = {}
        """Longest-unread first."""
        self._unread_bytes = 0
        self._limit = limit
        self._timeout_s = timeout_s
        self._quiet: dict[QuietCall, None] = {}
        """Longest-quiet first."""

    def __len__(self) -> int:
        return len(self._quiet)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[QuietCall]:
        """Watch a call while the context lasts; it begins quiet.

        Raises:
            EndedQuiet: the call has to end; the context was cancelled.
        """
        timeout = asyncio.timeout(None)
        call = QuietCall(self, timeout)
        try:
            async with timeout:
                self.add(call)
                try:
                    yield call
                finally:
                    self.remove(call)
                    self._forget_unread(call)
        except TimeoutError:
            if not timeout.expired():
                raise
            name, timeout_s = self._name, self._timeout_s
            reason = call.reason or f"{name}: expected a message within {timeout_s:g} s, got none"
            raise EndedQuiet(reason) from None

    def add(self, call: QuietCall) -> None:
        """Count a call as quiet, from now on."""
        self.remove(call)
        if len(self._quiet) >= self._limit:
            longest = next(iter(self._quiet))
            self.remove(longest)
            limit = self._limit
            longest.end(f"{self._name}: expected at most {limit} quiet ones, got one more")
        self._quiet[call] = None
        if self._timeout_s is not None:
            call.end_at(asyncio.get_running_loop().time() + self._timeout_s)

    def remove(self, call: QuietCall) -> None:
        """Count a call no longer as quiet."""
        self._quiet.pop(call, None)

    def add_unread(self, call: QuietCall, size_bytes: int) -> None:
        """Count bytes of an answer that waits for its caller to read it."""
        if call.reason:
            return
        self._unread[call] = self._unread.get(call, 0) + size_bytes
        self._unread_bytes += size_bytes
        limit = self._max_unread_bytes
        while limit is not None and self._unread_bytes > limit:
            longest = next(iter(self._unread))
            self._forget_unread(longest)
            self.remove(longest)
            longest.end(f"{self._name}: expected at most {limit} unread bytes in all, got more")

    def remove_unread(self, call: QuietCall, size_bytes: int) -> None:
        """Count bytes that were read; the others of the call have just begun to wait."""
        left = self._unread.get(call, 0) - size_bytes
        self._forget_unread(call)
        if left > 0:
            self._unread[call] = left
            self._unread_bytes += left

    def _forget_unread(self, call: QuietCall) -> None:
        self._unread_bytes -= self._unread.pop(call, 0)


class QuietCall:
    """One call: busy while requests of it are under way, otherwise quiet.

    Attributes:
        reason: why it was ended before its time; empty otherwise.
    """

    def __init__(self, calls: QuietCalls, timeout: asyncio.Timeout) -> None:
        self.reason = ""
        self._calls = calls
        self._timeout = timeout
        self._under_way = 0

    def begin(self) -> None:
        """Count a request under way."""
        self._under_way += 1
        self._calls.remove(self)
        self.end_at(None)

    def done(self) -> None:
        """Count the end of a request."""
        self._under_way -= 1
        self.rest()

    def rest(self) -> None:
        """Begin the time of a quiet call again: something was read or written."""
        if not self._under_way and not self.reason:
            self._calls.add(self)

    def hold(self, size_bytes: int) -> None:
        """Count bytes of an answer until they are read; see `QuietCalls.add_unread`."""
        self._calls.add_unread(self, size_bytes)

    def read(self, size_bytes: int) -> None:
        """Count bytes of an answer no longer."""
        self._calls.remove_unread(self, size_bytes)

    def end(self, reason: str) -> None:
        """Cancel the call."""
        self.end_at(0.0)
        self.reason = reason

    def end_at(self, when_s: float | None) -> None:
        """Cancel the call at a time of the event loop; None for never."""
        if not self.reason and not self._timeout.expired():
            self._timeout.reschedule(when_s)
