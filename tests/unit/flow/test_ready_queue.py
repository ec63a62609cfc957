"""Records that were read and wait for the first stage."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from headrace.consumer.ready_queue import (
    PolledRecords,
    ReadyQueue,
    waiting_bytes,
)
from headrace.crash_isolation.isolation import Isolation
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import AssignedPartition, InFlightTracker
from headrace.log.port import Record, TopicPartition
from headrace.tuning import TUNING

ONE, TWO = TopicPartition("requests", 0), TopicPartition("requests", 1)


class Reader:
    """Reads partitions from their beginnings, as much as it is told to."""

    def __init__(self) -> None:
        self.tracker = InFlightTracker(Budget(1 << 20), lambda: None)
        self.assignments = {each: self.tracker.assign(each, AckedOffsets(0)) for each in (ONE, TWO)}
        self.arrivals = ReadyQueue()
        self._offsets = {ONE: 0, TWO: 0}

    def read(
        self, partition: TopicPartition, count: int, isolation: Isolation | None = None
    ) -> None:
        first = self._offsets[partition]
        self._offsets[partition] = first + count
        records = [
            Record(*partition, first + place, 0, None, b"value", ()) for place in range(count)
        ]
        self.arrivals.put(PolledRecords(self.assignments[partition], records, isolation))

    async def taken(self) -> list[tuple[int, list[int]]]:
        """All that waits: of each delivery its partition and its offsets."""
        found: list[tuple[int, list[int]]] = []
        while self.arrivals:
            delivery = await self.arrivals.next()
            assert delivery is not None
            offsets = [record.offset for record in delivery.records]
            found.append((delivery.assignment.partition.partition, offsets))
        return found


async def test_polled_records_join_waiting_records_of_partition() -> None:
    """The first stage gets all waiting records of a partition at once, in the order of offsets."""
    reader = Reader()
    for partition in (ONE, TWO, ONE, TWO, ONE):
        reader.read(partition, 2)

    assert await reader.taken() == [(0, [0, 1, 2, 3, 4, 5]), (1, [0, 1, 2, 3])]


async def test_taken_delivery_does_not_grow() -> None:
    """The first stage has its delivery; what is read from then on is another one."""
    reader = Reader()
    reader.read(ONE, 2)
    first = await reader.arrivals.next()
    reader.read(ONE, 2)

    assert first is not None
    assert len(first.records) == 2
    assert await reader.taken() == [(0, [2, 3])]


async def test_delivery_has_no_more_than_poll() -> None:
    """The first stage works on one without looking at others."""
    reader = Reader()
    for _ in range(3):
        reader.read(ONE, TUNING.consumer.max_poll_records // 2)

    sizes = [len(offsets) for _, offsets in await reader.taken()]
    assert sizes == [TUNING.consumer.max_poll_records, TUNING.consumer.max_poll_records // 2]


async def test_records_read_carefully_join_no_others() -> None:
    """Isolation applies to the records of its own poll only."""
    reader = Reader()
    isolation = Isolation(frozenset(), frozenset(), lambda _: None)
    for each in (None, isolation, isolation, None):
        reader.read(ONE, 1, each)

    assert await reader.taken() == [(0, [0]), (0, [1]), (0, [2]), (0, [3])]


async def test_records_behind_gap_do_not_join_those_before() -> None:
    """Records behind a gap do not join those before it."""
    reader = Reader()
    reader.read(ONE, 1)
    reader.arrivals.put(PolledRecords(reader.assignments[ONE], (), skipped=0))
    reader.read(ONE, 1)

    assert await reader.taken() == [(0, [0]), (0, []), (0, [1])]


async def test_records_of_other_epoch_do_not_join() -> None:
    """Records read for a revoked assignment do not mix with those of the present one."""
    reader = Reader()
    reader.read(ONE, 1)
    reader.tracker.revoke(ONE)
    reader.assignments[ONE] = _assigned_anew(reader.tracker)
    reader.read(ONE, 1)

    assert await reader.taken() == [(0, [0]), (0, [1])]


@pytest.mark.parametrize("dropped", [frozenset([ONE]), None])
async def test_waiting_bytes_follow_taken_and_added_records(
    dropped: frozenset[TopicPartition] | None,
) -> None:
    """They fall when a partition goes, and what joins later is counted as well."""
    reader = Reader()
    for partition in (ONE, TWO, TWO):
        reader.read(partition, 1)
    reader.arrivals.drop(dropped)
    reader.read(TWO, 1)

    left = list(reader.arrivals)
    assert reader.arrivals.waiting_bytes == sum(waiting_bytes(each.records) for each in left) > 0
    await reader.taken()
    assert reader.arrivals.waiting_bytes == 0


def _assigned_anew(tracker: InFlightTracker) -> AssignedPartition:
    return tracker.assign(ONE, AckedOffsets(0))


async def turns_of(work: Coroutine[Any, Any, None]) -> int:
    """How many turns the event loop makes until it is done."""
    task, turns = asyncio.create_task(work), 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    return turns


async def test_reading_waits_while_small_chunks_are_in_flight() -> None:
    """While something is in flight the next poll is as many turns away as an answer is."""
    reader = Reader()
    ack_handle = reader.assignments[ONE].admit(0, 10)

    turns = await turns_of(reader.arrivals.yield_to_stages(reader.tracker.budget))

    assert turns >= TUNING.consumer.turns_to_answer
    ack_handle.ack()


async def test_reading_of_large_chunks_does_not_wait() -> None:
    """The next poll follows a large chunk at once, as there is nothing to gather."""
    reader = Reader()
    reader.read(ONE, TUNING.consumer.large_chunk_bytes // 1024)

    assert await turns_of(reader.arrivals.yield_to_stages(reader.tracker.budget)) <= 2


async def test_reading_resumes_when_all_is_answered() -> None:
    """With nothing in flight and nothing that waits there is no pause."""
    reader = Reader()

    assert await turns_of(reader.arrivals.yield_to_stages(reader.tracker.budget)) <= 2
