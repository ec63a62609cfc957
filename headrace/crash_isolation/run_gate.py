"""Gate for reading and runs: concurrent normally, one suspect alone after unclean ends.

Normally `begin` and `leave` only count entries. While `is_marking`, each entry is first marked in
the log, and a suspect enters alone: it waits until all others have left, and later ones
wait for it. They continue once it has left, before the next one may enter alone, so that a search
blocks everything else for one run at a time, and half of the time at most.

Only completed work leaves. A run whose error ends the process, or that is cancelled with it, stays
inside: otherwise the next request could enter in the process's last moments and be marked as
running alone when the process ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from headrace.crash_isolation.poison_search import Alone
from headrace.log.port import TopicPartition

Position: TypeAlias = tuple[TopicPartition, int]
"""A record: its partition and its offset."""


class Entry:
    """One entry in a gate, until it leaves.

    Attributes:
        records: the records marked for it.
    """

    __slots__ = ("records",)

    def __init__(self, records: tuple[Position, ...] = ()) -> None:
        self.records = records


_UNMARKED = Entry()


async def _write_nothing() -> None:
    """Write no marker."""


class RunGate:
    """Gate of one process.

    Args:
        write_marker: writes what is `running` and `alone` now; returns once the log holds that.

    Attributes:
        is_marking: True if every entry must be marked first.
        alone: the request that runs alone, if any.
    """

    def __init__(self, write_marker: Callable[[], Awaitable[None]] = _write_nothing) -> None:
        self._write_marker = write_marker
        self._inside = 0
        self._emptied = asyncio.Event()
        self._waiting = 0
        self._is_closed = False
        self._changed = asyncio.Event()
        self._running: Counter[Position] = Counter()
        self._version = self._written = 0
        self._writing = asyncio.Lock()
        self.is_marking = False
        self.alone: Alone | None = None

    def running(self, partition: TopicPartition) -> list[int]:
        """Return the marked offsets of a partition that are inside."""
        return [offset for each, offset in self._running if each == partition]

    def begin(self) -> Entry:
        """Enter without a marker; only while `is_marking` is False."""
        self._inside += 1
        return _UNMARKED

    async def enter(self, records: Iterable[Position]) -> Entry:
        """Enter concurrently with others, and return once the records are marked."""
        self._waiting += 1
        try:
            while self._is_closed:
                await self._change()
        finally:
            self._waiting -= 1
            self._notify()
        # Count it before the marker is written: a lone run that comes now waits for it to leave.
        entry = Entry(tuple(records))
        self._inside += 1
        self._running.update(entry.records)
        # Acknowledged before it begins: an unmarked culprit would never be found.
        await self._mark()
        return entry

    def leave(self, entry: Entry) -> None:
        """Leave; an outdated marker lists too many records, which costs at most a run alone."""
        self._inside -= 1
        if entry.records:
            self._running.subtract(entry.records)
            self._running = +self._running
        if not self._inside:
            self._emptied.set()

    async def enter_alone(self, alone: Alone) -> None:
        """Wait until all others have left, enter, and mark that nothing else runs."""
        # Entries that waited for the previous lone run go first, so that each makes progress.
        while self._is_closed or self._waiting:
            await self._change()
        # Close before waiting: otherwise new entries could keep the gate occupied forever.
        self._is_closed = True
        while self._inside:  # runs have a deadline, and what does not end ends the process
            self._emptied.clear()
            await self._emptied.wait()
        self.alone = alone
        # Nothing else is inside when the marker is acknowledged, and nothing enters before this
        # one has left. So an unclean end from here on counts against this request only.
        await self._mark()

    def leave_alone(self) -> None:
        """Leave, and let the others continue."""
        # The log still holds the "alone" marker: a process that ends now adds one attempt. No other
        # run can add one, since `enter` writes a new marker before anything runs.
        self.alone = None
        self._is_closed = False
        self._notify()

    async def _mark(self) -> None:
        """Return once the log holds a marker written after this call; callers share one write."""
        # A write under way may have read the state before this change; the next one includes it.
        self._version += 1
        wanted = self._version
        async with self._writing:
            if self._written < wanted:
                written = self._version
                await self._write_marker()
                self._written = written

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
