"""The embedded log's producer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from headrace.errors import Rejected
from headrace.log.errors import RecordRefused, RecordTooLarge, TopicForbidden
from headrace.log.memory.faults import Faults
from headrace.log.memory.partition import FRAMING_BYTES, payload_bytes
from headrace.log.memory.topics import Topic, Topics
from headrace.log.port import NewRecord, Run, TopicPartition

# As in the Kafka adapter, so that records are sent in several runs here as well.
_BATCH_BYTES = 256 * 1024
_METADATA_TIMEOUT_S = 1.0  # the port's bound for `partitions_for`
_FLUSH_TIMEOUT_S = 3.0


class MemoryProducer:
    """Writes to the partitions of one process.

    Args:
        topics: the log's topics.
        faults: the injected faults.
        now_ms: the clock for records without a timestamp, in epoch milliseconds.
    """

    def __init__(self, topics: Topics, faults: Faults, now_ms: Callable[[], int]) -> None:
        self._topics = topics
        self._faults = faults
        self._now_ms = now_ms
        self._counts: dict[str, int] = {}  # cached metadata, as in a real client
        self._hanging: set[asyncio.Future[None]] = set()
        self._is_closed = False

    async def send(self, partition: TopicPartition, records: Sequence[NewRecord]) -> Sequence[Run]:
        """See the port. A record that is too large fails alone, in a run of its own;
        one without a key, on a compacted topic, fails the run that it is in.
        """
        if self._is_closed:
            raise RuntimeError("the producer is closed")
        sizes = [payload_bytes(record) for record in records]
        if self._faults.is_hidden(partition.topic):
            raise TopicForbidden(partition.topic)
        topic = self._topics.topic_of(partition)
        self._faults.require_leader(partition)
        where = topic.partitions[partition.partition]
        runs = []
        for start, stop in batch_bounds(sizes, topic.max_message_bytes):
            batch, batch_sizes = records[start:stop], sizes[start:stop]
            refused = self._refusal(topic, batch, batch_sizes)
            if refused is None:
                acknowledged = self._write(partial(where.append, batch, batch_sizes))
            else:
                acknowledged = _failed(refused)
            runs.append(Run(stop - start, acknowledged))
        return runs

    async def batch_limit_bytes(self, partition: TopicPartition) -> int:
        """See the port."""
        await self._faults.answered()
        if self._faults.is_hidden(partition.topic):
            raise TopicForbidden(partition.topic)
        return min(self._topics.topic_of(partition).max_message_bytes, _BATCH_BYTES)

    async def partitions_for(self, topic: str) -> int | None:
        known = self._counts.get(topic)
        if known is not None:
            return known
        await self._faults.answered(_METADATA_TIMEOUT_S)
        if self._faults.is_hidden(topic):
            raise TopicForbidden(topic)
        if self._topics.use(topic) is None:
            return None
        self._counts[topic] = self._topics.count(topic)
        return self._counts[topic]

    async def close(self) -> None:
        self._is_closed = True
        if self._hanging:
            _, late = await asyncio.wait(self._hanging, timeout=_FLUSH_TIMEOUT_S)
            for future in late:
                self._faults.give_up(future)

    async def __aenter__(self) -> Self:
        await self._faults.answered()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _refusal(
        self, topic: Topic, batch: Sequence[NewRecord], sizes: Sequence[int]
    ) -> Rejected | None:
        if self._faults.is_forbidden(topic.info.name):
            return TopicForbidden(topic.info.name)
        return refusal(topic, batch, sizes)

    def _write(self, write: Callable[[int], None]) -> asyncio.Future[None]:
        if not self._faults.is_down:
            write(self._now_ms())
            return self._faults.acknowledgement()
        future = self._faults.postpone(lambda: write(self._now_ms()))
        self._hanging.add(future)
        future.add_done_callback(self._hanging.discard)
        return future


def refusal(
    topic: Topic, batch: Sequence[NewRecord], sizes: Sequence[int]
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


def batch_bounds(sizes: Sequence[int], max_message_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of batches: one exceeds the limit only if a single record does."""
    limit = min(max_message_bytes, _BATCH_BYTES)
    start, filled = 0, 0
    for index, size in enumerate(sizes):
        framed = size + FRAMING_BYTES
        if index > start and filled + framed > limit:
            yield start, index
            start, filled = index, 0
        filled += framed
    if sizes:
        yield start, len(sizes)
