"""Queue of polled records that wait for the first stage."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.crash_isolation.isolation import Isolation
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import AssignedPartition, record_bytes
from headrace.log.port import Record, TopicPartition
from headrace.tuning import TUNING, ConsumerTuning


class PolledRecords(NamedTuple):
    """Records of one partition, in offset order, not yet admitted.

    `skipped`: there are no records; all up to this offset were deleted unread. `is_reread`: the
    records were deferred and are read a second time (`headrace.consumer.deferring`). `isolation`:
    set if crash isolation is active, after unclean ends.
    """

    assignment: AssignedPartition
    records: Sequence[Record]
    isolation: Isolation | None = None
    skipped: int | None = None
    is_reread: bool = False


class _WaitingRecords:
    """A delivery that may grow until it is taken."""

    __slots__ = ("delivery", "records", "size_bytes")

    def __init__(self, delivery: PolledRecords, size_bytes: int) -> None:
        self.records = list(delivery.records)
        self.delivery = delivery._replace(records=self.records)
        self.size_bytes = size_bytes

    def joins(self, delivery: PolledRecords, max_records: int) -> bool:
        """Return True if `delivery` may be appended, as if both had been read together."""
        mine = self.delivery
        return (
            mine.assignment is delivery.assignment
            and mine.isolation is delivery.isolation is None
            and mine.skipped is delivery.skipped is None
            and not (mine.is_reread or delivery.is_reread)
            and len(self.records) + len(delivery.records) <= max_records
        )


class ReadyQueue:
    """Polled records that wait for the first stage.

    New records of a partition are appended to its waiting chunk: a chunk costs each stage about
    as much as dozens of small requests, so that a stage that lags gets larger chunks and catches
    up.

    Attributes:
        waiting_bytes: bytes of all waiting records.
        awaits_isolated: True if parked records will be delivered again, even after the end.
    """

    def __init__(self, tuning: ConsumerTuning = TUNING.consumer) -> None:
        self._tuning = tuning
        self._max_records = tuning.max_poll_records
        self._waiting: deque[_WaitingRecords] = deque()
        self._last: dict[TopicPartition, _WaitingRecords] = {}
        self._arrived = asyncio.Event()
        self._ended = False
        self._isolated: deque[PolledRecords] = deque()
        self.waiting_bytes = 0
        self.awaits_isolated = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[PolledRecords]:
        return (each.delivery for each in self._waiting)

    def put(self, delivery: PolledRecords) -> None:
        """Add polled records without waking the first stage; see `notify`."""
        size_bytes = waiting_bytes(delivery.records)
        self.waiting_bytes += size_bytes
        partition = delivery.assignment.partition
        last = self._last.get(partition)
        if last is not None and last.joins(delivery, self._max_records):
            last.records += delivery.records
            last.size_bytes += size_bytes
            return
        self._last[partition] = waiting = _WaitingRecords(delivery, size_bytes)
        self._waiting.append(waiting)

    def put_isolated(self, delivery: PolledRecords) -> None:
        """Add a parked record. It is already admitted, so it is never dropped: a drain waits for
        it, and later answers may be held until it is answered.
        """
        self._isolated.append(delivery)
        self._arrived.set()

    def notify(self) -> None:
        """Wake the first stage."""
        self._arrived.set()

    async def next(self) -> PolledRecords | None:
        """Wait for and return the oldest delivery; None once the queue has ended and is empty."""
        while not (self._waiting or self._isolated):
            if self._ended and not self.awaits_isolated:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        if self._isolated:  # one at a time, so that the others come between
            return self._isolated.popleft()
        taken = self._waiting.popleft()
        partition = taken.delivery.assignment.partition
        if self._last[partition] is taken:
            del self._last[partition]
        self.waiting_bytes -= taken.size_bytes
        return taken.delivery

    async def yield_to_stages(self, budget: Budget) -> None:
        """Yield to the stages before the next poll.

        Records that arrive meanwhile are read together. With a poll in every event-loop turn, each
        record became its own chunk, up to ten were in progress at a time, and each delayed all
        others. This does not wait for a model run on a thread, or for a broker.

        Args:
            budget: the byte budget; with nothing in flight there is nothing to wait for.
        """
        tuning = self._tuning
        if self.waiting_bytes > tuning.far_ahead_bytes:
            await asyncio.sleep(tuning.far_ahead_pause_s)
            return
        is_small = self.waiting_bytes < tuning.large_chunk_bytes
        for _ in range(tuning.turns_to_answer if is_small else 1):
            await asyncio.sleep(0)
            if not (self._waiting or budget.used_bytes):
                return

    def end(self) -> None:
        """End the queue, and drop all waiting records."""
        self._ended = True
        self.drop(None)
        self._arrived.set()

    def drop(self, partitions: frozenset[TopicPartition] | None) -> None:
        """Drop waiting records of `partitions`, or of all; their next owner reads them again."""
        left = [
            each
            for each in self._waiting
            if partitions is not None and each.delivery.assignment.partition not in partitions
        ]
        self._waiting = deque(left)
        self._last = {each.delivery.assignment.partition: each for each in left}
        self.waiting_bytes = sum(each.size_bytes for each in left)


def waiting_bytes(records: Sequence[Record]) -> int:
    """Return the bytes charged for waiting records."""
    return sum([record_bytes(record) for record in records])
