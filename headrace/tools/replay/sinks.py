"""Destinations of copies: a topic, or a capture file. A pipeline in this process is
in `answers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.log.partitioner import partition_for_key
from headrace.log.port import NewRecord, Producer, Record, Run, TopicPartition
from headrace.tools.replay.capture import CaptureWriter
from headrace.tools.replay.marking import Marking


class Sink(Protocol):
    """Accepts records in order of time."""

    async def send(self, records: Sequence[Record]) -> Sequence[Run]:
        """Hand over records; return the runs to await until they are safe."""
        ...

    async def finish(self) -> None:
        """Wait for the results, after everything was handed over and is safe."""
        ...


class TopicSink:
    """Sends marked copies into a topic.

    A record goes to its own partition's number modulo the topic's, so the order within a partition
    is kept.

    Args:
        partitions: number of partitions of the topic.
        by_key: choose the partition of a record with a key as Kafka's clients do.
        now_ms: current time for deadlines, in epoch milliseconds.
    """

    def __init__(
        self,
        producer: Producer,
        target: tuple[str, int],
        marking: Marking,
        now_ms: Callable[[], int],
        *,
        by_key: bool = False,
    ) -> None:
        self.topic, self._partitions = target
        self._producer = producer
        self._marking = marking
        self._now_ms = now_ms
        self._by_key = by_key

    async def prepare(self) -> None:
        """Let the producer fetch the topic's metadata, so that no record waits for it."""
        for number in range(self._partitions):
            await self._producer.send(TopicPartition(self.topic, number), ())

    def partition_of(self, record: Record) -> TopicPartition:
        """Return the partition of the record's copy."""
        if self._by_key and record.key is not None:
            return TopicPartition(self.topic, partition_for_key(record.key, self._partitions))
        return TopicPartition(self.topic, record.partition % self._partitions)

    async def send(self, records: Sequence[Record]) -> Sequence[Run]:
        """See `Sink`."""
        now_ms = self._now_ms()
        shares: dict[TopicPartition, list[NewRecord]] = {}
        for record in records:
            copy = self._marking.copy_of(record, now_ms)
            shares.setdefault(self.partition_of(record), []).append(copy)
        runs: list[Run] = []
        for partition, copies in shares.items():
            runs += await self._producer.send(partition, copies)
        return runs

    async def finish(self) -> None:
        """Do nothing: records in a topic have no results to wait for."""


class CaptureSink:
    """Writes unchanged records into an open capture file."""

    def __init__(self, writer: CaptureWriter) -> None:
        self._writer = writer

    async def send(self, records: Sequence[Record]) -> Sequence[Run]:
        """See `Sink`. Records are in the file once a frame is full, or at the end."""
        await asyncio.to_thread(self._writer.add, records)
        return ()

    async def finish(self) -> None:
        """Do nothing: leaving the writer writes the index."""
