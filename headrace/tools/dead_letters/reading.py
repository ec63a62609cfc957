"""Reading of a topic up to its ends at the start, without a consumer group."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from headrace.client.rpc import topic_partitions
from headrace.log.errors import OffsetOutOfRange
from headrace.log.port import Consumer, Gap, Log, Record, TopicPartition
from headrace.tools.dead_letters.dead_letter import (
    DeadLetter,
    DeadLetterSelection,
    parse_dead_letter,
)
from headrace.tools.replay.silence import Silence

POLL_TIMEOUT_S = 0.2
POLL_MAX_RECORDS = 200


class OffsetRange(NamedTuple):
    """Offsets from `start` up to `end`, exclusive."""

    start: int
    end: int


async def spans_of(
    consumer: Consumer, partitions: Sequence[TopicPartition], since_ms: int | None = None
) -> dict[TopicPartition, OffsetRange]:
    """Return the current offsets of the partitions, from `since_ms` (epoch milliseconds) on."""
    beginnings = await consumer.beginning_offsets(partitions)
    ends = await consumer.end_offsets(partitions)
    starts: Mapping[TopicPartition, int | None] = beginnings
    if since_ms is not None:
        starts = await consumer.offsets_for_times(dict.fromkeys(partitions, since_ms))
    spans = {}
    for partition in partitions:
        start, end = starts[partition], ends[partition]
        first = end if start is None else max(start, beginnings[partition])
        spans[partition] = OffsetRange(min(first, end), end)
    return spans


async def read_spans(
    consumer: Consumer,
    spans: Mapping[TopicPartition, OffsetRange],
    on_unreadable: Callable[[Gap], object] | None = None,
) -> AsyncGenerator[Sequence[Record], None]:
    """Assign the partitions, and yield the records of the spans in offset order per partition.

    Args:
        consumer: assigned to the partitions here.
        spans: offsets to read.
        on_unreadable: called with each unreadable range.

    Raises:
        LogUnavailable: nothing came for 30 seconds.
    """
    left = {partition: span.end for partition, span in spans.items() if span.start < span.end}
    consumer.pause([partition for partition in spans if partition not in left])
    for partition in left:
        consumer.seek(partition, spans[partition].start)
    silence = Silence()
    while left:
        began_s = time.monotonic()
        try:
            polled = await consumer.poll(POLL_TIMEOUT_S, POLL_MAX_RECORDS)
        except OffsetOutOfRange as error:
            await _skip_what_is_gone(consumer, error.positions)
            continue
        waited_s = time.monotonic() - began_s
        for gap in consumer.gaps():
            if on_unreadable is not None and gap.first < left.get(gap.partition, 0):
                on_unreadable(gap)
        for partition, records in polled.items():
            end = left.get(partition)
            if end is not None:
                yield [record for record in records if record.offset < end]
        for partition in await _finished(consumer, left, polled):
            del left[partition]
            consumer.pause([partition])
        await silence.check(consumer, left, waited_s)


async def _finished(
    consumer: Consumer,
    left: Mapping[TopicPartition, int],
    polled: Mapping[TopicPartition, Sequence[Record]],
) -> list[TopicPartition]:
    """Return the unfinished partitions that have now reached their ends."""
    if polled:
        return [
            name for name in polled if name in left and polled[name][-1].offset >= left[name] - 1
        ]
    # The remaining offsets before an end may be transaction markers only.
    return [name for name in left if await consumer.position(name) >= left[name]]


async def _skip_what_is_gone(consumer: Consumer, partitions: Iterable[TopicPartition]) -> None:
    """Continue at the first remaining record after retention has removed the next ones.

    An error may also be about a position that was left before it came.
    """
    names = list(partitions)
    beginnings = await consumer.beginning_offsets(names)
    ends = await consumer.end_offsets(names)
    for partition in names:
        if not beginnings[partition] <= await consumer.position(partition) <= ends[partition]:
            consumer.seek(partition, beginnings[partition])


async def read_dead_letters(
    log: Log,
    topic: str,
    selection: DeadLetterSelection,
    on_unreadable: Callable[[Gap], object] | None = None,
) -> AsyncGenerator[DeadLetter, None]:
    """Yield the selected dead letters, in offset order per partition.

    Args:
        log: an open log.
        topic: the dead-letter topic.
        selection: which dead letters to yield.
        on_unreadable: called with each unreadable range.

    Raises:
        ConfigurationError, LogUnavailable: see `topic_partitions`, `read_spans`.
    """
    partitions = await topic_partitions(log, topic)
    async with log.reader(partitions) as reader:
        spans = await spans_of(reader, partitions, selection.since_ms)
        spans = {name: narrowed(span, name, selection) for name, span in spans.items()}
        async with aclosing(read_spans(reader, spans, on_unreadable)) as chunks:
            async for records in chunks:
                for dead_letter in map(parse_dead_letter, records):
                    if selection.takes(dead_letter):
                        yield dead_letter


def narrowed(
    span: OffsetRange, partition: TopicPartition, selection: DeadLetterSelection
) -> OffsetRange:
    """Return the part of a span that can contain selected dead letters."""
    if not selection.positions:
        return span
    offsets = [offset for number, offset in selection.positions if number == partition.partition]
    if not offsets:
        return OffsetRange(span.end, span.end)
    start = min(max(min(offsets), span.start), span.end)
    return OffsetRange(start, max(min(max(offsets) + 1, span.end), start))
