"""Rereading: deferred records are read again once their claims have room, by a separate reader.

The reader is in no group and commits nothing. It is opened when a record is deferred, and closed
when none has been deferred for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from headrace.consumer.deferring import Deferral
from headrace.consumer.ready_queue import PolledRecords, ReadyQueue
from headrace.delivery.inflight import AssignedPartition, Deferred
from headrace.errors import Retriable
from headrace.log.errors import OffsetOutOfRange
from headrace.log.port import Consumer, Gap, Log, Record, TopicPartition
from headrace.primitives.backoff import Backoff, Pauses
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.tuning import TUNING, ConsumerTuning

log = structlog.get_logger(__name__)


class Rereading:
    """Reads the records that a `Deferral` picks.

    Args:
        deferral: picks records that have room.
        ready: receives the records read.
        is_wanted: returns True if records of a partition may be admitted now.
        on_lost_end: called with a partition and an offset that was read and is now at or beyond
            the end of the log; it may be called again until the partition is reassigned.
        metrics: counts records that the log no longer holds.
    """

    def __init__(
        self,
        deferral: Deferral,
        ready: ReadyQueue,
        is_wanted: Callable[[TopicPartition], bool],
        on_lost_end: Callable[[TopicPartition, int], None],
        metrics: Metrics,
        tuning: ConsumerTuning = TUNING.consumer,
    ) -> None:
        self._deferral = deferral
        self._ready = ready
        self._is_wanted = is_wanted
        self._on_lost_end = on_lost_end
        self._metrics = metrics
        self._tuning = tuning
        self._backoff = Backoff(tuning.retry_first_s, tuning.retry_max_s)

    async def run(self, log_: Log) -> None:
        """Read, until cancelled."""
        pauses = Pauses(self._backoff)
        while True:
            await self._deferral.wait_deferred()
            try:
                await self._read_while_deferred(log_)
                pauses.reset()
            except Retriable as error:
                log.warning(Event.REREADING_DELAYED, reason=str(error))
                await pauses.sleep()

    async def _read_while_deferred(self, log_: Log) -> None:
        """Read with one reader, until a partition that it lacks is added."""
        deferral, partitions = self._deferral, sorted(self._deferral.partitions())
        async with log_.reader(partitions) as reader:
            reader.pause(partitions)
            while deferral.partitions() <= set(partitions):
                if not await deferral.wait_deferred(self._tuning.reread_idle_s):
                    return
                await asyncio.sleep(self._tuning.room_check_interval_s)
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
            try:
                await self._read_all(reader, assignment, wanted)
            except OffsetOutOfRange:
                beginning = (await reader.beginning_offsets([partition]))[partition]
                for offset in [each for each in wanted if each < beginning]:
                    self._lose(wanted.pop(offset))
            # The first lost record is often exactly at the new end, which is in range: only the
            # end shows that it will not come.
            if wanted and not assignment.revoked:
                end = (await reader.end_offsets([partition]))[partition]
                if max(wanted) >= end:
                    self._on_lost_end(partition, max(wanted))
        finally:
            reader.pause([partition])
            self._deferral.put_back(wanted.values())

    async def _read_all(
        self, reader: Consumer, assignment: AssignedPartition, wanted: dict[int, Deferred]
    ) -> None:
        """Read the wanted records, and remove each from `wanted` once found."""
        tuning, partition = self._tuning, assignment.partition
        near, position = tuning.reread_near_offsets, -tuning.reread_near_offsets
        until_s = time.monotonic() + tuning.reread_timeout_s
        while wanted and not assignment.revoked and time.monotonic() < until_s:
            first = min(wanted)
            if not position <= first < position + near:
                reader.seek(partition, first)
                position = first
            polled = await reader.poll(tuning.poll_timeout_s, tuning.max_poll_records)
            records: Sequence[Record] = polled.get(partition, ())
            gaps = [gap for gap in reader.gaps() if gap.partition == partition]
            if not (records or gaps):
                continue
            position = max(
                *[record.offset + 1 for record in records[-1:]], *[gap.end for gap in gaps[-1:]], 0
            )
            found = [record for record in records if record.offset in wanted]
            for record in found:
                del wanted[record.offset]
            if found and self._is_wanted(partition):
                self._ready.put(PolledRecords(assignment, found, again=True))
                self._ready.tell()
            for gap in gaps:
                for offset in [each for each in wanted if gap.first <= each < gap.end]:
                    self._pass_over(wanted.pop(offset), gap)
            for offset in [each for each in wanted if each < position]:
                self._lose(wanted.pop(offset))  # deleted while it was deferred

    def _lose(self, deferred: Deferred) -> None:
        """Skip a record that was deleted while it was deferred; it counts as never read."""
        where, offset = deferred.assignment.partition, deferred.offset
        self._metrics.skipped.inc()
        log.error(Event.RECORDS_SKIPPED, partition=str(where), first=offset, count=1)
        self._skip(deferred)

    def _pass_over(self, deferred: Deferred, gap: Gap) -> None:
        """Skip a record that became unreadable while it was deferred."""
        where, offset = deferred.assignment.partition, deferred.offset
        self._metrics.passed_over(gap._replace(first=offset, end=offset + 1))
        log.error(
            Event.RECORDS_UNREADABLE,
            partition=str(where),
            first=offset,
            count=1,
            code=gap.code,
            reason=gap.reason,
        )
        self._skip(deferred)

    def _skip(self, deferred: Deferred) -> None:
        if self._is_wanted(deferred.assignment.partition):
            skipped = PolledRecords(deferred.assignment, (), skipped=deferred.offset, again=True)
            self._ready.put(skipped)
            self._ready.tell()
