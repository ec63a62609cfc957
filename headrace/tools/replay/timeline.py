"""Merge of several partitions into one order of time; pure, no I/O.

The next record is the one with the lowest timestamp among the partitions' first pending ones, so a
partition's own order always holds. It is known only while every unfinished partition has a pending
record; until then nothing is returned.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence

from headrace.log.port import Record, TopicPartition
from headrace.tools.replay.recording import record_bytes

RECORD_OVERHEAD_BYTES = 500
"""Size of a pending record beside its bytes: its Python objects."""


class _Queue:
    __slots__ = ("finished", "held_bytes", "records")

    def __init__(self) -> None:
        self.records: deque[Record] = deque()
        self.held_bytes = 0
        self.finished = False


class Timeline:
    """Pending records by partition.

    Args:
        partitions: all partitions of the merge.
    """

    def __init__(self, partitions: Iterable[TopicPartition]) -> None:
        self._queues = {partition: _Queue() for partition in partitions}
        self._heads: list[tuple[int, TopicPartition]] = []
        self._empty = len(self._queues)  # unfinished partitions without a pending record

    @property
    def finished(self) -> bool:
        """Return whether every partition has ended and nothing is pending."""
        return not self._empty and not self._heads

    def held_bytes(self, partition: TopicPartition) -> int:
        """Return the size of a partition's pending records."""
        return self._queues[partition].held_bytes

    def is_finished(self, partition: TopicPartition) -> bool:
        """Return whether the partition's end was reached."""
        return self._queues[partition].finished

    def is_waiting_for(self, partition: TopicPartition) -> bool:
        """Return whether the merge is blocked until this partition has a record, or has ended."""
        queue = self._queues[partition]
        return not queue.finished and not queue.records

    def add(self, partition: TopicPartition, records: Sequence[Record]) -> None:
        """Append records of a partition, in the order of their offsets."""
        if not records:
            return
        queue = self._queues[partition]
        if not queue.records:
            heapq.heappush(self._heads, (records[0].timestamp, partition))
            self._empty -= not queue.finished
        queue.records.extend(records)
        queue.held_bytes += sum(map(_held, records))

    def finish(self, partition: TopicPartition) -> None:
        """Mark the end of a partition."""
        queue = self._queues[partition]
        if not queue.finished:
            queue.finished = True
            self._empty -= not queue.records

    def take(self, max_records: int) -> list[Record]:
        """Return the next records, as far as they are known."""
        taken: list[Record] = []
        while not self._empty and self._heads and len(taken) < max_records:
            _, partition = self._heads[0]
            queue = self._queues[partition]
            record = queue.records.popleft()
            queue.held_bytes -= _held(record)
            taken.append(record)
            if queue.records:
                heapq.heapreplace(self._heads, (queue.records[0].timestamp, partition))
            else:
                heapq.heappop(self._heads)
                self._empty += not queue.finished
        return taken


def _held(record: Record) -> int:
    return record_bytes(record) + RECORD_OVERHEAD_BYTES
