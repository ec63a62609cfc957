"""Record reader: polls partitions, and puts their records into the ready queue.

Polling never stops, since it keeps the membership of the group: over the byte budget all partitions
are paused instead. A chunk is put into the queue even if the budget is now exceeded; the next poll
returns nothing then.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from headrace.consumer.backpressure import Backpressure
from headrace.consumer.quarantine import QuarantineGate
from headrace.consumer.ready_queue import PolledRecords, ReadyQueue
from headrace.delivery.inflight import AssignedPartition, InFlightTracker
from headrace.log.errors import OffsetOutOfRange
from headrace.log.port import Consumer, Gap, Record, TopicPartition
from headrace.primitives.auto_reset_event import AutoResetEvent
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.watchdog import Activity
from headrace.tuning import TUNING, ConsumerTuning

log = structlog.get_logger(__name__)


class RecordReader:
    """Reader of the assigned partitions.

    Args:
        tracker: in-flight tracker of the records.
        ready: queue of the records that wait for the first stage.
        backpressure: pauses partitions.
        quarantine: divides records into parts that can be marked, after unclean ends.
        acked: set by each acknowledgement, after which paused partitions may be resumed.
        activity: renewed by each poll.

    Attributes:
        leaving: partitions about to be revoked: the next owner reads their records.
        is_stopping: True if nothing more is admitted.
        is_closing: True if `run` ends after the current poll.
        is_running: True while `run` may poll.
    """

    def __init__(
        self,
        tracker: InFlightTracker,
        ready: ReadyQueue,
        backpressure: Backpressure,
        quarantine: QuarantineGate,
        metrics: Metrics,
        acked: AutoResetEvent,
        activity: Activity,
        tuning: ConsumerTuning = TUNING.consumer,
    ) -> None:
        self._tracker = tracker
        self._ready = ready
        self._backpressure = backpressure
        self._quarantine = quarantine
        self._metrics = metrics
        self._acked = acked
        self._activity = activity
        self._tuning = tuning
        self._lost_ends: dict[TopicPartition, int] = {}
        self.leaving: frozenset[TopicPartition] = frozenset()
        self.is_stopping = self.is_closing = self.is_running = False

    async def run(
        self,
        consumer: Consumer,
        on_out_of_range: Callable[[Mapping[TopicPartition, int]], Awaitable[None]],
    ) -> None:
        """Read until `is_closing`.

        Args:
            consumer: the consumer of the partitions.
            on_out_of_range: seeks positions that the log no longer holds.
        """
        while not self.is_closing:
            self._activity.begin()
            try:
                polled = await self._poll(consumer)
            except OffsetOutOfRange as error:
                if not error.positions:
                    raise
                await on_out_of_range(error.positions)
                continue
            if self._lost_ends:  # of partitions that are paused, so that no poll notices it
                await on_out_of_range(dict(self._lost_ends))
                self._lost_ends.clear()  # also what was reported meanwhile, of the same loss
            records: Sequence[Record] = ()
            part: PolledRecords | None = None
            for partition, records in polled.items():
                assignment = self._tracker.get(partition)
                if assignment is None or not self.is_wanted(partition):
                    continue
                for part in self._quarantine.reading.divide(PolledRecords(assignment, records)):
                    self._enqueue(part)
            for gap in consumer.gaps():
                self._skip_unreadable(gap, polled.get(gap.partition, ()))
            # Otherwise the last records would stay in memory while the next ones are awaited.
            del polled, records, part
            if self._ready:
                self._ready.notify()
                await self._ready.yield_to_stages(self._tracker.budget)

    def is_wanted(self, partition: TopicPartition) -> bool:
        """Return True if records of a partition may be admitted now."""
        return not self.is_stopping and partition not in self.leaving

    def report_lost_end(self, partition: TopicPartition, offset: int) -> None:
        """Note that the log of a partition now ends at or before `offset`, which was read."""
        self._lost_ends[partition] = offset

    def skip_deleted(self, assignment: AssignedPartition, beginning: int) -> None:
        """Skip the offsets up to `beginning`, which were deleted unread."""
        self._ready.put(PolledRecords(assignment, (), skipped=beginning - 1))
        self._ready.notify()

    async def _poll(self, consumer: Consumer) -> Mapping[TopicPartition, Sequence[Record]]:
        tuning = self._tuning
        if self._quarantine.is_active:
            await self._quarantine.forget_answered(consumer)
        if not self._backpressure.update(
            consumer, self._ready.waiting_bytes, stopping=self.is_stopping
        ):
            timeout_s = (
                tuning.paused_poll_timeout_s if self._backpressure.paused else tuning.poll_timeout_s
            )
            return await consumer.poll(timeout_s, tuning.max_poll_records)
        await self._acked.wait(tuning.paused_poll_timeout_s)
        return await consumer.poll(0, tuning.max_poll_records)

    def _enqueue(self, polled: PolledRecords) -> None:
        assignment, records = polled.assignment, polled.records
        self._ready.put(polled)
        assignment.last_read = records[-1].offset
        first_ms = records[0].timestamp
        # A record may have none, which is -1.
        assignment.ages.note(
            assignment.last_read, first_ms if first_ms >= 0 else round(time.time() * 1000)
        )

    def _skip_unreadable(self, gap: Gap, polled: Sequence[Record]) -> None:
        """Count unreadable records, and let the base move past them.

        Args:
            gap: offsets that the last poll skipped.
            polled: records that it returned of the same partition.
        """
        assignment = self._tracker.get(gap.partition)
        if assignment is None or not self.is_wanted(gap.partition):
            return  # the next owner handles it
        if gap.end - 1 in assignment.progress:
            return
        self._metrics.unreadable(gap)
        log.error(
            Event.RECORDS_UNREADABLE,
            partition=str(gap.partition),
            first=gap.first,
            count=gap.end - gap.first,
            code=gap.code,
            reason=gap.reason,
        )
        # A record after the gap closes it. If it was not admitted, both are read again.
        if not polled or gap.end > polled[-1].offset == assignment.last_read:
            self._ready.put(PolledRecords(assignment, (), skipped=gap.end - 1))
