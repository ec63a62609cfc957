"""Backpressure: which partitions are paused, and why.

All partitions pause on shutdown (`drain`) and over the byte budget (`budget`). A single partition
pauses, while the others are read, for one of these reasons:

- `metadata`: an answered offset that does not fit into the commit metadata would be answered
  again by the next owner (at least once), or could not be committed (exactly once). The partition
  is paused well before that.
- `share`: too many of its requests are deferred, because their model holds its share of the budget
  (`deferring.py`).
- `order`: answers that wait for an earlier one are held, and one stuck record could fill the
  whole budget with them. So each partition gets an equal share.
- `ahead`: another process answers, and many records of the partition are on their way there. More
  would only wait in the topics between, and take CPU time from the processes that answer. With
  ordered answers, this bounds how many records one stuck record holds up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.inflight import AssignedPartition, InFlightTracker
from headrace.errors import Retriable
from headrace.log.port import Consumer, Log, TopicPartition
from headrace.telemetry.logs import Event
from headrace.tuning import TUNING, Tuning

log = structlog.get_logger(__name__)


class Backpressure:
    """Pauses partitions and resumes them.

    Args:
        tracker: in-flight tracker of the records read.
        bounds_metadata: True if the size of the commit metadata limits reading.
        shares: True if each partition may hold only an equal share of the budget.

    Attributes:
        paused: the paused partitions.
        reason: why all partitions are paused; empty otherwise.
        reasons: why single partitions are paused.
    """

    def __init__(
        self,
        tracker: InFlightTracker,
        *,
        bounds_metadata: bool,
        shares: bool,
        tuning: Tuning = TUNING,
    ) -> None:
        self._tracker = tracker
        self._tuning = tuning.consumer
        self._safe_span = tuning.delivery.safe_span_offsets
        self._safe_unanswered = tuning.delivery.safe_unanswered_offsets
        self._bounds_metadata = bounds_metadata
        self._shares = shares
        self._other_progress: dict[TopicPartition, AckedOffsets] = {}
        self.paused: frozenset[TopicPartition] = frozenset()
        self.reason = ""
        self.reasons: Mapping[TopicPartition, str] = {}

    def update(self, consumer: Consumer, waiting_bytes: int, *, stopping: bool) -> bool:
        """Pause or resume partitions; return True while all are paused.

        Args:
            consumer: the consumer of the partitions.
            waiting_bytes: bytes of records that were polled and not yet admitted.
            stopping: True on shutdown: nothing more is read.
        """
        budget = self._tracker.budget
        # Records that were polled and not yet admitted count only while they wait: if they are
        # left in the log, because their model holds its share, the requests of others have room.
        is_full = budget.used_bytes + waiting_bytes >= budget.limit_bytes
        pauses_all = budget.is_exceeded or is_full or stopping
        assigned = consumer.assignment()
        if pauses_all:
            self.reason, self.reasons = "drain" if stopping else "budget", {}
            paused = assigned
        else:
            self.reason, self.reasons = "", self._find_crowded()
            paused = assigned & self.reasons.keys()
        if fresh := paused - self.paused:
            consumer.pause(sorted(fresh))
        if freed := (self.paused & assigned) - paused:
            consumer.resume(sorted(freed))
        self.paused = paused
        return pauses_all

    def follow(self, partition: TopicPartition, progress: AckedOffsets) -> None:
        """Use the progress that another process has committed, which answers for this partition."""
        self._other_progress[partition] = progress

    def progress(self, assignment: AssignedPartition) -> AckedOffsets:
        """Return the progress of a partition, as far as it is known here."""
        return self._other_progress.get(assignment.partition, assignment.progress)

    def on_assigned(self) -> None:
        """Reset after a rebalance, which ends all pauses."""
        self.paused = frozenset()
        self._other_progress.clear()

    def _find_crowded(self) -> Mapping[TopicPartition, str]:
        """Return the partitions to pause individually, with the reasons."""
        assignments = self._tracker.assignments
        other_progress, safe_span = self._other_progress, self._safe_span
        far = [
            each
            for each in assignments
            if other_progress or each.last_read + 1 - each.progress.base >= safe_span
        ]
        found: dict[TopicPartition, str] = {}
        if far and self._bounds_metadata:
            found = {each.partition: "metadata" for each in far if self._outgrows_metadata(each)}
        if other_progress:
            found |= {each.partition: "ahead" for each in assignments if self._is_ahead(each)}
        elif self._shares:
            found |= {each.partition: "order" for each in assignments if self._exceeds_share(each)}
        if deferring := [each for each in assignments if each.deferred]:
            found |= {each.partition: "share" for each in deferring if self._defers_many(each)}
        return found

    def _defers_many(self, assignment: AssignedPartition) -> bool:
        tuning, is_paused = self._tuning, self.reasons.get(assignment.partition) == "share"
        limit = tuning.resume_deferred_records if is_paused else tuning.max_deferred_records
        return len(assignment.deferred) >= limit

    def _outgrows_metadata(self, assignment: AssignedPartition) -> bool:
        progress = self.progress(assignment)
        span = assignment.last_read + 1 - progress.base
        # The count of unanswered offsets costs a sum over all ranges: make it only if needed.
        if span < self._safe_span:
            return False
        return span - progress.answered_above[0] >= self._safe_unanswered

    def _is_ahead(self, assignment: AssignedPartition) -> bool:
        progress = self.progress(assignment)
        span = assignment.last_read + 1 - progress.base
        return span - progress.answered_above[0] >= self._tuning.max_unanswered_records

    def _exceeds_share(self, assignment: AssignedPartition) -> bool:
        """Estimate by record count: bytes are counted only for all partitions together."""
        budget, records = self._tracker.budget, self._tracker.in_flight()
        if not records:
            return False
        used_bytes = budget.used_bytes * assignment.in_flight / records
        return used_bytes * len(self._tracker.assignments) >= budget.limit_bytes

    async def watch(self, log_: Log, group: str) -> None:
        """Poll the commits of another process for our partitions, until cancelled.

        The log is queried only for partitions with many records in flight.
        """
        while True:
            await asyncio.sleep(self._tuning.other_progress_interval_s)
            crowded = [
                each.partition for each in self._tracker.assignments if self._has_long_span(each)
            ]
            if not crowded:
                continue
            try:
                committed = await log_.committed(group, crowded)
            except Retriable as error:
                log.warning(Event.ACKED_OFFSETS_UNKNOWN, reason=str(error))
                continue
            for partition, found in committed.items():
                if found is not None:
                    self._other_progress[partition] = AckedOffsets.from_committed(found)

    def _has_long_span(self, assignment: AssignedPartition) -> bool:
        progress = self.progress(assignment)
        return assignment.last_read - progress.base >= self._safe_span // 4
