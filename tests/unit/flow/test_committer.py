"""Commits in the background, where answers carry their own: what is left over is sealed."""

from __future__ import annotations

import asyncio

import pytest

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.committer import Committer
from headrace.delivery.inflight import InFlightTracker
from headrace.delivery.offset_store import OffsetStore
from headrace.delivery.transactions import PartitionLost, PartitionTransactions
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicPartition
from headrace.primitives.auto_reset_event import AutoResetEvent
from tests.support.conditions import eventually
from tests.support.services import StillClock, make_instruments

PARTITIONS = [TopicPartition("requests", number) for number in range(3)]


class Seats(PartitionTransactions):
    """Seats whose turns come when they are told so.

    Attributes:
        begun: whose rests are to be sealed, in the order in which they came.
        free: lets a seat's turn come.
        lost: seats that are another's by now.
    """

    def __init__(self, log: MemoryLog, tracker: InFlightTracker) -> None:
        metrics = make_instruments(StillClock()).metrics
        offset_store = OffsetStore(tracker, None, "requests", "requests")
        super().__init__(log, offset_store, "group", metrics, lambda: None)
        self.committer = Committer(tracker, None, metrics, AutoResetEvent(), self)
        self.begun: list[int] = []
        self.sealed: list[int] = []
        self.free = {each.partition: asyncio.Event() for each in PARTITIONS}
        self.lost: set[int] = set()

    async def commit_remaining(self, number: int) -> None:
        self.begun.append(number)
        await self.free[number].wait()
        if number in self.lost:
            raise PartitionLost("not ours")
        self.sealed.append(number)


@pytest.fixture
def seats() -> Seats:
    """With something left over in each of three partitions."""
    tracker = InFlightTracker(Budget(1000), lambda: None)
    for partition in PARTITIONS:
        tracker.assign(partition, AckedOffsets(5))
    return Seats(MemoryLog(), tracker)


async def test_commit_of_waiting_partition_delays_no_other(seats: Seats) -> None:
    """Their rests are sealed side by side."""
    async with MemoryLog().reader([]) as consumer:
        committing = asyncio.create_task(seats.committer.commit(consumer))
        await eventually(lambda: len(seats.begun) == 3)
        seats.free[1].set()
        seats.free[2].set()
        await eventually(lambda: len(seats.sealed) == 2)
        seats.free[0].set()
        assert await committing

    assert sorted(seats.sealed) == [0, 1, 2]


async def test_failed_commit_of_partition_is_retried_and_others_are_committed(seats: Seats) -> None:
    """The commit as a whole has failed then."""
    seats.lost = {0}
    for free in seats.free.values():
        free.set()
    async with MemoryLog().reader([]) as consumer:
        assert not await seats.committer.commit(consumer)

    assert seats.sealed == [1, 2]
    assert (seats.committer.failures, seats.committer.last_failure) == (1, "not ours")
