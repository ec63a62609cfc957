"""Bases that stand still, where the answers are given by another process.

What is passed on to the next stage lies in a topic of ours for as long as its retention says. If it
is deleted there before anybody has read it, its request is on its way to nobody: the base of its
partition stands still, and whoever reads the requests has passed it and does not come back to it
before the partition's next assignment. Nothing else shows it: all later requests are answered.

So each base is asked for now and then. One whose request was passed on here, and that has not moved
since for longer than the topics between keep anything, waits for what is gone; or for a reply
partition that takes no answers. A new assignment begins at the base, and so passes it on again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

import structlog

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.inflight import AssignedPartition, InFlightTracker
from headrace.errors import Retriable
from headrace.log.port import Committed, Log, TopicPartition
from headrace.telemetry.logs import Event
from headrace.tuning import TUNING, ConsumerTuning

log = structlog.get_logger(__name__)


class _Standing(NamedTuple):
    """A base, of one assignment, and since when it stands."""

    assignment: AssignedPartition
    base: int
    since_s: float


class StalledOffsetMonitor:
    """How long each base has been standing.

    Args:
        tracker: in-flight tracker of the records passed on.
        limit_s: time without progress after which a base is stuck.
    """

    def __init__(
        self,
        tracker: InFlightTracker,
        limit_s: float,
        tuning: ConsumerTuning = TUNING.consumer,
    ) -> None:
        self._tuning = tuning
        self._tracker = tracker
        self._limit_s = limit_s
        self._standing: dict[TopicPartition, _Standing] = {}
        self._told: set[tuple[TopicPartition, int]] = set()

    async def run(self, log_: Log, group: str) -> None:
        """Look again and again at what a group has committed, until cancelled."""
        while True:
            await asyncio.sleep(self._tuning.stalled_check_interval_s)
            try:
                ours = [each.partition for each in self._tracker.assignments]
                committed = await log_.committed(group, ours)
            except Retriable as error:
                log.warning(Event.ACKED_OFFSETS_UNKNOWN, reason=str(error))
            else:
                self.look(committed, time.monotonic())

    def look(self, committed: Mapping[TopicPartition, Committed | None], now_s: float) -> None:
        """Take note of what is committed now, and tell of each base that is stuck, once."""
        before, self._standing = self._standing, {}
        for partition, found in committed.items():
            assignment = self._tracker.get(partition)
            if assignment is None or found is None or not _is_passed_on(assignment, found):
                continue
            standing = before.get(partition)
            if standing is None or standing[:2] != (assignment, found.offset):
                standing = _Standing(assignment, found.offset, now_s)
            self._standing[partition] = standing
            place = (partition, found.offset)
            if self._is_stuck(standing, now_s) and place not in self._told:
                self._told.add(place)
                age_s = round(now_s - standing.since_s)
                log.error(Event.BASE_STUCK, record=f"{partition}/{found.offset}", age_s=age_s)
        self._told &= {(partition, of.base) for partition, of in self._standing.items()}

    def age_s(self, partition: TopicPartition, now_s: float) -> float:
        """For how long the base stands whose request was passed on; 0 where there is none."""
        standing = self._standing.get(partition)
        return 0.0 if standing is None else now_s - standing.since_s

    def is_stuck(self, partition: TopicPartition, now_s: float) -> bool:
        """Return True if the base has not moved for too long."""
        standing = self._standing.get(partition)
        return standing is not None and self._is_stuck(standing, now_s)

    def _is_stuck(self, standing: _Standing, now_s: float) -> bool:
        return now_s - standing.since_s >= self._limit_s


def _is_passed_on(assignment: AssignedPartition, committed: Committed) -> bool:
    """Whether the lowest request that is not answered has been passed on in this assignment."""
    base = AckedOffsets.from_committed(committed).base
    return base <= assignment.last_delivered and base in assignment.progress
