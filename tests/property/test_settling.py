"""Acknowledging many ack handles at once is acknowledging one after the other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import AssignedPartition, InFlightAck, ack_all
from headrace.log.port import TopicPartition


class Partitions:
    """Two of them, with records of which some are passed over and some have several parts."""

    def __init__(self, gaps: list[int], revoked: bool, held: int) -> None:
        self.notified = 0
        self.budget = Budget(1_000_000)
        self.assignments = [
            AssignedPartition(
                TopicPartition("t", number), 1, AckedOffsets(0), self.budget, self._notify
            )
            for number in range(2)
        ]
        self.ack_handles: list[InFlightAck] = []
        for number, gap in enumerate(gaps):
            assignment = self.assignments[number % 3 % 2]
            ack_handle = assignment.admit(assignment.last_delivered + 1 + gap % 2, 100 + number)
            ack_handle.parts = 4 if gap == 3 else 1
            for _ in range(min(held, ack_handle.parts - 1)):
                ack_handle.hold()
            self.ack_handles.append(ack_handle)
        self.assignments[1].revoked = revoked

    def _notify(self) -> None:
        self.notified += 1

    def state(self) -> list[object]:
        """All that acknowledging changes."""
        return [
            self.budget.used_bytes,
            self.budget.acked,
            *[(each.in_flight, each.held, each.progress) for each in self.assignments],
            [ack_handle.parts for ack_handle in self.ack_handles],
        ]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.booleans(),
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(0, 29), st.integers(1, 4))),
)
def test_acking_many_equals_acking_one_by_one(
    gaps: list[int], revoked: bool, held: int, order: list[tuple[int, int]]
) -> None:
    """Acks in any order, with gaps, in several parts, or of a revoked partition, are equal."""
    one_by_one, together = Partitions(gaps, revoked, held), Partitions(gaps, revoked, held)
    chosen: list[int] = []
    for place, times in order:
        if place < len(gaps):
            handle = one_by_one.ack_handles[place]
            most = handle.parts - handle.held_parts - chosen.count(place)
            chosen += [place] * min(times, most)

    for place in chosen:
        one_by_one.ack_handles[place].ack()
    ack_all([together.ack_handles[place] for place in chosen])

    assert together.state() == one_by_one.state()
    assert bool(together.notified) == bool(one_by_one.notified)
