"""Rereading: deferred records are read again once their claims have room, by a separate reader.

The reader is in no group and commits nothing. It is opened when a record is deferred, and closed
when none has been deferred for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from headrace.consumer.deferring import Deferral
from headrace.consumer.ready_queue import Arrivals, Delivery
from headrace.delivery.inflight import AssignedPartition, Deferred
from headrace.errors import Retriable
from headrace.log.errors import OffsetOutOfRange
from headrace.log.port import Consumer, Log, Record, TopicPartition
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

NEAR_OFFSETS = 64
"""A record at most this far ahead is reached by reading on instead of seeking."""
MAX_RECORDS = 512
POLL_TIMEOUT_S = 0.2


@dataclass(frozen=True, slots=True)
class RereadingTimes:
    """Times of rereading.

    Attributes:
        pace_s: interval of the checks for room.
        read_s: time limit for reading the picked records of a partition; the rest is put back.
        keep_s: how long the reader stays open after the last deferred record.
        retry_s: pause after the log was unavailable.
    """

    pace_s: float = 0.02
    read_s: float = 2.0
    keep_s: float = 5.0
    retry_s: float = 0.5


class Rereading:
    """Reads the records that a `Deferral` picks.

    Args:
        deferral: picks records that have room.
        ready: receives the records read.
        is_wanted: returns True if records of a partition may be admitted now.
        metrics: counts records that the log no longer holds.
        times: see `RereadingTimes`.
    """

    def __init__(
        self,
        deferral: Deferral,
        ready: Arrivals,
        is_wanted: Callable[[TopicPartition], bool],
        metrics: Metrics,
        times: RereadingTimes = RereadingTimes(),
    ) -> None:
        self._deferral = deferral
        self._ready = ready
        self._is_wanted = is_wanted
        self._metrics = metrics
        self._times = times

    async def run(self, log_: Log) -> None:
        """Read, until cancelled."""
        while True:
            await self._deferral.wait_deferred()
            try:
                await self._read_while_deferred(log_)
            except Retriable as error:
                log.warning(Event.REREADING_DELAYED, reason=str(error))
                await asyncio.sleep(self._times.retry_s)

    async def _read_while_deferred(self, log_: Log) -> None:
        """Read with one reader, until a partition that it lacks is added."""
        deferral, partitions = self._deferral, sorted(self._deferral.partitions())
        async with log_.reader(partitions) as reader:
            reader.pause(partitions)
            while deferral.partitions() <= set(partitions):
                if not await deferral.wait_deferred(self._times.keep_s):
                    return
                await asyncio.sleep(self._times.pace_s)
                if deferral.partitions() <= set(partitions):
                    await self._read_picked(reader, deferral.pick())

    async def _read_picked(
        self, reader: Consumer, picked: dict[AssignedPartition, list[Deferred]]
    ) -> None:
        """Read the partitions one by one; put back records left unread by an error."""
        try:
            while picked:
                await self._read(reader, *picked.popitem())
        finally:
            for unread in picked.values():
                self._deferral.put_back(unread)

    async def _read(
        self, reader: Consumer, assignment: AssignedPartition, picked: Sequence[Deferred]
    ) -> None:
        partition = assignment.partition
        wanted = {each.offset: each for each in picked}
        reader.resume([partition])
        try:
            await self._read_all(reader, assignment, wanted)
        except OffsetOutOfRange:
            beginning = (await reader.beginning_offsets([partition]))[partition]
            for offset in [each for each in wanted if each < beginning]:
                self._lose(wanted.pop(offset))
        finally:
            reader.pause([partition])
            self._deferral.put_back(wanted.values())

    async def _read_all(
        self, reader: Consumer, assignment: AssignedPartition, wanted: dict[int, Deferred]
    ) -> None:
        """Read the wanted records, and remove each from `wanted` once found."""
        partition, position = assignment.partition, -NEAR_OFFSETS
        until_s = time.monotonic() + self._times.read_s
        while wanted and not assignment.revoked and time.monotonic() < until_s:
            first = min(wanted)
            if not position <= first < position + NEAR_OFFSETS:
                reader.seek(partition, first)
            polled = await reader.poll(POLL_TIMEOUT_S, MAX_RECORDS)
            records: Sequence[Record] = polled.get(partition, ())
            if not records:
                continue
            position = records[-1].offset + 1
            found = [record for record in records if record.offset in wanted]
            for record in found:
                del wanted[record.offset]
            if found and self._is_wanted(partition):
                self._ready.put(Delivery(assignment, found, again=True))
                self._ready.tell()
            for offset in [each for each in wanted if each < position]:
                self._lose(wanted.pop(offset))  # deleted while it was deferred

    def _lose(self, deferred: Deferred) -> None:
        """Skip a record that was deleted while it was deferred; it counts as never read."""
        where, offset = deferred.assignment.partition, deferred.offset
        self._metrics.skipped.inc()
        log.error(Event.RECORDS_SKIPPED, partition=str(where), first=offset, count=1)
        if self._is_wanted(where):
            self._ready.put(Delivery(deferred.assignment, (), skipped=offset, again=True))
            self._ready.tell()
