"""A partition of the embedded log with transactions, against the plainest model of one."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from headrace.log.memory.broker import Partition
from headrace.log.port import NewRecord, TopicPartition

PLAIN = -1
IDS = st.integers(0, 2)


class Append(NamedTuple):
    """A number of records, written in the transaction with this id or in none."""

    transaction: int
    records: int


class End(NamedTuple):
    """The end of a transaction, if it is open."""

    transaction: int
    commit: bool


STEPS = st.lists(
    st.one_of(
        st.builds(Append, st.just(PLAIN) | IDS, st.integers(1, 3)),
        st.builds(End, IDS, st.booleans()),
    ),
    max_size=30,
)


class Model:
    """The state of each offset: `visible`, `open` in a transaction, or `gone`."""

    def __init__(self) -> None:
        self.fates: list[str | int] = []

    def append(self, step: Append) -> None:
        fate = "visible" if step.transaction == PLAIN else step.transaction
        self.fates += [fate] * step.records

    def end(self, step: End) -> bool:
        """False where the transaction is not open."""
        if step.transaction not in self.fates:
            return False
        after = "visible" if step.commit else "gone"
        self.fates = [after if fate == step.transaction else fate for fate in self.fates]
        self.fates.append("gone")  # the marker
        return True

    @property
    def stable_end(self) -> int:
        still_open = [offset for offset, fate in enumerate(self.fates) if isinstance(fate, int)]
        return min(still_open, default=len(self.fates))

    @property
    def readable(self) -> list[int]:
        below = self.fates[: self.stable_end]
        return [offset for offset, fate in enumerate(below) if fate == "visible"]


@given(STEPS, st.integers(0, 40), st.integers(1, 10))
def test_readers_see_committed_records_below_first_open_transaction(
    steps: list[Append | End], start: int, most: int
) -> None:
    """Reads from any offset are in order, with gaps for aborted records and markers."""
    partition, model = Partition(TopicPartition("t", 0), 1_000_000), Model()
    for step in steps:
        if isinstance(step, Append):
            transaction = None if step.transaction == PLAIN else step.transaction
            records = [NewRecord(None, b"v")] * step.records
            partition.append(records, [1] * step.records, 0, transaction)
            model.append(step)
        elif model.end(step):
            partition.end_transaction(step.transaction, commit=step.commit)
    assert (partition.end, partition.stable_end) == (len(model.fates), model.stable_end)
    found = [record.offset for record in partition.read(start, most)[0]]
    assert found == [offset for offset in model.readable if offset >= start][:most]
