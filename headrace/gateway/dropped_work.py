"""Conversions whose callers may go while they wait for a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from headrace.gateway.conversions import Conversions

T = TypeVar("T")


class DroppingConversions(Conversions):
    """`Conversions` that hold nothing of a request that was cancelled while it waited.

    The queue of a thread pool keeps a cancelled item until a thread comes to it. The bodies of
    callers that hang up would stay there, and no limit would count them.
    """

    async def run(self, convert: Callable[[], T], *, takes_long: bool) -> T:
        """Return what a function makes; it is dropped if this is cancelled before it begins."""
        work = _Work(convert)
        del convert
        try:
            return await super().run(work, takes_long=takes_long)
        finally:
            work.drop()


class _Work(Generic[T]):
    """Calls a function once, unless it is dropped before."""

    def __init__(self, convert: Callable[[], T]) -> None:
        self._waiting = [convert]

    def __call__(self) -> T:
        return self._waiting.pop()()

    def drop(self) -> None:
        """Forget the function."""
        self._waiting.clear()
