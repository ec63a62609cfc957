"""Crash isolation: which records may have ended a process, and what follows from each unclean end.

Synchronous, and without a log: `headrace.consumer.quarantine` drives it,
`headrace.crash_isolation.markers` keeps the marks. What one unclean end after the other means for
a partition:

1. The first one makes no suspects. Most processes are killed from outside, and all that was
   admitted may be a backlog of hours. Only the unanswered offsets are noted (`stop`, `ends`).
2. If they are still unanswered at the next one, they may have caused both. From here on the process
   is *careful*: what is read or run is marked before, so that the next end shows what was running.
3. What was running at an end of a careful process is a *suspect*. Each suspect runs alone, and is
   marked to run alone; everything else goes on between. After that it is no suspect any more.
4. An end while one request ran alone is one attempt against it. At `max_attempts` it is *poisoned*:
   it is answered without being run. Nothing else counts against a request.

So four unclean ends single out one culprit of any number, and `max_attempts - 1` more confirm it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from headrace.delivery.acked_offsets import AckedOffsets, Range
from headrace.log.port import TopicPartition

CAREFUL_FROM = 2
"""Unclean ends in a row that the same records survived unanswered."""

Unit: TypeAlias = tuple[int, int]
"""Smallest unit that can run alone: offset, and index in its record (0 unless it is a batch)."""

_NONE: Mapping[Unit, int] = MappingProxyType({})


class CrashMarker(NamedTuple):
    """Crash-isolation state of one partition, as written to the log.

    Attributes:
        is_open: the partition is being read. If found at an assignment, the last end was unclean.
        stop: offsets below this that are unanswered now were unanswered at an unclean end.
        ends: number of consecutive such ends; 0 if there was none.
        running: offsets being read or run when this was written; empty unless careful.
        alone: index in its record of the only request running (in `running`); None otherwise.
        attempts: number of times that each request was running alone when its process ended.
        suspects: offsets running at an unclean end that have not survived a run alone yet.
    """

    is_open: bool = False
    stop: int = 0
    ends: int = 0
    running: tuple[Range, ...] = ()
    alone: int | None = None
    attempts: Mapping[Unit, int] = _NONE
    suspects: tuple[Range, ...] = ()


CLEAN = CrashMarker()


class Alone(NamedTuple):
    """The only request running."""

    partition: TopicPartition
    offset: int
    index_in_record: int


class _History:
    """One partition's part in past unclean ends."""

    __slots__ = ("answered", "attempts", "ends", "stop", "suspects")

    def __init__(self) -> None:
        self.stop = 0
        self.ends = 0
        self.attempts: dict[Unit, int] = {}
        self.suspects: set[int] = set()
        self.answered: set[Unit] = set()


