"""Where reading starts, and where it goes on when the log no longer holds a position."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from headrace.flow.answered import Progress
from headrace.flow.inflight import Ledger
from headrace.log.port import Committed, Consumer, TopicPartition
from headrace.telemetry.logs import Event

log = structlog.get_logger(__name__)


def starting_progress(committed: Committed | None, beginning: int) -> Progress:
    """Where to start reading: at what is committed, but not below what the log still holds."""
    if committed is None:
        return Progress(beginning)
    progress = Progress.from_committed(committed)
    if progress.base < beginning:
        log.warning(Event.RECORDS_SKIPPED, first=progress.base, count=beginning - progress.base)
        progress.cover(progress.base - 1, beginning - 1)
    return progress


async def go_on_in_range(
    consumer: Consumer, ledger: Ledger, positions: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """Seek to what the log holds, for positions that lie outside of it.

    Below its beginning, retention was quicker than we: those records are gone, and the next one
    closes the gap. Beyond its end, the topic is another one than that which was read, or has lost
    its end: what is known of its offsets is void, and it is read from the beginning.

    Returns:
        the beginnings of those below whose beginning records are gone unread.

    Raises:
        LogUnavailable: nobody says what the log holds.
    """
    beginnings = await consumer.beginning_offsets(list(positions))
    skipped: dict[TopicPartition, int] = {}
    for partition, position in positions.items():
        if ledger.get(partition) is None or partition not in consumer.assignment():
            continue  # revoked meanwhile
        beginning = beginnings[partition]
        if position < beginning:
            count = beginning - position
            log.error(Event.RECORDS_SKIPPED, partition=str(partition), first=position, count=count)
            skipped[partition] = beginning
        else:
            log.error(
                Event.POSITION_BEYOND_END,
                partition=str(partition),
                position=position,
                reading_from=beginning,
            )
            ledger.assign(partition, Progress(beginning))
        consumer.seek(partition, beginning)
    return skipped
