"""Transactions of the embedded log: epochs, open transactions, commit and abort.

The rules of Kafka's transaction coordinator: a producer that enters gets the next epoch of its id,
which fences the former one and aborts its open transaction. The group holds the offsets of a
transaction, and refuses those of a member whose generation is over (`headrace.log.memory.group`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headrace.log.errors import Fenced
from headrace.log.memory.broker import Partition
from headrace.log.memory.group import Group
from headrace.log.port import Committed, Membership, NewRecord, TopicPartition


class Transaction:
    """One open transaction: its records, and the offsets that will count once it commits.

    Args:
        group: the group whose offsets it commits.

    Attributes:
        offsets: what it will commit for the group.
    """

    def __init__(self, group: Group) -> None:
        self._partitions: dict[Partition, None] = {}
        self._group = group
        self.offsets: dict[TopicPartition, Committed] = {}

    def write(
        self, where: Partition, records: Sequence[NewRecord], sizes: Sequence[int], now_ms: int
    ) -> None:
        """Append records that stay invisible until the transaction ends."""
        self._partitions[where] = None
        where.append(records, sizes, now_ms, transaction=self)

    def stage(
        self, offsets: Mapping[TopicPartition, Committed], membership: Membership | None, now: float
    ) -> None:
        """Add offsets. Raises `Fenced` and `LogRefused` as the group does."""
        self._group.stage(self, offsets, membership, now)
        self.offsets.update(offsets)

    def end_records(self, *, commit: bool) -> None:
        """Write the markers, which make the records visible to all readers, or to none."""
        for partition in self._partitions:
            partition.end_transaction(self, commit=commit)

    def end_offsets(self, *, commit: bool) -> None:
        """Write the marker for the group's offsets."""
        self._group.end_transaction(self, commit=commit)


class Transactions:
    """The transaction coordinator: the epoch of each transactional id, and the open transactions.

    Args:
        group: returns the consumer group of a name.
    """

    def __init__(self, group: Callable[[str], Group]) -> None:
        self.offsets_lag = False
        self._group = group
        self._epochs: dict[str, int] = {}
        self._open: dict[str, Transaction] = {}
        self._lagging: dict[str, list[Transaction]] = {}

    def enter(self, transactional_id: str) -> int:
        """Fence the former producer of this id and abort its open transaction.

        Returns:
            The new producer's epoch.
        """
        # Settle the former transaction first: offsets read after entering must be final.
        self._abort(transactional_id)
        self._let_offsets_be_seen(transactional_id)
        self._epochs[transactional_id] = self._epochs.get(transactional_id, -1) + 1
        return self._epochs[transactional_id]

    def entered(self, transactional_id: str) -> int:
        """Return how many producers of an id have entered."""
        return self._epochs.get(transactional_id, -1) + 1

    def begin(self, transactional_id: str, epoch: int, group: str) -> Transaction:
        """Open a transaction. Raises `Fenced`."""
        self.require_current(transactional_id, epoch)
        return self._open.setdefault(transactional_id, Transaction(self._group(group)))

    def commit(self, transactional_id: str, epoch: int) -> None:
        """Commit the open transaction, which makes all of it visible. Raises `Fenced`."""
        self.require_current(transactional_id, epoch)
        transaction = self._open.pop(transactional_id)
        transaction.end_records(commit=True)
        self._lagging.setdefault(transactional_id, []).append(transaction)
        if not self.offsets_lag:
            self._let_offsets_be_seen(transactional_id)

    def time_out(self, transactional_id: str) -> None:
        """Abort an open transaction and fence its producer, as a broker does to a slow one.

        Raises:
            ValueError: there is none.
        """
        if transactional_id not in self._open:
            raise ValueError(f"expected an open transaction of {transactional_id!r}, got none")
        self.enter(transactional_id)

    def require_current(self, transactional_id: str, epoch: int) -> None:
        """Raise `Fenced` unless the epoch is the id's latest."""
        latest = self._epochs.get(transactional_id, -1)
        if epoch != latest:
            raise Fenced(
                f"transactional id {transactional_id}: epoch {epoch} is over, {latest} is current"
            )

    def open_offsets(self) -> Mapping[str, Mapping[TopicPartition, Committed]]:
        """Return the offsets that each open transaction will commit, by transactional id."""
        return {name: dict(each.offsets) for name, each in self._open.items()}

    def show_all_offsets(self) -> None:
        """Make offsets visible that were committed while offsets lagged."""
        for transactional_id in list(self._lagging):
            self._let_offsets_be_seen(transactional_id)

    def _abort(self, transactional_id: str) -> None:
        transaction = self._open.pop(transactional_id, None)
        if transaction is not None:
            transaction.end_records(commit=False)
            transaction.end_offsets(commit=False)

    def _let_offsets_be_seen(self, transactional_id: str) -> None:
        for transaction in self._lagging.pop(transactional_id, ()):
            transaction.end_offsets(commit=True)
