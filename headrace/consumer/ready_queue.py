"""Records on their way from a poll to the first stage."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.crash_isolation.isolation import Isolation
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import AssignedPartition, record_bytes
from headrace.log.port import Record, TopicPartition

MAX_JOINED_RECORDS = 512
"""As many as one poll returns at most."""
FAR_AHEAD_BYTES = 16 * 1024 * 1024
FAR_AHEAD_PAUSE_S = 0.02
"""With so much read that the first stage has not taken, polls take turns with its work."""
TURNS_TO_ANSWER = 10
"""Turns of the event loop from a poll until the answers of what it read are sent, if no other
stage has anything else to do: each hands its chunk over to the next one's turn."""
MANY_BYTES = 128 * 1024
"""Who reads so much at a time need not wait for more to come."""


class Delivery(NamedTuple):
    """Records of one partition, in offset order, not yet admitted.

    With `skipped`, no records: all up to this offset are gone unread. With `again`, records that
    were deferred and are read a second time (`headrace.consumer.deferring`). With `isolation`, the
    process is careful, since there were unclean ends.
    """

    assignment: AssignedPartition
    records: Sequence[Record]
    isolation: Isolation | None = None
    skipped: int | None = None
    again: bool = False


class _Waiting:
    """A delivery that may grow until it is taken."""

    __slots__ = ("delivery", "records", "size_bytes")

    def __init__(self, delivery: Delivery, size_bytes: int) -> None:
        self.records = list(delivery.records)
        self.delivery = delivery._replace(records=self.records)
        self.size_bytes = size_bytes

    def joins(self, delivery: Delivery) -> bool:
        """Whether another one may be put behind it, as if they had been read together."""
        mine = self.delivery
        return (
            mine.assignment is delivery.assignment
            and mine.isolation is delivery.isolation is None
            and mine.skipped is delivery.skipped is None
            and not (mine.again or delivery.again)
            and len(self.records) + len(delivery.records) <= MAX_JOINED_RECORDS
        )


class Arrivals:
    """What was polled and waits for the first stage.

    What is read of a partition while some of it waits is joined to that: a chunk costs each stage
    about as much as dozens of small requests do, so that who falls behind gets larger ones, and
    catches up.

    Attributes:
        waiting_bytes: of all of it.
        awaits_isolated: parked records will be delivered again, even after the end.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._last: dict[TopicPartition, _Waiting] = {}
        self._arrived = asyncio.Event()
        self._ended = False
        self._isolated: deque[Delivery] = deque()
        self.waiting_bytes = 0
        self.awaits_isolated = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Delivery]:
        return (each.delivery for each in self._waiting)

    def put(self, delivery: Delivery) -> None:
        """Add what was read; tells nobody yet, see `tell`."""
        size_bytes = waiting_bytes(delivery.records)
        self.waiting_bytes += size_bytes
        partition = delivery.assignment.partition
        last = self._last.get(partition)
        if last is not None and last.joins(delivery):
            last.records += delivery.records
            last.size_bytes += size_bytes
            return
        self._last[partition] = waiting = _Waiting(delivery, size_bytes)
        self._waiting.append(waiting)

    def put_isolated(self, delivery: Delivery) -> None:
        """Add a record that was parked. It is admitted, and so it is not dropped: a drain waits for
        it, and answers behind it may be held until it is answered.
        """
        self._isolated.append(delivery)
        self._arrived.set()

    def tell(self) -> None:
        """Wake the first stage."""
        self._arrived.set()

    async def next(self) -> Delivery | None:
        """The oldest; None after the end, when nothing is left."""
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

    async def let_work(self, budget: Budget) -> None:
        """Let the stages get on with what was read, before more is.

        What comes meanwhile is read together, where little came. With a poll in every turn of the
        event loop each record had a chunk of its own, up to ten of them were under way at a time,
        and each was held up by all others. A run on a thread, or a broker, is not waited for.

        Args:
            budget: with nothing in flight there is nothing to wait for.
        """
        if self.waiting_bytes > FAR_AHEAD_BYTES:
            await asyncio.sleep(FAR_AHEAD_PAUSE_S)
            return
        for _ in range(TURNS_TO_ANSWER if self.waiting_bytes < MANY_BYTES else 1):
            await asyncio.sleep(0)
            if not (self._waiting or budget.used_bytes):
                return

    def end(self) -> None:
        """Forget what waits, and let nothing more come."""
        self._ended = True
        self.drop(None)
        self._arrived.set()

    def drop(self, partitions: frozenset[TopicPartition] | None) -> None:
        """Forget what was read of these or all; their next owner reads it again."""
        left = [
            each
            for each in self._waiting
            if partitions is not None and each.delivery.assignment.partition not in partitions
        ]
        self._waiting = deque(left)
        self._last = {each.delivery.assignment.partition: each for each in left}
        self.waiting_bytes = sum(each.size_bytes for each in left)


def waiting_bytes(records: Sequence[Record]) -> int:
    """Return what records that wait are charged."""
    return sum([record_bytes(record) for record in records])
