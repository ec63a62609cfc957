"""The in-flight tracker under any order of events."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget, BudgetShares
from headrace.delivery.inflight import Deferred, InFlightAck, InFlightTracker
from headrace.log.port import Committed, TopicPartition
from headrace.protocol.messages import Envelope
from headrace.tuning import TUNING

PARTITIONS = [TopicPartition("requests", number) for number in range(3)]
LIMIT_BYTES = 1000


class Partition:
    """The records that the log holds of one partition, and those delivered and answered so far."""

    def __init__(self) -> None:
        self.committed = Committed(0)
        self.log: list[int] = []
        self.delivered: set[int] = set()
        self.answered: set[int] = set()
        self.position = 0

    def read(self, gap: int) -> int:
        """The offset of the next record; where the log ends, one is written after a gap."""
        place = bisect_left(self.log, self.position)
        if place == len(self.log):
            self.log.append(self.position + gap)
        self.position = self.log[place] + 1
        self.delivered.add(self.log[place])
        return self.log[place]


class LedgerMachine(RuleBasedStateMachine):
    """A consumer that is assigned partitions, reads, acknowledges and loses them, in any order."""

    ack_handles: Bundle[tuple[InFlightAck, int]] = Bundle("receipts")
    deferred: Bundle[Deferred] = Bundle("deferred")

    @initialize()
    def begin(self) -> None:
        self.acked = 0
        self.tracker = InFlightTracker(Budget(LIMIT_BYTES), self._count)
        self.partitions = {name: Partition() for name in PARTITIONS}
        self.outstanding: dict[int, tuple[InFlightAck, int]] = {}
        self.share = BudgetShares(self.tracker.budget, 0.5, 0.5).share("model", "tenant")

    def _count(self) -> None:
        self.acked += 1

    @rule(name=st.sampled_from(PARTITIONS))
    def assign(self, name: TopicPartition) -> None:
        """Start from what is committed; an assignment that was never revoked ends by this."""
        partition = self.partitions[name]
        self.tracker.assign(name, AckedOffsets.from_committed(partition.committed))
        partition.position = partition.committed.offset

    @rule(
        target=ack_handles,
        name=st.sampled_from(PARTITIONS),
        gap=st.integers(0, 3),
        size_bytes=st.integers(0, 400),
        parts=st.integers(1, 3),
    )
    def admit(
        self, name: TopicPartition, gap: int, size_bytes: int, parts: int
    ) -> tuple[InFlightAck, int] | MultipleResults[tuple[InFlightAck, int]]:
        """Read the next record; one that is answered already is passed over."""
        assignment = self.tracker.get(name)
        if assignment is None:
            return multiple()
        partition = self.partitions[name]
        offset = partition.read(gap)
        if offset in assignment.progress:
            assert offset in partition.answered
            assignment.skip_answered(offset)
            return multiple()
        ack_handle = assignment.admit(offset, size_bytes)
        ack_handle.parts = parts
        self.outstanding[id(ack_handle)] = (ack_handle, parts)
        return ack_handle, parts

    @rule(entry=consumes(ack_handles), size_bytes=st.integers(0, 400))
    def ack(self, entry: tuple[InFlightAck, int], size_bytes: int) -> None:
        """All parts of a record are acknowledged, after its size became known."""
        ack_handle, parts = entry
        partition = self.partitions[ack_handle.assignment.partition]
        before = ack_handle.assignment.progress.committable()
        notified = self.acked
        ack_handle.resize(size_bytes)
        for _ in range(parts):
            ack_handle.ack()
        del self.outstanding[id(ack_handle)]
        assert self.acked == notified + 1
        if ack_handle.revoked:
            assert ack_handle.assignment.progress.committable() == before
        else:
            partition.answered.add(ack_handle.offset)
            assert ack_handle.offset in ack_handle.assignment.progress

    @rule(target=deferred, entry=consumes(ack_handles))
    def defer(self, entry: tuple[InFlightAck, int]) -> Deferred | MultipleResults[Deferred]:
        """Leave a record in the log; what is revoked is acknowledged instead."""
        ack_handle, _ = entry
        del self.outstanding[id(ack_handle)]
        if ack_handle.revoked:
            ack_handle.parts = 1
            ack_handle.ack()
            return multiple()
        return ack_handle.defer(self.share, 1, Envelope())

    @rule(target=ack_handles, deferred=consumes(deferred), size_bytes=st.integers(0, 400))
    def admit_again(
        self, deferred: Deferred, size_bytes: int
    ) -> tuple[InFlightAck, int] | MultipleResults[tuple[InFlightAck, int]]:
        """Read a deferred record a second time, unless its partition was lost meanwhile."""
        if deferred.assignment.revoked:
            return multiple()
        deferred.reserve()
        ack_handle = deferred.assignment.admit(deferred.offset, size_bytes)
        self.outstanding[id(ack_handle)] = (ack_handle, 1)
        return ack_handle, 1

    @rule(name=st.sampled_from(PARTITIONS))
    def revoke(self, name: TopicPartition) -> None:
        self.tracker.revoke(name)
        assert self.tracker.get(name) is None

    @rule()
    def commit(self) -> None:
        """Commit; nothing needs a second commit until something more is answered."""
        offsets = self.tracker.committable()
        for name, committed in offsets.items():
            self.partitions[name].committed = committed
        self.tracker.note_committed(offsets)
        assert self.tracker.committable() == {}

    @invariant()
    def nothing_unanswered_is_committable(self) -> None:
        """The base never reaches an offset that was delivered and not answered."""
        for name, committed in self.tracker.committable().items():
            partition = self.partitions[name]
            unanswered = partition.delivered - partition.answered
            last = max(partition.delivered, default=-1)
            assert committed.offset <= min(unanswered, default=last + 1)
            progress = AckedOffsets.from_committed(committed)
            assert not [offset for offset in unanswered if offset in progress]

    @invariant()
    def in_flight_is_what_is_not_settled(self) -> None:
        for name in PARTITIONS:
            valid = [
                ack_handle
                for ack_handle, _ in self.outstanding.values()
                if ack_handle.assignment.partition == name and not ack_handle.revoked
            ]
            assert self.tracker.in_flight([name]) == len(valid)
        used = sum(ack_handle.size_bytes for ack_handle, _ in self.outstanding.values())
        assert self.tracker.budget.used_bytes == used
        assert self.share.used_bytes == 0

    @precondition(lambda self: not self.outstanding)
    @invariant()
    def an_idle_ledger_has_its_budget_back(self) -> None:
        assert self.tracker.budget.used_bytes == 0
        assert self.tracker.in_flight() == 0

    @invariant()
    def the_budget_flaps_around_no_limit(self) -> None:
        budget = self.tracker.budget
        before = budget.is_exceeded
        assert budget.is_exceeded is before
        if budget.used_bytes >= LIMIT_BYTES:
            assert before
        if budget.used_bytes <= LIMIT_BYTES * TUNING.delivery.resume_fraction:
            assert not before


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_reading_resumes_well_below_limit() -> None:
    """Between three quarters of the budget and all of it, what was goes on."""
    budget = Budget(1000)
    seen = []
    for used_bytes in (999, 1000, 999, 751, 750, 999, 1000):
        budget.used_bytes = used_bytes
        seen.append(budget.is_exceeded)

    assert seen == [False, True, True, True, False, False, True]
