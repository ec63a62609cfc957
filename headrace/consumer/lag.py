"""Lag and throughput of a source, time without an answer, and bases that do not move.

End offsets are queried in the background, every few seconds; if that fails, the last ones stay.

Where another process answers, a record that was passed on waits in a topic between two stages, for
as long as its retention. If it is deleted there before it was read, nothing will answer it: the
base of its partition stays where it is, while all later requests are answered, and no other number
shows it. So committed bases are queried from time to time. A base whose request was passed on here,
and that has not moved for longer than the topics keep anything, is *stuck*: its record was deleted,
or its reply partition accepts no answers. A new assignment begins at the base, and passes the
record on again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import structlog

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.inflight import AssignedPartition, InFlightTracker
from headrace.errors import Rejected, Retriable
from headrace.log.port import Committed, Consumer, Log, TopicPartition
from headrace.telemetry.logs import Event
from headrace.tuning import TUNING, ConsumerTuning

log = structlog.get_logger(__name__)


class Throughput:
    """Learns how many records are answered per second when there is enough work.

    Args:
        tuning: tuning values, such as the speed at which the estimate follows.

    Attributes:
        per_s: the estimate; None before anything was answered.
    """

    def __init__(self, tuning: ConsumerTuning = TUNING.consumer) -> None:
        self._rise = tuning.throughput_rise
        self._fall = tuning.throughput_fall
        self.per_s: float | None = None
        self._last: tuple[float, int] | None = None

    def observe(self, now_s: float, answered: int, lag: int) -> None:
        """Learn from the answers since the last call.

        A rate above the estimate raises it at once: the process can do at least that. A lower rate
        counts only if more was left over than was done; otherwise the demand was low, not the
        throughput.

        Args:
            now_s: monotonic seconds.
            answered: records, since the start of the process.
            lag: records that are not answered now.
        """
        last, self._last = self._last, (now_s, answered)
        if last is None or now_s <= last[0]:
            return
        elapsed_s = now_s - last[0]
        rate = (answered - last[1]) / elapsed_s
        if self.per_s is None:
            self.per_s = rate or None
        elif rate >= self.per_s:
            self.per_s += self._rise * (rate - self.per_s)
        elif lag and lag >= rate * elapsed_s:
            self.per_s += self._fall * (rate - self.per_s)

    def time_to_drain_s(self, lag: int) -> float | None:
        """Return how long the backlog takes at the estimated rate; None before there is one."""
        if not lag:
            return 0.0
        return lag / self.per_s if self.per_s else None


class Stall:
    """Time for which records have been waiting while none was answered."""

    def __init__(self) -> None:
        self._acked = 0
        self._since_s: float | None = None

    def observe(self, now_s: float, acked: int, *, waits: bool) -> None:
        """Observe the number of answered records, and whether any record waits."""
        if not waits:
            self._since_s = None
        elif self._since_s is None or acked != self._acked:
            self._since_s = now_s
        self._acked = acked

    def for_s(self, now_s: float, acked: int) -> float:
        """Return the time without an answer; 0 while nothing waits, or something was answered."""
        if self._since_s is None or acked != self._acked:
            return 0.0
        return now_s - self._since_s


class LagMonitor:
    """Tracks end offsets, throughput and the time without an answer, in `run`.

    Args:
        records: returns the number of unanswered records, read or not.
        is_working: returns True if records that were read wait for their answers.

    Attributes:
        stall: time without an answer.
        acked: number of answered records; set by the source.
        ends: end offset of each assigned partition, as last queried.
        throughput: learned throughput.
    """

    def __init__(
        self,
        records: Callable[[], int],
        is_working: Callable[[], bool],
        tuning: ConsumerTuning = TUNING.consumer,
    ) -> None:
        self._tuning = tuning
        self._records = records
        self._is_working = is_working
        self.stall = Stall()
        self.acked = 0
        self.ends: dict[TopicPartition, int] = {}
        self.throughput = Throughput(tuning)

    async def run(self, consumer: Consumer) -> None:
        """Query and sample, until cancelled."""
        queried_s = 0.0
        while True:
            if time.monotonic() - queried_s >= self._tuning.end_offsets_interval_s:
                await self._query_ends(consumer)
                queried_s = time.monotonic()
            self.throughput.observe(time.monotonic(), self.acked, self._records())
            waits = self._is_working() or await self._is_unread(consumer)
            self.stall.observe(time.monotonic(), self.acked, waits=waits)
            await asyncio.sleep(self._tuning.throughput_interval_s)

    async def _is_unread(self, consumer: Consumer) -> bool:
        """Return True if the log has unread records. A transaction marker at its end is none: the
        position is behind it.
        """
        for partition in consumer.assignment():
            try:
                if await consumer.position(partition) < self.ends.get(partition, 0):
                    return True
            except Retriable:
                continue  # just revoked, or not known yet
        return False

    async def _query_ends(self, consumer: Consumer) -> None:
        ours = sorted(consumer.assignment())
        if not ours:
            return
        try:
            ends = await consumer.end_offsets(ours)
        except (Retriable, Rejected) as error:
            log.warning(Event.END_UNKNOWN, reason=str(error))
            return
        still_ours = consumer.assignment()
        self.ends.update((each, end) for each, end in ends.items() if each in still_ours)


class _Standing(NamedTuple):
    """Base of one assignment, and since when it has not moved."""

    assignment: AssignedPartition
    base: int
    since_s: float


class StalledOffsetMonitor:
    """Time for which each base has not moved.

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
        self._reported: set[tuple[TopicPartition, int]] = set()

    async def run(self, log_: Log, group: str) -> None:
        """Query the commits of a group at intervals, until cancelled."""
        while True:
            await asyncio.sleep(self._tuning.stalled_check_interval_s)
            try:
                ours = [each.partition for each in self._tracker.assignments]
                committed = await log_.committed(group, ours)
            except Retriable as error:
                log.warning(Event.ACKED_OFFSETS_UNKNOWN, reason=str(error))
            else:
                self.observe(committed, time.monotonic())

    def observe(self, committed: Mapping[TopicPartition, Committed | None], now_s: float) -> None:
        """Observe the commits, and log each stuck base once."""
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
            if self._is_stuck(standing, now_s) and place not in self._reported:
                self._reported.add(place)
                age_s = round(now_s - standing.since_s)
                log.error(Event.BASE_STUCK, record=f"{partition}/{found.offset}", age_s=age_s)
        self._reported &= {(partition, of.base) for partition, of in self._standing.items()}

    def age_s(self, partition: TopicPartition, now_s: float) -> float:
        """Return how long a base has not moved; 0 unless its request was passed on here."""
        standing = self._standing.get(partition)
        return 0.0 if standing is None else now_s - standing.since_s

    def is_stuck(self, partition: TopicPartition, now_s: float) -> bool:
        """Return True if the base has not moved for too long."""
        standing = self._standing.get(partition)
        return standing is not None and self._is_stuck(standing, now_s)

    def _is_stuck(self, standing: _Standing, now_s: float) -> bool:
        return now_s - standing.since_s >= self._limit_s


def _is_passed_on(assignment: AssignedPartition, committed: Committed) -> bool:
    """Return True if the lowest unanswered request was passed on in this assignment."""
    base = AckedOffsets.from_committed(committed).base
    return base <= assignment.last_delivered and base in assignment.progress
