"""Which records may have ended a process, and in which parts they run until the culprit is found.

After an unclean end every record that may have been in flight is a suspect. Suspects run in parts,
and while one runs nothing else does in its process; that it runs was marked in the log before. So
whoever comes after the next unclean end knows which part was running. A part that ran when its
process died is cut into pieces; a part that is answered is innocent. A record that ran alone and
marked, and whose process died, has one attempt against it; at `max_attempts` it is condemned, and
is answered without being run. Nothing else counts against a record.

- The first part is all suspects at once: most processes are killed from outside, and one mark is
  then all that an unclean end costs.
- A death costs a restart, a part that survives only a mark. So a part is cut into many pieces
  (group testing with tests of unequal cost) instead of two.
- When all pieces but one have survived, the last is guilty by elimination and is cut without
  being run.
- Parts run in the order of their offsets, so that a partition is read in one direction.

All of it is synchronous and knows no log; `headrace.flow.probation` drives it, and
`headrace.flow.marks` keeps the marks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from headrace.flow.answered import Progress, Range
from headrace.log.port import TopicPartition

PIECES = 16
"""Into how many pieces a part is cut: one among 10,000 is alone after four deaths, not fourteen."""

Unit: TypeAlias = tuple[int, int]
"""What can run alone: an offset, and a place within its record, which is 0 unless it is a batch."""

_NONE: Mapping[Unit, int] = MappingProxyType({})


class Mark(NamedTuple):
    """What is kept of one partition.

    Attributes:
        is_open: records are let in. Who finds this at an assignment follows an unclean end.
        stop: suspects lie below this offset; 0 where none are known.
        running: the part that was let in, from its first offset up to, and without, its last.
        alone: it was one request and nothing else ran: its place in its record; otherwise None.
        attempts: how often a request ran alone and marked when its process died.
        accused: where the culprit has to be, when the partition was given up in good order while
            that was known; without it each rebalance would begin the search anew.
    """

    is_open: bool = False
    stop: int = 0
    running: Range | None = None
    alone: int | None = None
    attempts: Mapping[Unit, int] = _NONE
    accused: Range | None = None


CLEAN = Mark()


class Span(NamedTuple):
    """Suspects of one partition, from `start` up to, and without, `stop`."""

    partition: TopicPartition
    start: int
    stop: int


Part: TypeAlias = tuple[Span, ...]
"""What runs at once, in the order of partitions and offsets."""


def weight(part: Iterable[Span]) -> int:
    """How many offsets a part has."""
    return sum(span.stop - span.start for span in part)


def cut(part: Part, pieces: int = PIECES) -> list[Part]:
    """Cut a part into so many pieces of about the same weight, or into single offsets."""
    size = max(1, -(-weight(part) // pieces))
    found: list[Part] = []
    piece: list[Span] = []
    room = size
    for span in part:
        start = span.start
        while start < span.stop:
            stop = min(span.stop, start + room)
            piece.append(Span(span.partition, start, stop))
            room -= stop - start
            start = stop
            if not room:
                found.append(tuple(piece))
                piece, room = [], size
    if piece:
        found.append(tuple(piece))
    return found


class Suspects:
    """The suspects of the partitions of one process.

    Args:
        max_attempts: so many deaths, alone and marked, condemn a request.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._attempts: dict[TopicPartition, dict[Unit, int]] = {}
        self._cleared: Part = ()
        self._accused: deque[Part] = deque()
        self._on_trial = False
        self._survivors = False
        self._waiting: Part = ()
        self._running: Part = ()
        self._place = 0

    def take_up(self, partition: TopicPartition, mark: Mark, progress: Progress, end: int) -> None:
        """A partition is assigned.

        Args:
            partition: which one.
            mark: as it was found.
            progress: what is answered of it.
            end: the offset that its next record will get: nothing above was ever delivered.
        """
        self.give_up(partition)
        stop = end if mark.is_open and not mark.stop else min(mark.stop, end)
        attempts = {unit: n for unit, n in mark.attempts.items() if unit[0] not in progress}
        if mark.running is not None and mark.alone is not None and mark.running[0] not in progress:
            unit = (mark.running[0], mark.alone)
            attempts[unit] = attempts.get(unit, 0) + 1
        self._attempts[partition] = attempts
        suspects = progress.unanswered(stop)
        first, last = mark.running or mark.accused or (0, 0)
        cleared = _within(partition, suspects, 0, first)
        accused = _within(partition, suspects, first, last)
        waiting = _within(partition, suspects, last, stop)
        self._cleared = _joined(self._cleared, cleared)
        self._waiting = _joined(self._waiting, waiting)
        if accused:
            everyone = _joined(tuple(span for piece in self._accused for span in piece), accused)
            self._accuse(everyone)

    def give_up(self, partition: TopicPartition) -> None:
        """A partition is not ours any more."""
        self._attempts.pop(partition, None)
        self._cleared = _without(self._cleared, partition)
        self._waiting = _without(self._waiting, partition)
        self._running = _without(self._running, partition)
        pieces = (_without(piece, partition) for piece in self._accused)
        self._accused = deque(piece for piece in pieces if piece)

    def next(self) -> Part:
        """The part to be run next, alone; empty when there are no suspects left.

        A part that has not survived yet, since its trial was interrupted, comes again.
        """
        if self._running:
            return self._running
        self._on_trial = not self._cleared and bool(self._accused)
        if self._cleared:
            # They were answered before the last end, though nobody could commit that any more.
            self._running, self._cleared = self._cleared, ()
        elif self._on_trial:
            while self._survivors and len(self._accused) == 1 and weight(self._accused[0]) > 1:
                self._accuse(self._accused[0])
            self._running = self._accused.popleft()
        else:
            self._running, self._waiting = self._waiting, ()
        self._place = 0
        return self._running

    def runs_alone(self, place: int) -> None:
        """Of the one record that is running, the request at this place runs now, and no other."""
        self._place = place

    def survived(self) -> None:
        """All that was running is answered."""
        self._survivors = self._survivors or self._on_trial
        for span in self._running:
            attempts = self._attempts.get(span.partition, {})
            for unit in [unit for unit in attempts if self._is_innocent(span, unit)]:
                del attempts[unit]
        self._running = ()

    def _is_innocent(self, span: Span, unit: Unit) -> bool:
        return (
            span.start <= unit[0] < span.stop
            and self._attempts[span.partition][unit] < self._max_attempts
        )

    def _accuse(self, part: Part) -> None:
        self._accused = deque(cut(part))
        self._survivors = False

    @property
    def is_alone(self) -> bool:
        """Whether what is running is one record."""
        return weight(self._running) == 1

    @property
    def count(self) -> int:
        """How many offsets are suspect, running ones included."""
        parts = (self._cleared, *self._accused, self._waiting, self._running)
        return sum(weight(part) for part in parts)

    def condemned(self, partition: TopicPartition) -> frozenset[Unit]:
        """What shall be answered without being run; kept as long as the partition is ours."""
        attempts = self._attempts.get(partition, {})
        return frozenset(unit for unit, n in attempts.items() if n >= self._max_attempts)

    def mark(self, partition: TopicPartition) -> Mark:
        """What is true of a partition now; open for good once there are no suspects anywhere."""
        running = [span for span in self._running if span.partition == partition]
        stop = self._stop(partition)
        attempts = dict(self._attempts.get(partition, {}))
        if not running:
            return Mark(not self.count, stop, attempts=attempts)
        alone = self._place if self.is_alone else None
        return Mark(True, stop, (running[0].start, running[-1].stop), alone, attempts)

    def closing_mark(self, partition: TopicPartition) -> Mark:
        """What is true of a partition that is given up in good order."""
        attempts = dict(self._attempts.get(partition, {}))
        pieces = (*self._accused, self._running if self._on_trial else ())
        accused = sorted(span for piece in pieces for span in piece if span.partition == partition)
        range_ = (accused[0].start, accused[-1].stop) if accused else None
        return Mark(False, self._stop(partition), attempts=attempts, accused=range_)

    def _stop(self, partition: TopicPartition) -> int:
        parts = (self._cleared, *self._accused, self._waiting, self._running)
        return max((s.stop for part in parts for s in part if s.partition == partition), default=0)


def _within(
    partition: TopicPartition, ranges: Sequence[Range], start: int, stop: int
) -> list[Span]:
    return [
        Span(partition, max(first, start), min(last, stop))
        for first, last in ranges
        if first < stop and last > start
    ]


def _joined(part: Part, more: Sequence[Span]) -> Part:
    return tuple(sorted((*part, *more)))


def _without(part: Part, partition: TopicPartition) -> Part:
    return tuple(span for span in part if span.partition != partition)