class PoisonSearch:
    """Suspects and poisoned records of the partitions of one process.

    Args:
        max_attempts: number of unclean ends while running alone that make a request poisoned.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._histories: dict[TopicPartition, _History] = {}

    def restore(
        self, partition: TopicPartition, marker: CrashMarker, progress: AckedOffsets, end: int
    ) -> None:
        """Restore the state of an assigned partition from its marker.

        Args:
            partition: the assigned partition.
            marker: its marker as found in the log.
            progress: its answered offsets.
            end: the offset that its next record will get: nothing above was ever delivered.
        """
        history = self._histories[partition] = _History()
        if marker.is_open:
            # Only records unanswered at both ends can have caused both.
            was_there = bool(progress.unanswered(min(marker.stop, end)))
            history.ends = (marker.ends if was_there else 0) + 1
            history.stop = end
        else:
            history.ends, history.stop = marker.ends, min(marker.stop, end)
        # Answered records did not end the process, so an end of which all are answered is resolved.
        if not progress.unanswered(history.stop):
            history.ends = history.stop = 0
        # Attempts before the lone run below, which adds one to them.
        for unit, count in marker.attempts.items():
            if unit[0] < end and unit[0] not in progress:
                history.attempts[unit] = count
        # Nothing else ran when this marker was acknowledged: only such an end is an attempt.
        if marker.alone is not None and marker.running:
            unit = (marker.running[0][0], marker.alone)
            if unit[0] < end and unit[0] not in progress:
                history.attempts[unit] = history.attempts.get(unit, 0) + 1
        # After a clean end `running` is empty, so that a rebalance makes no suspects.
        unanswered = progress.unanswered(end)
        for found in (*marker.suspects, *marker.running):
            history.suspects.update(_offsets_within(found, unanswered))

    def forget(self, partition: TopicPartition) -> None:
        """Forget a revoked partition."""
        self._histories.pop(partition, None)

    @property
    def is_active(self) -> bool:
        """True if an unclean end is not yet resolved."""
        for each in self._histories.values():
            if each.ends or ((each.suspects or each.attempts) and _is_searched(each)):
                return True
        return False

    @property
    def is_careful(self) -> bool:
        """True if records must be marked before they are read or run."""
        histories = self._histories.values()
        return any(each.ends >= CAREFUL_FROM or _is_searched(each) for each in histories)

    @property
    def suspect_count(self) -> int:
        """Number of suspects."""
        return sum(len(each.suspects) for each in self._histories.values())

    def suspects(self, partition: TopicPartition) -> frozenset[int]:
        """Return the offsets that must run alone."""
        history = self._histories.get(partition)
        return frozenset() if history is None else frozenset(history.suspects)

    def poisoned(self, partition: TopicPartition) -> frozenset[Unit]:
        """Return the requests to answer without running them."""
        history = self._histories.get(partition)
        attempts = {} if history is None else history.attempts
        return frozenset(unit for unit, n in attempts.items() if n >= self._max_attempts)

    def note_survived(self, partition: TopicPartition, offset: int) -> None:
        """Note that a record ran alone to its end: it is no suspect any more."""
        history = self._histories.get(partition)
        if history is None:
            return
        history.suspects.discard(offset)
        for unit in [unit for unit in history.attempts if unit[0] == offset]:
            # A batch record survives without its poisoned requests, which stay poisoned.
            if history.attempts[unit] < self._max_attempts:
                del history.attempts[unit]

    def forget_answered(
        self,
        partition: TopicPartition,
        progress: AckedOffsets,
        committed: int,
        passed: int,
        parked: Collection[int],
    ) -> None:
        """Forget offsets that were answered meanwhile, or never existed.

        Args:
            partition: the partition.
            progress: its answered offsets.
            committed: below this offset, answers are committed in the log.
            passed: below this offset, all existing records were admitted.
            parked: offsets of suspects that wait to run alone, or do so now.
        """
        history = self._histories.get(partition)
        if history is None:
            return
        # An offset that was passed and is not parked holds no record: nothing would ever clear it.
        for offset in list(history.suspects):
            if offset in progress or (offset < passed and offset not in parked):
                history.suspects.discard(offset)
        for unit in [unit for unit in history.attempts if unit[0] in progress]:
            # Keep it until the answer is committed: the next owner would run it once more.
            history.answered.add(unit)
            if unit[0] < committed:
                del history.attempts[unit]
                history.answered.discard(unit)
        if history.ends and not progress.unanswered(history.stop):
            history.ends = history.stop = 0

    def open_marker(
        self, partition: TopicPartition, running: Iterable[int] = (), alone: Alone | None = None
    ) -> CrashMarker:
        """Return the marker of a partition that is being read.

        Args:
            partition: the partition.
            running: its offsets that are being read or run.
            alone: the request that runs alone, of any partition.
        """
        history = self._histories[partition]
        index = None
        if alone is not None:
            running = (alone.offset,) if alone.partition == partition else ()
            index = alone.index_in_record if alone.partition == partition else None
        return CrashMarker(
            is_open=True,
            stop=history.stop,
            ends=history.ends,
            running=ranges_of(running) if self.is_careful else (),
            alone=index,
            attempts=dict(history.attempts),
            suspects=ranges_of(history.suspects),
        )

    def closing_marker(self, partition: TopicPartition) -> CrashMarker:
        """Return the marker of a partition that is released cleanly.

        The results of the search stay, so that they survive a rebalance. Running records become no
        suspects, since this is not an unclean end.
        """
        return self.open_marker(partition)._replace(is_open=False)


def ranges_of(offsets: Iterable[int]) -> tuple[Range, ...]:
    """Return offsets as ranges, in order."""
    found: list[Range] = []
    for offset in sorted(offsets):
        if found and found[-1][1] == offset:
            found[-1] = (found[-1][0], offset + 1)
        else:
            found.append((offset, offset + 1))
    return tuple(found)


def _is_searched(history: _History) -> bool:
    return bool(history.suspects or history.attempts.keys() - history.answered)


def _offsets_within(one: Range, ranges: Iterable[Range]) -> Iterable[int]:
    for start, stop in ranges:
        yield from range(max(start, one[0]), min(stop, one[1]))
