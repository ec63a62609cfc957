"""Number of records, bytes and time span by partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.log.port import Record, TopicPartition
from headrace.tools.replay.recording import record_bytes


class PartitionTotals(NamedTuple):
    """Totals of one partition in a file or dry run.

    Attributes:
        bytes: of keys, values and headers.
        first_ms, last_ms: the lowest and the highest timestamp.
    """

    partition: TopicPartition
    records: int
    bytes: int
    first_offset: int
    last_offset: int
    first_ms: int
    last_ms: int


class Totals:
    """Adds records up by partition."""

    def __init__(self) -> None:
        self._by_partition: dict[TopicPartition, PartitionTotals] = {}

    def add(self, records: Sequence[Record]) -> None:
        """Count more records."""
        for record in records:
            partition = TopicPartition(record.topic, record.partition)
            offset, at_ms = record.offset, record.timestamp
            before = self._by_partition.get(partition)
            if before is None:
                before = PartitionTotals(partition, 0, 0, offset, offset, at_ms, at_ms)
            self._by_partition[partition] = PartitionTotals(
                partition,
                before.records + 1,
                before.bytes + record_bytes(record),
                min(before.first_offset, offset),
                max(before.last_offset, offset),
                min(before.first_ms, at_ms),
                max(before.last_ms, at_ms),
            )

    def partitions(self) -> list[PartitionTotals]:
        """Return the totals in the order of partitions."""
        return [self._by_partition[partition] for partition in sorted(self._by_partition)]
