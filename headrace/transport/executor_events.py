"""Read the events of executors in other processes, for a batcher: every record on `events`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from headrace.errors import Rejected, Retriable
from headrace.log.errors import OffsetOutOfRange
from headrace.log.port import Consumer, Log, Record, TopicPartition
from headrace.protocol.codec.events import decode_event
from headrace.protocol.events import ExecutorEvent
from headrace.telemetry.logs import Event

log = structlog.get_logger(__name__)

POLL_S = 0.2
RETRY_S = 0.5
_MOST_RECORDS = 500


class ExecutorEventReader:
    """Read the events topic from its end. Every batcher reads all of it, so it joins no group.

    Args:
        topic: its name and number of partitions.
    """

    def __init__(self, log_: Log, topic: TopicPartition) -> None:
        self._log = log_
        self._partitions = [TopicPartition(topic[0], number) for number in range(topic[1])]
        self._closed = False

    def close(self) -> None:
        """End `run` soon."""
        self._closed = True

    async def run(self, heard: Callable[[list[ExecutorEvent]], None]) -> None:
        """Read until closed.

        Args:
            heard: called with the new events, several times a second even if there are none.
        """
        async with self._log.reader(self._partitions) as reader:
            while not self._closed:
                heard([each for record in await self._poll(reader) if (each := _decoded(record))])

    async def _poll(self, reader: Consumer) -> list[Record]:
        try:
            polled = await reader.poll(POLL_S, _MOST_RECORDS)
        except OffsetOutOfRange:  # retention was faster: only new events matter
            await self._go_to_the_ends(reader)
            return []
        return [record for records in polled.values() for record in records]

    async def _go_to_the_ends(self, reader: Consumer) -> None:
        try:
            ends = await reader.end_offsets(self._partitions)
        except Retriable as error:  # the next poll raises `OffsetOutOfRange` again
            log.warning(Event.SEEK_DELAYED, reason=str(error))
            await asyncio.sleep(RETRY_S)
            return
        for partition, end in ends.items():
            reader.seek(partition, end)


def _decoded(record: Record) -> ExecutorEvent | None:
    try:
        return decode_event(record.value or b"")
    except Rejected as error:
        log.error(
            Event.INTERNAL_RECORD_UNREADABLE,
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            reason=str(error),
        )
        return None
