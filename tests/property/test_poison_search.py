"""Which records are found to have ended a process, whatever else ends processes meanwhile."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.crash_isolation.poison_search import CLEAN, Alone, CrashMarker, PoisonSearch
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.log.port import TopicPartition

MAX_ATTEMPTS = 3
SEARCH = 3 + MAX_ATTEMPTS
"""Two ends that nobody was marked for, one that shows what was running, and the attempts."""
ALL = 1_000_000
BATCH = 8

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
    marks: dict[TopicPartition, CrashMarker] = field(default_factory=dict)
    committed: dict[TopicPartition, AckedOffsets] = field(default_factory=dict)
    answered: Counter[Record] = field(default_factory=Counter)
    poisoned: Counter[Record] = field(default_factory=Counter)
    alone: Counter[Record] = field(default_factory=Counter)
    ran_alone: Counter[Record] = field(default_factory=Counter)
    inside: set[Record] = field(default_factory=set)
    deaths: int = 0

    def run(self, most_deaths: int) -> None:
        """Restart processes until one has nothing left to do."""
        self.marks = dict.fromkeys(self.counts, CLEAN)
        self.committed = {partition: AckedOffsets(0) for partition in self.counts}
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
        self.inside = set()
        search = PoisonSearch(MAX_ATTEMPTS)
        progress = {each: AckedOffsets(of.base, of.ranges) for each, of in self.committed.items()}
        for partition, count in self.counts.items():
            search.restore(partition, self.marks[partition], progress[partition], count)
        self._mark(search, set())
        suspects: list[Record] = []
        others: list[Record] = []
        for partition in self.counts:
            among = set(search.suspects(partition))
            for start, stop in progress[partition].unanswered(self.counts[partition]):
                for offset in range(start, stop):
                    (suspects if offset in among else others).append((partition, offset))
        unread = {each: deque(o for p, o in others if p == each) for each in self.counts}
        read: set[Record] = set()
        self.random.shuffle(others)
        while suspects or others:
            if suspects and (not others or self.random.random() < 0.5):
                self._run_alone(search, progress, suspects.pop(0))
            else:
                batch, others = others[:BATCH], others[BATCH:]
                read.update(batch)
                self._run(search, progress, batch)
            if self.rebalances and self.random.random() < 0.1:
                self._hand_over(search, progress)
            if self.random.random() < 0.3 or not (suspects or others):
                self._commit(progress)
            for partition in self.counts:
                parked = {offset for each, offset in suspects if each == partition}
                passed = lowest_unread(partition, unread[partition], read)
                base = self.committed[partition].base
                search.forget_answered(partition, progress[partition], base, passed, parked)
        assert not search.is_active

    def _run(
        self,
        search: PoisonSearch,
        progress: dict[TopicPartition, AckedOffsets],
        batch: list[Record],
    ) -> None:
        if search.is_careful:
            self._mark(search, set(batch))
        self._execute(search, progress, batch)

    def _run_alone(
        self, search: PoisonSearch, progress: dict[TopicPartition, AckedOffsets], record: Record
    ) -> None:
        self._mark(search, {record}, Alone(*record, 0))
        self.ran_alone[record] += 1
        self._execute(search, progress, [record])
        search.note_survived(*record)

    def _execute(
        self,
        search: PoisonSearch,
        progress: dict[TopicPartition, AckedOffsets],
        batch: list[Record],
    ) -> None:
        self.inside = set(batch)
        for partition, offset in batch:
            if (offset, 0) in search.poisoned(partition):
                self.poisoned[partition, offset] += 1
            elif (partition, offset) not in self.absent:
                self._maybe_killed()
                if (partition, offset) in self.culprits:
                    self._die()
                self.answered[partition, offset] += 1
            progress[partition].mark_acked(offset - 1, offset)
        self.inside = set()

    def _hand_over(
        self, search: PoisonSearch, progress: dict[TopicPartition, AckedOffsets]
    ) -> None:
        self.rebalances -= 1
        self._commit(progress)
        for partition in self.counts:
            self.marks[partition] = search.closing_marker(partition)
        raise RevokedError

    def _mark(self, search: PoisonSearch, running: set[Record], alone: Alone | None = None) -> None:
        self._maybe_killed()
        for partition in self.counts:
            offsets = [offset for each, offset in running if each == partition]
            self.marks[partition] = search.open_marker(partition, offsets, alone)
        self._maybe_killed()

    def _commit(self, progress: dict[TopicPartition, AckedOffsets]) -> None:
        self.committed = {
            partition: AckedOffsets(of.base, of.ranges) for partition, of in progress.items()
        }

    def _maybe_killed(self) -> None:
        if self.kills and self.random.random() < 0.05:
            self.kills -= 1
            self._die()

    def _die(self) -> None:
        """Count who is marked to run alone, which must be true of it."""
        for partition, mark in self.marks.items():
            if mark.alone is not None:
                single = (partition, mark.running[0][0])
                assert self.inside <= {single}
                self.alone[single] += 1
        raise DiedError


def lowest_unread(partition: TopicPartition, offsets: deque[int], read: set[Record]) -> int:
    """Drop what was read from the front of the offsets, and return the lowest that is left."""
    while offsets and (partition, offsets[0]) in read:
        offsets.popleft()
    return offsets[0] if offsets else ALL


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


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_poison_search_answers_every_record_and_condemns_every_culprit(world: World) -> None:
    """All but the culprits are run and answered, in a bounded number of restarts."""
    world.run((len(world.culprits) + world.kills) * SEARCH)

    present = {
        (partition, offset)
        for partition, count in world.counts.items()
        for offset in range(count)
        if (partition, offset) not in world.absent
    }
    assert set(world.poisoned) >= world.culprits
    assert set(world.answered) | set(world.poisoned) == present


@settings(max_examples=100, deadline=None)
@given(worlds(most_kills=12))
def test_poison_search_condemns_only_record_run_alone(world: World) -> None:
    """A condemned record was the only one running at `MAX_ATTEMPTS` deaths."""
    world.run(ALL)

    assert all(world.alone[record] >= MAX_ATTEMPTS for record in world.poisoned)


@settings(max_examples=100, deadline=None)
@given(worlds(most_culprits=1, most_kills=0))
def test_poison_search_isolates_only_running_records(world: World) -> None:
    """One culprit costs its neighbours in a batch one run alone, and everyone else none."""
    world.rebalances = 0
    world.run(ALL)

    assert len(world.ran_alone) <= BATCH


def test_poison_among_ten_thousand_takes_six_restarts() -> None:
    """The number of restarts depends neither on the record's place nor on those beside it."""
    partition = TopicPartition("requests", 0)
    deaths = set()
    for culprit in (0, 4999, 9999):
        world = World({partition: 10_000}, {(partition, culprit)}, set(), 0, 0, Random(culprit))
        world.run(SEARCH)
        deaths.add(world.deaths)

    assert deaths == {SEARCH}


def test_first_unclean_end_makes_no_suspect() -> None:
    """Records present at the first unclean end run unmarked, like all others."""
    search, partition = PoisonSearch(MAX_ATTEMPTS), TopicPartition("requests", 0)

    search.restore(partition, CrashMarker(is_open=True), AckedOffsets(3), 10)

    assert (search.is_active, search.is_careful, search.suspect_count) == (True, False, 0)


def test_unclean_ends_with_progress_between_make_no_suspect() -> None:
    """Nothing that waits now was there at the one before."""
    search, partition = PoisonSearch(MAX_ATTEMPTS), TopicPartition("requests", 0)

    search.restore(partition, CrashMarker(is_open=True, stop=10, ends=1), AckedOffsets(10), 20)

    assert not search.is_careful
    assert search.open_marker(partition).ends == 1
