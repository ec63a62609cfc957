"""Transactions of the embedded log: epochs, open transactions, commit and abort.

The rules of Kafka's transaction coordinator for producers without KIP-447: a producer that enters
gets the next epoch of its id, which fences the former one and aborts its open transaction; and the
group's offsets are bound to the producer's epoch alone, not to a membership.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headrace.log.errors import Fenced
from headrace.log.memory.broker import Partition
from headrace.log.memory.group import Group, require_short_metadata
from headrace.log.port import Committed, NewRecord, TopicPartition


class Transaction:
    """One open transaction: its records, and the offsets that will count once it commits.

    Attributes:
        offsets: what it will commit for the group.
    """

    def __init__(self) -> None:
        self._partitions: dict[Partition, None] = {}
        self.offsets: dict[TopicPartition, Committed] = {}

    def write(
        self, where: Partition, records: Sequence[NewRecord], sizes: Sequence[int], now_ms: int
    ) -> None:
        """Append records that stay invisible until the transaction ends."""
        self._partitions[where] = None
        where.append(records, sizes, now_ms, transaction=self)

    def stage(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Add offsets. Raises `LogRefused` if a metadata text is longer than Kafka accepts."""
        require_short_metadata(offsets)
        self.offsets.update(offsets)

    def end(self, *, commit: bool) -> Mapping[TopicPartition, Committed]:
        """Write the markers, which make the records visible to all readers, or to none.

        Returns:
            The offsets that it commits for the group.
        """
        for partition in self._partitions:
            partition.end_transaction(self, commit=commit)
        return self.offsets if commit else {}


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
        self._lagging: dict[str, list[Callable[[], None]]] = {}

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

    def begin(self, transactional_id: str, epoch: int) -> Transaction:
        """Open a transaction. Raises `Fenced`."""
        self.require_current(transactional_id, epoch)
        return self._open.setdefault(transactional_id, Transaction())

    def commit(self, transactional_id: str, epoch: int, group: str) -> None:
        """Commit the open transaction, which makes all of it visible. Raises `Fenced`."""
        self.require_current(transactional_id, epoch)
        offsets = self._open.pop(transactional_id).end(commit=True)

        def apply() -> None:
            self._group(group).committed.update(offsets)

        self._lagging.setdefault(transactional_id, []).append(apply)
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
            transaction.end(commit=False)

    def _let_offsets_be_seen(self, transactional_id: str) -> None:
        for apply in self._lagging.pop(transactional_id, ()):
            apply()
