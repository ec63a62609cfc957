"""Where reading and runs begin: beside each other, or, after unclean ends, one of them alone.

In ordinary times `begin` and `leave` count what is inside, and nothing else. While `is_marking`,
what enters is marked in the log before, and an accused request enters alone: it waits until all
others have left, and those that come meanwhile wait for it. They go on as soon as it has left, and
before the next one may enter alone, so that a search holds up everything else for one run at a
time, and half of the time at most.

Only what has come to its end leaves. A run that ends its process by an error, or is cancelled with
it, stays inside: otherwise the next one, in the few moments that the process has left, would be
marked to have run alone when it ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from headrace.crash_isolation.poison_search import Alone
from headrace.log.port import TopicPartition

Place: TypeAlias = tuple[TopicPartition, int]
"""A record: its partition and its offset."""


class Entry:
    """What has entered a gate, until it leaves.

    Attributes:
        places: the records that are marked for it.
    """

    __slots__ = ("places",)

    def __init__(self, places: tuple[Place, ...] = ()) -> None:
        self.places = places


_UNMARKED = Entry()


async def _keep_nothing() -> None:
    """Keep no marks."""


class RunGate:
    """The gate of one process.

    Args:
        keep: returns when the log holds a mark of what is `running` and `alone` now.

    Attributes:
        is_marking: whoever enters has to be marked before.
        alone: the request that runs alone, if one does.
    """

    def __init__(self, keep: Callable[[], Awaitable[None]] = _keep_nothing) -> None:
        self._keep = keep
        self._inside = 0
        self._emptied = asyncio.Event()
        self._waiting = 0
        self._is_closed = False
        self._changed = asyncio.Event()
        self._running: Counter[Place] = Counter()
        self._version = self._kept = 0
        self._keeping = asyncio.Lock()
        self.is_marking = False
        self.alone: Alone | None = None

    def running(self, partition: TopicPartition) -> list[int]:
        """Return the offsets of a partition that are inside and marked."""
        return [offset for each, offset in self._running if each == partition]

    def begin(self) -> Entry:
        """Enter unmarked; for what begins while `is_marking` is false."""
        self._inside += 1
        return _UNMARKED

    async def enter(self, places: Iterable[Place]) -> Entry:
        """Enter beside others, once the records are marked."""
        self._waiting += 1
        try:
            while self._is_closed:
                await self._change()
        finally:
            self._waiting -= 1
            self._tell()
        entry = Entry(tuple(places))
        self._inside += 1
        self._running.update(entry.places)
        # Acknowledged before it begins: an unmarked culprit would never be found.
        await self._mark()
        return entry

    def leave(self, entry: Entry) -> None:
        """Leave; a mark that still says otherwise is a superset, which costs a run alone."""
        self._inside -= 1
        if entry.places:
            self._running.subtract(entry.places)
            self._running = +self._running
        if not self._inside:
            self._emptied.set()

    async def enter_alone(self, alone: Alone) -> None:
        """Enter when all others have left, once it is marked that nothing else runs."""
        # Those that waited for the one before go first, and each of them runs at least once.
        while self._is_closed or self._waiting:
            await self._change()
        self._is_closed = True
        while self._inside:  # runs have a deadline, and what does not end ends the process
            self._emptied.clear()
            await self._emptied.wait()
        self.alone = alone
        # Nothing is inside when the mark is acknowledged, and nothing enters before this one has
        # left. So an end from here on is an attempt against this request and no other.
        await self._mark()

    def leave_alone(self) -> None:
        """Let the others go on."""
        self.alone = None
        self._is_closed = False
        self._tell()

    async def _mark(self) -> None:
        """Return when a mark is kept that was written after this call; many share one write."""
        self._version += 1
        wanted = self._version
        async with self._keeping:
            if self._kept < wanted:
                written = self._version
                await self._keep()
                self._kept = written

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
