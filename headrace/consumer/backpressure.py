"""Which partitions are not read for now, and why.

All of them pause at a stop (`drain`) and over the byte budget (`budget`). One alone pauses where it
holds so much that reading of it has to wait, while the others go on:

- `metadata`: an answered offset that does not fit into the commit's metadata would be answered
  again by the next owner (at least once), or could not be sealed (exactly once). Well before it
  comes to that, nothing more is read of the partition.
- `share`: so many of its requests are deferred, since their model holds its share of the budget
  (`deferring.py`), that it is not read further ahead of them.
- `order`: answers that wait for an earlier one are held, and one record that is stuck could fill
  the whole budget with them. So each partition gets an equal share.
- `ahead`: where answers are given in another process, so many records of a partition are on their
  way there. More would only wait in the topics between, and take the processor from those who
  have to answer them. Where answers keep their order, it bounds what one stuck record holds up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from headrace.consumer.deferring import MAX_DEFERRED
from headrace.delivery.acked_offsets import SAFE_SPAN_OFFSETS, Progress, may_outgrow
from headrace.delivery.inflight import AssignedPartition, InFlightTracker
from headrace.errors import Retriable
from headrace.log.port import Consumer, Log, TopicPartition
from headrace.telemetry.logs import Event

log = structlog.get_logger(__name__)

LOOK_S = 0.2
RESUME_DEFERRED = MAX_DEFERRED * 3 // 4
MAX_UNANSWERED = 16_384
"""Records of a partition that were passed on and are not answered by another process yet."""


class Backpressure:
    """Pauses partitions and resumes them.

    Args:
        in-flight tracker: of what is read.
        bounds_metadata: whether the commit's metadata bounds what may be read.
        shares: whether each partition gets but its share of the budget.

    Attributes:
        paused: the partitions that are.
        reason: why, while all of them are; otherwise empty.
        reasons: why, of partitions that are paused alone.
    """

    def __init__(self, tracker: InFlightTracker, *, bounds_metadata: bool, shares: bool) -> None:
        self._tracker = tracker
        self._bounds_metadata = bounds_metadata
        self._shares = shares
        self._elsewhere: dict[TopicPartition, Progress] = {}
        self.paused: frozenset[TopicPartition] = frozenset()
        self.reason = ""
        self.reasons: Mapping[TopicPartition, str] = {}

    def regulate(self, consumer: Consumer, waiting_bytes: int, *, stopping: bool) -> bool:
        """Pause or resume as the budget says; True while all partitions are paused.

        Args:
            consumer: of the partitions.
            waiting_bytes: of what was polled and is not admitted yet.
            stopping: nothing more shall be read.
        """
        budget = self._tracker.budget
        # What was polled and not yet admitted is charged as well, but only here.
        budget.used_bytes += waiting_bytes
        wanted = budget.exceeded or stopping
        budget.used_bytes -= waiting_bytes
        assigned = consumer.assignment()
        if wanted:
            self.reason, self.reasons = "drain" if stopping else "budget", {}
            paused = assigned
        else:
            self.reason, self.reasons = "", self._crowded()
            paused = assigned & self.reasons.keys()
        if fresh := paused - self.paused:
            consumer.pause(sorted(fresh))
        if freed := (self.paused & assigned) - paused:
            consumer.resume(sorted(freed))
        self.paused = paused
        return wanted

    def follow(self, partition: TopicPartition, progress: Progress) -> None:
        """Another process answers for this partition, and this is what it has committed."""
        self._elsewhere[partition] = progress

    def progress(self, assignment: AssignedPartition) -> Progress:
        """What is answered of a partition, as far as is known here."""
        return self._elsewhere.get(assignment.partition, assignment.progress)

    def assigned_anew(self) -> None:
        """A rebalance forgets pauses."""
        self.paused = frozenset()
        self._elsewhere.clear()

    def _crowded(self) -> Mapping[TopicPartition, str]:
        """Why, of the partitions that are to be paused alone."""
        assignments = self._tracker.assignments
        found = {each.partition: "metadata" for each in assignments if self._outgrows(each)}
        if self._elsewhere:
            found |= {each.partition: "ahead" for each in assignments if self._is_ahead(each)}
        elif self._shares:
            found |= {each.partition: "order" for each in assignments if self._exceeds(each)}
        found |= {each.partition: "share" for each in assignments if self._defers_many(each)}
        return found

    def _defers_many(self, assignment: AssignedPartition) -> bool:
        paused = self.reasons.get(assignment.partition) == "share"
        return len(assignment.deferred) >= (RESUME_DEFERRED if paused else MAX_DEFERRED)

    def _outgrows(self, assignment: AssignedPartition) -> bool:
        if not self._bounds_metadata:
            return False
        progress = self.progress(assignment)
        span = assignment.last_read + 1 - progress.base
        if span < SAFE_SPAN_OFFSETS:
            return False
        return may_outgrow(span, span - progress.answered_above[0])

    def _is_ahead(self, assignment: AssignedPartition) -> bool:
        progress = self.progress(assignment)
        span = assignment.last_read + 1 - progress.base
        return span - progress.answered_above[0] >= MAX_UNANSWERED

    def _exceeds(self, assignment: AssignedPartition) -> bool:
        """By the number of records: bytes are counted for all partitions together."""
        budget, records = self._tracker.budget, self._tracker.in_flight()
        if not records:
            return False
        used_bytes = budget.used_bytes * assignment.in_flight / records
        return used_bytes * len(self._tracker.assignments) >= budget.limit_bytes

    async def watch(self, log_: Log, group: str) -> None:
        """Look now and then at what another process has committed for our partitions.

        Until cancelled. It costs nothing while none of them has much on the way.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            crowded = [each.partition for each in self._tracker.assignments if self._is_long(each)]
            if not crowded:
                continue
            try:
                committed = await log_.committed(group, crowded)
            except Retriable as error:
                log.warning(Event.PROGRESS_UNKNOWN, reason=str(error))
                continue
            for partition, found in committed.items():
                if found is not None:
                    self._elsewhere[partition] = Progress.from_committed(found)

    def _is_long(self, assignment: AssignedPartition) -> bool:
        progress = self.progress(assignment)
        return assignment.last_read - progress.base >= SAFE_SPAN_OFFSETS // 4
