"""State of redriven dead letters, kept in the log so that it survives the operator's machine.

For each partition of the dead letters, the group `{namespace}.redrive` commits a base below which
every dead letter is done, with the done ranges above it in the metadata
(`headrace.delivery.acked_offsets`). A run may be killed between sending and committing. To repeat
nothing then either, the group also commits the end of each request partition at the start of the
run, marked `open`, and again, marked `closed`, after the run's last commit. A run that finds an
open mark reads the requests from there on: each copy names the dead letter it was made from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headrace.client.rpc import topic_partitions
from headrace.config import Settings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.errors import Fatal
from headrace.log.port import Committed, Log, Record, TopicPartition
from headrace.protocol.headers import HeaderName
from headrace.tools.dead_letters.reading import OffsetRange, read_spans, spans_of
from headrace.tools.decided import wait_until_decided
from headrace.topics import Topic

OPEN = "open"
CLOSED = "closed"


class MemoryFull(Fatal):
    """There are more separate ranges of redriven dead letters than a commit can hold."""


def redrive_group(settings: Settings) -> str:
    """Return the consumer group that holds the redrive state."""
    return f"{settings.namespace}.redrive"


def done_letters(
    committed: Mapping[TopicPartition, Committed | None],
    spans: Mapping[TopicPartition, OffsetRange],
) -> dict[TopicPartition, AckedOffsets]:
    """Return which dead letters of each partition are done, given the offsets that it holds.

    What is done from the end on was lost by the log, which will give its offsets to other dead
    letters. (Of a deleted topic nothing is committed any more: brokers delete it as well.)

    Raises:
        UnknownMetadata: another program has committed for this group.
    """
    done = {}
    for partition, span in spans.items():
        known = committed.get(partition)
        if known is None:
            done[partition] = AckedOffsets(span.start)
            continue
        progress = AckedOffsets.of_partition(partition, known)
        progress.truncate(span.end)
        if progress.base < span.start:
            progress.mark_acked(progress.base - 1, span.start - 1)
        done[partition] = progress
    return done


async def recall(
    log: Log,
    settings: Settings,
    spans: Mapping[TopicPartition, OffsetRange],
    decided_within_s: float | None = None,
) -> dict[TopicPartition, AckedOffsets]:
    """Return which dead letters are done; the partitions hold these spans.

    Args:
        log: an open log.
        settings: the names of the topics and of the group.
        spans: all that the partitions of the dead letters hold.
        decided_within_s: how long to wait for open transactions that may hide copies of a killed
            run; None: without those copies, to show only.

    Raises:
        UnknownMetadata: see `done_letters`.
        ConfigurationError, LogUnavailable: see `headrace.tools.dead_letters.reading` and
            `headrace.tools.decided`.
    """
    requests = await topic_partitions(log, settings.topic(Topic.REQUESTS))
    committed = await log.committed(redrive_group(settings), [*spans, *requests])
    done = done_letters(committed, spans)
    opened = {
        partition: known.offset
        for partition in requests
        if (known := committed[partition]) is not None and known.metadata == OPEN
    }
    if opened:
        if decided_within_s is not None:
            await wait_until_decided(log, list(opened), decided_within_s)
        async with log.reader(list(opened)) as reader:
            held = await spans_of(reader, list(opened))
            since = {
                partition: OffsetRange(min(max(span.start, opened[partition]), span.end), span.end)
                for partition, span in held.items()
            }
            async for records in read_spans(reader, since):
                count_copies(records, done)
    return done


def count_copies(records: Iterable[Record], done: Mapping[TopicPartition, AckedOffsets]) -> int:
    """Mark the dead letters of these copies as done; return how many were not marked before."""
    found = 0
    for record in records:
        dead_letter = dict(record.headers).get(HeaderName.REPLAY_LETTER)
        position = None if dead_letter is None else _parse_position(dead_letter)
        if position is None:
            continue
        partition, offset = position
        progress = done.get(partition)
        if progress is not None and offset not in progress:
            progress.mark_acked(offset - 1, offset)
            found += 1
    return found


def _parse_position(identity: bytes) -> tuple[TopicPartition, int] | None:
    topic, _, rest = identity.decode(errors="replace").partition("/")
    partition, _, offset = rest.partition("/")
    if not (partition.isdecimal() and offset.isdecimal()):
        return None
    return TopicPartition(topic, int(partition)), int(offset)


def committable(done: Mapping[TopicPartition, AckedOffsets]) -> dict[TopicPartition, Committed]:
    """Return the offsets to commit for the dead letters."""
    return {partition: progress.committable() for partition, progress in done.items()}


def require_room(
    progress: AckedOffsets, partition: TopicPartition, offsets: Sequence[tuple[int, int]]
) -> None:
    """Check that a commit can also record these dead letters as done.

    `offsets` holds, for each dead letter, the previously read offset and its own offset.

    Raises:
        MemoryFull: it cannot; the dead letters must not be sent.
    """
    trial = AckedOffsets(progress.base, progress.ranges)
    for previous, offset in offsets:
        trial.mark_acked(previous, offset)
    if AckedOffsets.from_committed(trial.committable()) != trial:
        raise MemoryFull(
            f"{partition}: expected at most as many ranges of redriven dead letters as fit a "
            f"commit's metadata, got {len(trial.ranges)} above offset {trial.base}; "
            f"redrive or discard the dead letters from {trial.base} on first (--discard)"
        )
