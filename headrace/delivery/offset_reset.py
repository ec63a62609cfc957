"""Offset reset: where reading starts, and where it resumes when a position is out of range.

A position beyond the end of a partition has one of two causes, which the topic id distinguishes.
Either the topic was deleted and created again: everything known of its offsets is revoked, and it
is read from its beginning. Or the partition was truncated by an unclean leader election: answered
offsets below the new end stay answered, and reading resumes there. Offsets above are revoked, since
new records will get them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import structlog

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.inflight import InFlightTracker
from headrace.log.port import Committed, Consumer, Log, TopicPartition
from headrace.telemetry.logs import Event

log = structlog.get_logger(__name__)


class TopicIdentity:
    """Detects a topic that was deleted and created again, by its unique topic id.

    Attributes:
        known: the id of the topic whose offsets are known here; empty before the first check.
    """

    def __init__(self, log_: Log, topic: str) -> None:
        self._log = log_
        self._topic = topic
        self.known = ""

    async def replacement(self) -> str:
        """Return the id of a new topic of the same name, or an empty text if there is none.

        The caller sets `known` once it has forgotten the state of the former topic. An absent
        topic does not count as replaced.

        Raises:
            LogUnavailable: no broker answered.
        """
        found = (await self._log.describe_topics([self._topic]))[self._topic]
        topic_id = "" if found is None else found.topic_id
        self.known = self.known or topic_id
        if topic_id in {"", self.known}:
            return ""
        log.error(Event.TOPIC_REPLACED, topic=self._topic)
        return topic_id


def starting_progress(
    partition: TopicPartition, committed: Committed | None, beginning: int, end: int
) -> AckedOffsets:
    """Return the progress to read from: the commit, limited to the offsets that the log holds, or
    the beginning if there is no commit.
    """
    if committed is None:
        return AckedOffsets(beginning)
    progress = committed_progress(partition, committed, end)
    if progress.base < beginning:
        log.warning(
            Event.RECORDS_SKIPPED,
            partition=str(partition),
            first=progress.base,
            count=beginning - progress.base,
        )
        progress.mark_acked(progress.base - 1, beginning - 1)
    return progress


def committed_progress(
    partition: TopicPartition, committed: Committed | None, end: int
) -> AckedOffsets:
    """Return the committed progress, limited to offsets below the end. Deleted records count as
    answered only if they were: they may have been read before, even if there is no commit yet.

    The commit belongs to this topic, since brokers delete commits with their topic.
    """
    if committed is None:
        return AckedOffsets(0)
    progress = AckedOffsets.of_partition(partition, committed)
    truncate(partition, progress, end)
    return progress


def truncate(partition: TopicPartition, progress: AckedOffsets, end: int) -> bool:
    """Forget answered offsets beyond the end of the partition; return True if there were any."""
    if progress.highest <= end:
        return False
    log.error(
        Event.OFFSET_BEYOND_END,
        partition=str(partition),
        position=progress.highest,
        reading_from=min(progress.base, end),
    )
    progress.truncate(end)
    return True


class OutOfRange(NamedTuple):
    """Partitions whose positions were out of range.

    Attributes:
        skipped: new beginning of each partition that lost unread records to retention.
        truncated: partitions whose end was lost.
    """

    skipped: dict[TopicPartition, int]
    truncated: list[TopicPartition]


async def go_on_in_range(
    consumer: Consumer,
    tracker: InFlightTracker,
    positions: Mapping[TopicPartition, int],
    *,
    is_replaced: bool,
) -> OutOfRange:
    """Seek positions that are out of range to the beginning of their partition.

    Below the beginning, retention deleted unread records; the next record closes the gap. Beyond
    the end, a topic that was created again is read from its beginning. A truncated partition is
    left to the caller, which must first end its requests in flight.

    Raises:
        LogUnavailable: no broker answered.
    """
    beginnings = await consumer.beginning_offsets(list(positions))
    found = OutOfRange({}, [])
    for partition, position in positions.items():
        if tracker.get(partition) is None or partition not in consumer.assignment():
            continue  # revoked meanwhile
        beginning = beginnings[partition]
        if position < beginning:
            count = beginning - position
            log.error(Event.RECORDS_SKIPPED, partition=str(partition), first=position, count=count)
            found.skipped[partition] = beginning
        elif is_replaced:
            tracker.assign(partition, AckedOffsets(beginning))
        else:
            found.truncated.append(partition)
            continue
        consumer.seek(partition, beginning)
    return found
