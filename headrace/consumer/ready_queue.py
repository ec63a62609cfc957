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

    Attributes:
        isolation: crash isolation of the partition; None unless it is active, after unclean ends.
        skipped: last offset of a range that was deleted unread; there are no records then.
        is_reread: True if the records were deferred and are read a second time
            (`headrace.consumer.deferring`).
    """

    assignment: AssignedPartition
    records: Sequence[Record]
    isolation: Isolation | None = None
    skipped: int | None = None
    is_reread: bool = False

    @property
    def is_isolated(self) -> bool:
        """True if this is one admitted record, which is delivered again to run alone."""
        return self.isolation is not None and self.isolation.isolated is not None


class _WaitingRecords:
    """Polled records that may grow until the first stage receives them."""

    __slots__ = ("_grown", "polled", "size_bytes")

    def __init__(self, polled: PolledRecords, size_bytes: int) -> None:
        self.polled = polled
        self.size_bytes = size_bytes
        self._grown: list[Record] | None = None

    def accepts(self, polled: PolledRecords, max_records: int) -> bool:
        """Return True if `polled` may be appended, as if both had been read together."""
        waiting = self.polled
        return (
            waiting.assignment is polled.assignment
            and waiting.isolation is polled.isolation is None
            and waiting.skipped is polled.skipped is None
            and not (waiting.is_reread or polled.is_reread)
            and len(waiting.records) + len(polled.records) <= max_records
        )

    def append(self, polled: PolledRecords, size_bytes: int) -> None:
        """Append records that it accepts."""
        if self._grown is None:  # the list of the poll is not changed
            self._grown = list(self.polled.records)
            self.polled = self.polled._replace(records=self._grown)
        self._grown += polled.records
        self.size_bytes += size_bytes


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
        return (each.polled for each in self._waiting)

    def put(self, polled: PolledRecords) -> None:
        """Add polled records without waking the first stage; see `notify`."""
        size_bytes = waiting_bytes(polled.records)
        self.waiting_bytes += size_bytes
        partition = polled.assignment.partition
        last = self._last.get(partition)
        if last is not None and last.accepts(polled, self._max_records):
            last.append(polled, size_bytes)
            return
        self._last[partition] = waiting = _WaitingRecords(polled, size_bytes)
        self._waiting.append(waiting)

    def put_isolated(self, polled: PolledRecords) -> None:
        """Add a parked record. It is already admitted, so it is never dropped: a drain waits for
        it, and later answers may be held until it is answered.
        """
        self._isolated.append(polled)
        self._arrived.set()

    def notify(self) -> None:
        """Wake the first stage."""
        self._arrived.set()

    async def next(self) -> PolledRecords | None:
        """Wait for and return the oldest polled records; None once the queue has ended and is
        empty.
        """
        while not (self._waiting or self._isolated):
            if self._ended and not self.awaits_isolated:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        if self._isolated:  # one at a time, so that the others come between
            return self._isolated.popleft()
        oldest = self._waiting.popleft()
        partition = oldest.polled.assignment.partition
        if self._last[partition] is oldest:
            del self._last[partition]
        self.waiting_bytes -= oldest.size_bytes
        return oldest.polled

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
            if partitions is not None and each.polled.assignment.partition not in partitions
        ]
        self._waiting = deque(left)
        self._last = {each.polled.assignment.partition: each for each in left}
        self.waiting_bytes = sum(each.size_bytes for each in left)


def waiting_bytes(records: Sequence[Record]) -> int:
    """Return the bytes charged for waiting records."""
    return sum([record_bytes(record) for record in records])
