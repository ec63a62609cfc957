"""Which records are found to have ended a process, whatever else ends processes meanwhile."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.flow.answered import Progress
from headrace.flow.suspects import CLEAN, PIECES, Mark, Span, Suspects, cut
from headrace.log.port import TopicPartition

MAX_ATTEMPTS = 3
ALL = 1_000_000

Record = tuple[TopicPartition, int]


class DiedError(Exception):
    """The process is gone."""


class RevokedError(Exception):
    """The partitions go to another process, in good order."""


@dataclass
class World:
    """Partitions of a log, and the processes that read them, one after the other.

    Attributes:
        counts: how many offsets each partition has.
        culprits: records that end their process.
        absent: offsets at which there is no record.
        kills: how many more times something else ends a process.
        rebalances: how many more times the partitions change hands in good order.
    """

    counts: dict[TopicPartition, int]
    culprits: set[Record]
    absent: set[Record]
    kills: int
    rebalances: int
    random: Random
    marks: dict[TopicPartition, Mark] = field(default_factory=dict)
    committed: dict[TopicPartition, Progress] = field(default_factory=dict)
    answered: Counter[Record] = field(default_factory=Counter)
    condemned: Counter[Record] = field(default_factory=Counter)
    alone: Counter[Record] = field(default_factory=Counter)
    let_in: set[Record] = field(default_factory=set)
    deaths: int = 0
    steps: int = 0

    def run(self, most_deaths: int) -> None:
        """Restart processes until one has nothing left to do."""
        self.marks = dict.fromkeys(self.counts, CLEAN)
        self.committed = {partition: Progress(0) for partition in self.counts}
        while not self._lived():
            assert self.deaths <= most_deaths

    def _lived(self) -> bool:
        try:
            self._live()
        except DiedError:
            self.deaths += 1
            return False
        except RevokedError:
            return False
        return True

    def _live(self) -> None:
        suspects = Suspects(MAX_ATTEMPTS)
        progress = {
            partition: Progress(of.base, of.ranges) for partition, of in self.committed.items()
        }
        for partition, count in self.counts.items():
            suspects.take_up(partition, self.marks[partition], progress[partition], count)
        while part := suspects.next():
            self._write(suspects)
            self._let_in(suspects, progress, part)
            if self.rebalances and self.random.random() < 0.1:
                self._hand_over(suspects, progress)
            suspects.survived()
        self._write(suspects)
        everything = tuple(
            Span(partition, start, stop)
            for partition, count in self.counts.items()
            for start, stop in progress[partition].unanswered(count)
        )
        self._let_in(suspects, progress, everything)

    def _hand_over(self, suspects: Suspects, progress: dict[TopicPartition, Progress]) -> None:
        self.rebalances -= 1
        self._commit(progress)
        for partition in self.counts:
            self.marks[partition] = suspects.closing_mark(partition)
        raise RevokedError

    def _write(self, suspects: Suspects) -> None:
        self.let_in = set()
        self._maybe_killed()
        for partition in self.counts:
            self.marks[partition] = suspects.mark(partition)
        self._maybe_killed()

    def _let_in(
        self, suspects: Suspects, progress: dict[TopicPartition, Progress], part: tuple[Span, ...]
    ) -> None:
        self.steps += 1
        records = [
            (span.partition, offset)
            for span in part
            for offset in range(span.start, span.stop)
            if (span.partition, offset) not in self.absent
        ]
        self.let_in = set(records)
        self.random.shuffle(records)
        commit_at = self.random.randrange(len(records) + 1)
        condemned = {partition: suspects.condemned(partition) for partition in self.counts}
        for place, (partition, offset) in enumerate(records):
            if place == commit_at:  # what is answered from here on is lost to the next end
                self._commit(progress)
            if (offset, 0) in condemned[partition]:
                self.condemned[partition, offset] += 1
            else:
                self._maybe_killed()
                if (partition, offset) in self.culprits:
                    self._die()
                self.answered[partition, offset] += 1
            progress[partition].cover(offset - 1, offset)

    def _commit(self, progress: dict[TopicPartition, Progress]) -> None:
        self.committed = {
            partition: Progress(of.base, of.ranges) for partition, of in progress.items()
        }

    def _maybe_killed(self) -> None:
        if self.kills and self.random.random() < 0.05:
            self.kills -= 1
            self._die()

    def _die(self) -> None:
        """Count who is marked to run alone, which must be true of it."""
        for partition, mark in self.marks.items():
            if mark.running is not None and mark.alone is not None:
                single = (partition, mark.running[0])
                assert self.let_in <= {single}
                self.alone[single] += 1
        raise DiedError


@st.composite
def worlds(draw: st.DrawFn, most_culprits: int = 3, most_kills: int = 4) -> World:
    """A few partitions, some culprits, gaps, and kills from outside."""
    sizes = draw(st.lists(st.integers(0, 120), min_size=1, max_size=4))
    counts = {TopicPartition("requests", n): size for n, size in enumerate(sizes)}
    records = [(partition, offset) for partition, size in counts.items() for offset in range(size)]
    culprits: set[Record] = set()
    absent: set[Record] = set()
    if records:
        culprits = draw(st.sets(st.sampled_from(records), max_size=most_culprits))
        absent = draw(st.sets(st.sampled_from(records), max_size=20)) - culprits
    kills = draw(st.integers(0, most_kills))
    rebalances = draw(st.integers(0, 6))
    return World(counts, culprits, absent, kills, rebalances, Random(draw(st.integers())))


def enough_deaths(world: World) -> int:
    """Each culprit, and each kill, may cost a search from the beginning."""
    offsets = max(2, sum(world.counts.values()))
    search = 2 + math.ceil(math.log(offsets, PIECES)) + MAX_ATTEMPTS
    return (len(world.culprits) + world.kills) * search


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_every_record_is_answered_and_every_culprit_condemned(world: World) -> None:
    """All but the culprits are run and answered, in a bounded number of restarts."""
    world.run(enough_deaths(world))

    present = {
        (partition, offset)
        for partition, count in world.counts.items()
        for offset in range(count)
        if (partition, offset) not in world.absent
    }
    assert set(world.condemned) >= world.culprits
    assert set(world.answered) | set(world.condemned) == present


@settings(max_examples=100, deadline=None)
@given(worlds(most_kills=12))
def test_only_what_ran_alone_and_marked_is_condemned(world: World) -> None:
    """Whatever is condemned was the only thing running at `MAX_ATTEMPTS` deaths."""
    world.run(ALL)

    assert all(world.alone[record] >= MAX_ATTEMPTS for record in world.condemned)


@given(worlds(most_culprits=0, most_kills=0), st.randoms(use_true_random=False))
def test_an_end_by_another_cause_costs_one_mark(world: World, random: Random) -> None:
    """With no culprit, the successor of a killed process runs all suspects at once."""
    world.rebalances = 0
    world.run(0)
    world.committed = {partition: Progress(0) for partition in world.counts}
    world.steps = 0

    world._live()

    assert world.steps <= 2


def test_one_among_ten_thousand_takes_few_restarts() -> None:
    """Whole, four times in pieces, and three attempts, the first of which is the fourth piece's."""
    partition = TopicPartition("requests", 0)
    deaths = []
    for culprit in range(0, 10_000, 499):
        world = World({partition: 10_000}, {(partition, culprit)}, set(), 0, 9, Random(culprit))
        world.run(9)
        deaths.append(world.deaths)

    assert max(deaths) == 8


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 20))
def test_cutting_loses_nothing(lengths: list[int], pieces: int) -> None:
    """The pieces have the part's offsets in the same order, in no more pieces than asked for."""
    part = tuple(
        Span(TopicPartition("requests", number), 7, 7 + length)
        for number, length in enumerate(lengths)
    )

    found = cut(part, pieces)

    def offsets(of: tuple[Span, ...]) -> list[Record]:
        return [(s.partition, offset) for s in of for offset in range(s.start, s.stop)]

    assert [each for piece in found for each in offsets(piece)] == offsets(part)
    assert len(found) <= pieces
