"""The embedded log's transactional producer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from headrace.errors import Rejected
from headrace.log.errors import (
    LogUnavailable,
    RecordsRefused,
    TopicForbidden,
    TransactionTimedOut,
)
from headrace.log.memory.faults import Faults, SealFault
from headrace.log.memory.partition import payload_bytes
from headrace.log.memory.producer import MemoryProducer, batch_bounds, refusal
from headrace.log.memory.topics import Topics
from headrace.log.memory.transactions import Transaction, Transactions
from headrace.log.port import Committed, NewRecord, TopicPartition


class MemoryTransactionalProducer:
    """Commits records and offsets of one group together; see the port.

    Args:
        topics: the log's topics.
        faults: the injected faults.
        transactions: the coordinator.
        identity: the transactional id, and the group whose offsets are committed.
        now_ms: the clock for records without a timestamp, in epoch milliseconds.
    """

    def __init__(
        self,
        topics: Topics,
        faults: Faults,
        transactions: Transactions,
        identity: tuple[str, str],
        now_ms: Callable[[], int],
    ) -> None:
        self._topics = topics
        self._faults = faults
        self._transactions = transactions
        self._id, self._group = identity
        self._now_ms = now_ms
        self._metadata = MemoryProducer(topics, faults, now_ms)
        self._epoch: int | None = None  # None unless entered, and once closed or failed

    @property
    def is_usable(self) -> bool:
        """See the port."""
        return self._epoch is not None

    async def seal(
        self,
        records: Mapping[TopicPartition, Sequence[NewRecord]],
        offsets: Mapping[TopicPartition, Committed],
    ) -> None:
        """See the port."""
        epoch = self._epoch
        if epoch is None:
            raise RuntimeError("the producer was not entered, has failed, or is closed")
        self._require_acceptable(records)
        # Any failure below leaves the producer unusable: it is set again only on success.
        self._epoch = None
        if any(records.values()) or offsets:
            await self._seal(epoch, records, offsets)
        self._epoch = epoch

    def _require_acceptable(self, records: Mapping[TopicPartition, Sequence[NewRecord]]) -> None:
        """Raise if records are known to be refused, before the transaction begins."""
        refused = {}
        for partition, chunk in records.items():
            topic = self._topics.topic_of(partition)
            if not self._faults.knows_limits(partition.topic):
                continue
            found = {
                index: error
                for index, record in enumerate(chunk)
                if (error := refusal(topic, [record], [payload_bytes(record)])) is not None
            }
            if found:
                refused[partition] = found
        if refused:
            raise RecordsRefused(refused)
        for partition in records:
            self._faults.require_leader(partition)

    async def _seal(
        self,
        epoch: int,
        records: Mapping[TopicPartition, Sequence[NewRecord]],
        offsets: Mapping[TopicPartition, Committed],
    ) -> None:
        await self._faults.answered()
        transaction = self._transactions.begin(self._id, epoch)
        written_bytes = self._write(transaction, records)
        transaction.stage(offsets)
        await self._faults.seals_flow()
        await self._faults.answered()
        if self._faults.is_too_slow(written_bytes):
            raise TransactionTimedOut(f"transaction of {self._id}: {written_bytes} bytes in it")
        fault = self._faults.next_seal_fault()
        if fault is SealFault.TIMED_OUT:
            self._transactions.time_out(self._id)
        if fault is not SealFault.UNKNOWN_AND_OPEN:
            self._transactions.commit(self._id, epoch, self._group)
        if fault is not None:
            raise LogUnavailable(f"end of the transaction of {self._id}: the answer was lost")

    def _write(
        self, transaction: Transaction, records: Mapping[TopicPartition, Sequence[NewRecord]]
    ) -> int:
        """Write the records that the topics accept, and raise for the first refused one.

        Returns:
            The number of bytes written.
        """
        refused: list[Rejected] = []
        written_bytes = 0
        for partition, chunk in records.items():
            sizes = [payload_bytes(record) for record in chunk]
            if self._faults.is_forbidden(partition.topic):
                raise TopicForbidden(partition.topic)
            topic = self._topics.topic_of(partition)
            where = topic.partitions[partition.partition]
            for start, stop in batch_bounds(sizes, topic.max_message_bytes):
                batch, batch_sizes = chunk[start:stop], sizes[start:stop]
                error = refusal(topic, batch, batch_sizes)
                if error is None:
                    transaction.write(where, batch, batch_sizes, self._now_ms())
                    written_bytes += sum(batch_sizes)
                else:
                    refused.append(error)
        if refused:
            raise refused[0]
        return written_bytes

    async def partitions_for(self, topic: str) -> int | None:
        return await self._metadata.partitions_for(topic)

    async def close(self) -> None:
        self._epoch = None
        await self._metadata.close()

    async def __aenter__(self) -> Self:
        await self._faults.answered()
        self._epoch = self._transactions.enter(self._id)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
