"""What is returned of fetch results: nothing is lost by one that is an error, or out of date."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, FetchError, FetchResult, PartitionRecords
from aiokafka.errors import CorruptRecordException, OffsetOutOfRangeError
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords

from headrace.log.kafka_fetched import fetched_records

ONE, TWO = TopicPartition("t", 0), TopicPartition("t", 1)


def batch(first: int, count: int) -> bytes:
    """A record batch with these offsets."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1 << 20)
    for delta in range(count):
        builder.append(delta, 1_000, None, b"v", [])
    content = builder.build()
    content[:8] = first.to_bytes(8, "big")
    return bytes(content)


class State:
    """Where a partition is read."""

    def __init__(self) -> None:
        self.position = 0
        self.paused = False

    def consumed_to(self, position: int) -> None:
        self.position = position


class Fetcher:
    """As much of aiokafka's as matters here."""

    def __init__(self, **fetched: bytes | Exception) -> None:
        self.states = {ONE: State(), TWO: State()}
        self.notified = 0
        self._closed = False
        self._wait_consume_future = None
        self._subscriptions = SimpleNamespace(reassignment_in_progress=False)
        self._records: OrderedDict[TopicPartition, Any] = OrderedDict()
        assignment = SimpleNamespace(active=True, state_value=self.states.get)
        for partition, found in zip((ONE, TWO), fetched.values(), strict=False):
            if isinstance(found, Exception):
                self._records[partition] = FetchError(error=found, backoff=0)
                continue
            records = PartitionRecords(
                partition, MemoryRecords(found), None, 0, None, None, True, READ_COMMITTED
            )
            self._records[partition] = FetchResult(
                partition, assignment=assignment, partition_records=records, backoff=0
            )

    def _notify(self, _: object) -> None:
        self.notified += 1

    def _create_fetch_waiter(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


async def take(fetcher: Fetcher, most: int = 100) -> dict[TopicPartition, list[int]]:
    """The offsets that are returned."""
    found = await fetched_records(fetcher, 0, most)
    return {partition: [one.offset for one in records] for partition, records in found.items()}


async def test_an_error_behind_records_is_left_for_the_next_call() -> None:
    """The records of the other partition are returned first; they would be lost with a raise."""
    fetcher = Fetcher(one=batch(0, 2), two=OffsetOutOfRangeError({TWO: 5}))

    assert await take(fetcher) == {ONE: [0, 1]}
    with pytest.raises(OffsetOutOfRangeError):
        await take(fetcher)
    assert await take(fetcher) == {}


async def test_what_cannot_be_read_is_left_for_the_next_call_and_fetched_again() -> None:
    """First the records before it, of all partitions; then the error, and the result is gone."""
    broken = bytearray(batch(2, 2))
    broken[30] ^= 0xFF
    fetcher = Fetcher(one=batch(0, 1), two=batch(0, 2) + bytes(broken))

    assert await take(fetcher) == {ONE: [0], TWO: [0, 1]}
    with pytest.raises(CorruptRecordException):
        await take(fetcher)
    assert fetcher.states[TWO].position == 2
    assert not fetcher._records


async def test_a_poll_has_a_bound_over_all_partitions() -> None:
    """What is left comes with the next one; a result that is used up lets more be fetched."""
    fetcher = Fetcher(one=batch(0, 3), two=batch(0, 3))

    assert await take(fetcher, 4) == {ONE: [0, 1, 2], TWO: [0]}
    assert fetcher.notified == 1
    assert await take(fetcher, 4) == {TWO: [1, 2]}
    assert fetcher.notified == 2


@pytest.mark.parametrize("change", ["paused", "position"])
async def test_what_is_out_of_date_is_dropped(change: str) -> None:
    """Where the partition was paused, or sought, since it was fetched, also in the midst of it."""
    fetcher = Fetcher(one=batch(0, 3))
    assert await take(fetcher, 1) == {ONE: [0]}
    setattr(fetcher.states[ONE], change, 7)

    assert await take(fetcher) == {}
    assert not fetcher._records


async def test_a_poll_ends_with_its_timeout() -> None:
    """Nobody waits longer than that for something to be fetched."""
    assert await fetched_records(Fetcher(), 0.01, 1) == {}


async def test_a_response_is_let_go_of_when_it_is_read() -> None:
    """It does not wait for the garbage collector, which seldom looks where requests are served."""
    fetcher = Fetcher(one=batch(0, 2))
    response = weakref.ref(fetcher._records[ONE]._partition_records)
    gc.disable()
    try:
        assert await take(fetcher) == {ONE: [0, 1]}
        assert response() is None
    finally:
        gc.enable()
