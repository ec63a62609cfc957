"""Where reading starts, and where it goes on when the log no longer holds a position.

A position beyond the end of a partition has one of two causes, which the id of the topic tells
apart. The topic was deleted and made anew: what is known of its offsets is revoked, and it is read
from its beginning. Or the partition has lost its end, by the election of a leader that was not in
sync: what is answered below the new end stays so, and reading goes on there. What is known of the
offsets above is revoked, since other records get them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import structlog

from headrace.delivery.acked_offsets import Progress
from headrace.delivery.inflight import InFlightTracker
from headrace.log.port import Committed, Consumer, Log, TopicPartition
from headrace.telemetry.logs import Event

log = structlog.get_logger(__name__)


class TopicIdentity:
    """Recognises a topic that was deleted and made anew, by the id that no other topic has had.

    Attributes:
        known: the id of the topic whose offsets are known here; empty before the first look.
    """

    def __init__(self, log_: Log, topic: str) -> None:
        self._log = log_
        self._topic = topic
        self.known = ""

    async def replacement(self) -> str:
        """Return the id of another topic that has the name by now, or an empty text.

        The caller sets `known` once what belonged to the former topic is forgotten. A topic that
        is absent is not replaced yet.

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
) -> Progress:
    """Where to start reading: at what is committed, within what the log holds.

    What is committed is of this topic, since brokers delete it with the topic.
    """
    if committed is None:
        return Progress(beginning)
    progress = Progress.from_committed(committed)
    truncate(partition, progress, end)
    if progress.base < beginning:
        log.warning(Event.RECORDS_SKIPPED, first=progress.base, count=beginning - progress.base)
        progress.cover(progress.base - 1, beginning - 1)
    return progress


def truncate(partition: TopicPartition, progress: Progress, end: int) -> bool:
    """Forget what is answered beyond the end of the partition; True if there was any."""
    if progress.highest <= end:
        return False
    log.error(
        Event.POSITION_BEYOND_END,
        partition=str(partition),
        position=progress.highest,
        reading_from=min(progress.base, end),
    )
    progress.truncate(end)
    return True


class OutOfRange(NamedTuple):
    """Partitions whose positions lay outside of what the log holds.

    Attributes:
        skipped: the beginnings of those below whose beginning records are gone unread.
        truncated: those that have lost their end.
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
    """Seek to what the log holds, for positions that lie outside of it.

    Below its beginning, retention was quicker than we: those records are gone, and the next one
    closes the gap. Beyond its end, in a topic that was made anew, it is read from the beginning. A
    partition that has lost its end is left to the caller, which has to end what is in flight of it.

    Raises:
        LogUnavailable: nobody says what the log holds.
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
            tracker.assign(partition, Progress(beginning))
        else:
            found.truncated.append(partition)
            continue
        consumer.seek(partition, beginning)
    return found
