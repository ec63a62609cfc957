"""Producers of the embedded log, with and without transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Self

from headrace.errors import Rejected
from headrace.log.errors import (
    LogUnavailable,
    RecordRefused,
    RecordsRefused,
    RecordTooLarge,
    TopicForbidden,
    TransactionTimedOut,
)
from headrace.log.memory.broker import FRAMING_BYTES, StoredTopic, Topics, payload_bytes
from headrace.log.memory.faults import Faults, TransactionFault
from headrace.log.memory.transactions import Transaction, Transactions
from headrace.log.port import Committed, Membership, NewRecord, SentBatch, TopicPartition
from headrace.tuning import TUNING, MemoryTuning


class MemoryProducer:
    """Writes to the partitions of one process.

    Args:
        topics: the log's topics.
        faults: the injected faults.
        now_ms: the clock for records without a timestamp, in epoch milliseconds.
        tuning: times and sizes.
    """

    def __init__(
        self,
        topics: Topics,
        faults: Faults,
        now_ms: Callable[[], int],
        tuning: MemoryTuning = TUNING.memory,
    ) -> None:
        self._tuning = tuning
        self._topics = topics
        self._faults = faults
        self._now_ms = now_ms
        self._counts: dict[str, int] = {}  # cached metadata, as in a real client
        self._hanging: set[asyncio.Future[None]] = set()
        self._unacknowledged: set[asyncio.Future[None]] = set()
        self._is_finished = self._is_closed = False

    async def send(
        self,
        partition: TopicPartition,
        records: Sequence[NewRecord],
        *,
        first_batch_only: bool = False,
    ) -> Sequence[SentBatch]:
        """See the port. A record that is too large fails alone, in a batch of its own;
        one without a key, on a compacted topic, fails its batch.
        """
        if self._is_closed:
            raise RuntimeError("the producer is closed")
        if self._is_finished:
            raise LogUnavailable(f"send to {partition}: the producer was finished")
        sizes = [payload_bytes(record) for record in records]
        if self._faults.topics.is_hidden(partition.topic):
            raise TopicForbidden(partition.topic)
        topic = self._topics.topic_of(partition)
        self._faults.topics.require_leader(partition)
        where = topic.partitions[partition.partition]
        batches = []
        bounds = batch_bounds(sizes, topic.max_message_bytes, self._tuning.max_batch_bytes)
        for start, stop in bounds[:1] if first_batch_only else bounds:
            batch, batch_sizes = records[start:stop], sizes[start:stop]
            refused = self._refusal(topic, batch, batch_sizes)
            if refused is not None:
                acknowledged = _failed(refused)
            elif self._faults.brokers.is_down:
                acknowledged = self._postpone(partial(where.append, batch, batch_sizes))
            else:
                where.append(batch, batch_sizes, self._now_ms())
                acknowledged = self._faults.acknowledgements.next()
            if not acknowledged.done():
                self._unacknowledged.add(acknowledged)
                acknowledged.add_done_callback(self._unacknowledged.discard)
            batches.append(SentBatch(stop - start, acknowledged))
        return batches

    async def partitions_for(self, topic: str) -> int | None:
        known = self._counts.get(topic)
        if known is not None:
            return known
        await self._faults.brokers.answered(self._tuning.metadata_timeout_s)
        await self._faults.topics.described(topic, self._tuning.metadata_timeout_s)
        if self._faults.topics.is_hidden(topic):
            raise TopicForbidden(topic)
        if self._topics.use(topic) is None:
            return None
        self._counts[topic] = self._topics.count(topic)
        return self._counts[topic]

    async def finish(self, timeout_s: float) -> None:
        self._is_finished = True
        if self._unacknowledged:
            await asyncio.wait(self._unacknowledged, timeout=timeout_s)

    async def close(self) -> None:
        self._is_closed = True
        if self._hanging and not self._is_finished:
            await asyncio.wait(self._hanging, timeout=self._tuning.flush_timeout_s)
        for future in list(self._hanging):
            self._faults.brokers.give_up(future)

    async def __aenter__(self) -> Self:
        await self._faults.brokers.answered()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _refusal(
        self, topic: StoredTopic, batch: Sequence[NewRecord], sizes: Sequence[int]
    ) -> Rejected | None:
        if self._faults.topics.is_forbidden(topic.info.name):
            return TopicForbidden(topic.info.name)
        return refusal(topic, batch, sizes)

    def _postpone(self, write: Callable[[int], None]) -> asyncio.Future[None]:
        future = self._faults.brokers.postpone(lambda: write(self._now_ms()))
        self._hanging.add(future)
        future.add_done_callback(self._hanging.discard)
        return future


class MemoryTransactionalProducer:
    """Commits records and offsets of one group together; see the port.

    Args:
        topics: the log's topics.
        faults: the injected faults.
        transactions: the coordinator.
        identity: the transactional id, and the group whose offsets are committed.
        now_ms: the clock for records without a timestamp, in epoch milliseconds.
        tuning: times and sizes.
    """

    def __init__(
        self,
        topics: Topics,
        faults: Faults,
        transactions: Transactions,
        identity: tuple[str, str],
        now_ms: Callable[[], int],
        tuning: MemoryTuning = TUNING.memory,
    ) -> None:
        self._tuning = tuning
        self._topics = topics
        self._faults = faults
        self._transactions = transactions
        self._id, self._group = identity
        self._now_ms = now_ms
        self._epoch: int | None = None  # None unless entered, and once closed or failed

    @property
    def is_usable(self) -> bool:
        """See the port."""
        return self._epoch is not None

    async def commit_transaction(
        self,
        records: Mapping[TopicPartition, Sequence[NewRecord]],
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership | None = None,
    ) -> None:
        """See the port."""
        epoch = self._epoch
        if epoch is None:
            raise RuntimeError("the producer was not entered, has failed, or is closed")
        records = {partition: list(chunk) for partition, chunk in records.items()}
        self._require_acceptable(records)
        # Any failure below leaves the producer unusable: it is set again only on success.
        self._epoch = None
        if any(records.values()) or offsets:
            await self._run_transaction(epoch, records, offsets, membership)
        self._epoch = epoch

    def _require_acceptable(self, records: Mapping[TopicPartition, Sequence[NewRecord]]) -> None:
        """Raise if records are known to be refused, before the transaction begins."""
        refused = {}
        for partition, chunk in records.items():
            topic = self._topics.topic_of(partition)
            if not self._faults.topics.knows_limits(partition.topic):
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
            self._faults.topics.require_leader(partition)

    async def _run_transaction(
        self,
        epoch: int,
        records: Mapping[TopicPartition, Sequence[NewRecord]],
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership | None,
    ) -> None:
        await self._faults.brokers.answered()
        await self._faults.transactions.writable()
        transaction = self._transactions.begin(self._id, epoch, self._group)
        written_bytes = self._write(transaction, records)
        transaction.stage(offsets, membership, asyncio.get_running_loop().time())
        await self._faults.transactions.allowed()
        await self._faults.brokers.answered()
        if self._faults.transactions.is_too_slow(written_bytes):
            raise TransactionTimedOut(f"transaction of {self._id}: {written_bytes} bytes in it")
        fault = self._faults.transactions.next()
        if fault is TransactionFault.TIMED_OUT:
            self._transactions.time_out(self._id)
        if fault is not TransactionFault.UNKNOWN_AND_OPEN:
            self._transactions.commit(self._id, epoch)
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
            if self._faults.topics.is_forbidden(partition.topic):
                raise TopicForbidden(partition.topic)
            topic = self._topics.topic_of(partition)
            where = topic.partitions[partition.partition]
            for start, stop in batch_bounds(
                sizes, topic.max_message_bytes, self._tuning.max_batch_bytes
            ):
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

    async def close(self) -> None:
        self._epoch = None

    async def __aenter__(self) -> Self:
        await self._faults.brokers.answered()
        await self._faults.transactions.may_enter()
        self._epoch = self._transactions.enter(self._id)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def refusal(
    topic: StoredTopic, batch: Sequence[NewRecord], sizes: Sequence[int]
) -> RecordTooLarge | RecordRefused | None:
    """Return why a topic refuses a batch; only a batch of one record can be too large."""
    size, limit = sizes[0] + FRAMING_BYTES, topic.max_message_bytes
    if len(batch) == 1 and size > limit:
        where = topic.info.name
        return RecordTooLarge(f"{where}: expected a record of at most {limit} bytes, got {size}")
    if topic.is_compacted and any(record.key is None for record in batch):
        return RecordRefused(f"{topic.info.name}: expected a key, since the topic is compacted")
    return None


def _failed(error: Exception) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


def batch_bounds(
    sizes: Sequence[int], max_message_bytes: int, max_batch_bytes: int
) -> Sequence[tuple[int, int]]:
    """Return the bounds of batches: one exceeds the limit only if a single record does."""
    limit = min(max_message_bytes, max_batch_bytes)
    if sizes and sum(sizes) + len(sizes) * FRAMING_BYTES <= limit:
        return [(0, len(sizes))]
    bounds: list[tuple[int, int]] = []
    start, filled = 0, 0
    for index, size in enumerate(sizes):
        framed = size + FRAMING_BYTES
        if index > start and filled + framed > limit:
            bounds.append((start, index))
            start, filled = index, 0
        filled += framed
    if sizes:
        bounds.append((start, len(sizes)))
    return bounds
