"""Calls that stay open while nothing is under way in them: how many, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.errors import Retriable


class EndedQuiet(Retriable):
    """The call was quiet for too long, or for longest among too many."""


class QuietCalls:
    """The quiet calls of one kind, so that they cannot take the place of all others.

    Args:
        name: of one such call, for errors.
        limit: of quiet calls; a further one ends the one that has been quiet longest.
        timeout_s: a call ends when it has been quiet for so long; None for never.
    """

    def __init__(self, name: str, limit: int, timeout_s: float | None) -> None:
        self._name = name
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

    def end(self, reason: str) -> None:
        """Cancel the call."""
        self.end_at(0.0)
        self.reason = reason

    def end_at(self, when_s: float | None) -> None:
        """Cancel the call at a time of the event loop; None for never."""
        if not self.reason and not self._timeout.expired():
            self._timeout.reschedule(when_s)
