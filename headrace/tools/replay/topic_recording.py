"""Recordings backed by a topic, read without a consumer group.

Partitions are merged by timestamp: the next record is the one with the lowest timestamp among the
first pending records of all partitions, so the order within a partition always holds. It is known
only while every unfinished partition has a pending record; until then nothing is returned.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from headrace.errors import ConfigurationError
from headrace.log.port import Consumer, Gap, Log, Record, TopicPartition
from headrace.tools.replay.recording import (
    CHUNK_RECORDS,
    Recording,
    Selection,
    Span,
    Window,
    memory_bytes,
)
from headrace.tools.replay.silence import Silence

# --- merging partitions --------------------------------------------------------------------------


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
        queue.held_bytes += sum(map(memory_bytes, records))

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
            queue.held_bytes -= memory_bytes(record)
            taken.append(record)
            if queue.records:
                heapq.heapreplace(self._heads, (queue.records[0].timestamp, partition))
            else:
                heapq.heappop(self._heads)
                self._empty += not queue.finished
        return taken


# --- reading -------------------------------------------------------------------------------------


POLL_S = 0.2


class ReadAhead(NamedTuple):
    """Limits of reading ahead.

    Attributes:
        poll_records: of one poll.
        total_bytes: of records that wait for slower partitions, over all partitions.
        least_partition_bytes: that each partition may hold, however many partitions there are.
    """

    poll_records: int = 2000
    total_bytes: int = 64 * 1024 * 1024
    least_partition_bytes: int = 1024 * 1024


READ_AHEAD = ReadAhead()


class TopicRecording(Recording):
    """Selected records of a topic; made by `open_topic`.

    Args:
        log: open for as long as this is used.
        spans: of all partitions that are read.
    """

    def __init__(
        self,
        log: Log,
        topic: str,
        spans: Sequence[Span],
        selection: Selection,
        read_ahead: ReadAhead = READ_AHEAD,
    ) -> None:
        self.name = topic
        self.spans = spans
        self._log = log
        self._selection = selection
        self._read_ahead = read_ahead

    async def chunks(self) -> AsyncGenerator[list[Record], None]:
        """See `Recording`."""
        left = self._selection.limit
        partitions = [span.partition for span in self.spans if span.begin < span.end]
        if not partitions or left == 0:
            return
        async with self._log.reader(partitions) as reader:
            reading = _TopicReader(reader, self.spans, self._selection, self._read_ahead)
            while not reading.timeline.finished:
                most = CHUNK_RECORDS if left is None else min(left, CHUNK_RECORDS)
                chunk = reading.timeline.take(most)
                if not chunk:
                    for gap in await reading.advance():
                        if self.on_unreadable is not None:
                            self.on_unreadable(gap)
                    continue
                yield chunk
                if left is not None:
                    left -= len(chunk)
                    if not left:
                        return


class _TopicReader:
    """One reading: polls into the timeline, and pauses partitions that are far ahead."""

    def __init__(
        self,
        reader: Consumer,
        spans: Sequence[Span],
        selection: Selection,
        read_ahead: ReadAhead,
    ) -> None:
        self._reader = reader
        self._poll_records = read_ahead.poll_records
        self._ends = {span.partition: span.end for span in spans if span.begin < span.end}
        self._selection = selection
        self._paused: set[TopicPartition] = set()
        self._most_ahead_bytes = max(
            read_ahead.total_bytes // len(self._ends), read_ahead.least_partition_bytes
        )
        self._silence = Silence()
        self.timeline = Timeline(self._ends)
        for span in spans:
            if span.partition in self._ends:
                reader.seek(span.partition, span.begin)

    async def advance(self) -> list[Gap]:
        """Poll once, detect ended partitions, and return unreadable ranges."""
        began_s = time.monotonic()
        polled = await self._reader.poll(POLL_S, self._poll_records)
        waited_s = time.monotonic() - began_s
        for partition, records in polled.items():
            if not self.timeline.is_finished(partition):
                self._take(partition, records)
        gaps = [gap for gap in self._reader.gaps() if gap.first < self._ends[gap.partition]]
        await self._look_for_ends()
        waiting = list(filter(self.timeline.is_waiting_for, self._ends))
        await self._silence.check(self._reader, waiting, waited_s)
        self._hold_back()
        return gaps

    def _take(self, partition: TopicPartition, records: Sequence[Record]) -> None:
        end = self._ends[partition]
        within = [record for record in records if record.offset < end]
        self.timeline.add(partition, [each for each in within if self._selection.fits(each)])
        if records[-1].offset >= end - 1:
            self._finish(partition)

    async def _look_for_ends(self) -> None:
        """Detect ends: the remaining offsets may be transaction markers, which no poll returns."""
        for partition, end in self._ends.items():
            waits = self.timeline.is_waiting_for(partition)
            if waits and await self._reader.position(partition) >= end:
                self._finish(partition)

    def _finish(self, partition: TopicPartition) -> None:
        self.timeline.finish(partition)
        self._reader.pause([partition])

    def _hold_back(self) -> None:
        for partition in self._ends:
            if self.timeline.is_finished(partition):
                continue
            held_bytes = self.timeline.held_bytes(partition)
            if partition in self._paused:
                if held_bytes <= self._most_ahead_bytes // 2:
                    self._reader.resume([partition])
                    self._paused.discard(partition)
            elif held_bytes > self._most_ahead_bytes:
                self._reader.pause([partition])
                self._paused.add(partition)


@asynccontextmanager
async def open_topic(
    log: Log, topic: str, selection: Selection, read_ahead: ReadAhead = READ_AHEAD
) -> AsyncIterator[TopicRecording]:
    """Open a topic's records up to its current last stable offsets.

    Raises:
        ConfigurationError: the topic, or one of the requested partitions, is missing.
        LogUnavailable: no broker answers.
    """
    info = (await log.describe_topics([topic]))[topic]
    if info is None:
        raise ConfigurationError(f"{topic}: expected a topic, but there is none of this name")
    window = selection.window
    for number in window.named_partitions():
        if number >= info.partitions:
            raise ConfigurationError(
                f"{topic}: expected a partition below {info.partitions}, got {number}"
            )
    partitions = [
        TopicPartition(topic, number)
        for number in range(info.partitions)
        if window.includes(number)
    ]
    async with log.reader(partitions) as reader:
        spans = await _spans(reader, partitions, window)
    yield TopicRecording(log, topic, spans, selection, read_ahead)


async def _spans(
    reader: Consumer, partitions: Sequence[TopicPartition], window: Window
) -> list[Span]:
    begins = dict(await reader.beginning_offsets(partitions))
    ends = dict(await reader.end_offsets(partitions))
    if window.from_ms is not None:
        for partition, offset in (await _offsets_at(reader, partitions, window.from_ms)).items():
            begins[partition] = ends[partition] if offset is None else offset
    if window.until_ms is not None:
        for partition, offset in (await _offsets_at(reader, partitions, window.until_ms)).items():
            ends[partition] = ends[partition] if offset is None else min(offset, ends[partition])
    return [window.span(each, begins[each], ends[each]) for each in partitions]


async def _offsets_at(
    reader: Consumer, partitions: Sequence[TopicPartition], timestamp_ms: int
) -> Mapping[TopicPartition, int | None]:
    return await reader.offsets_for_times(dict.fromkeys(partitions, timestamp_ms))
