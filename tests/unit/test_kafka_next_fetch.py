"""When aiokafka's fetcher sends the next fetch to a broker of whose records some are unread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from headrace.log.kafka._aiokafka import FetchBuffer
from headrace.log.kafka.fetch_buffer import ReadState, take_records
from headrace.log.kafka.record_requests import FetchResponse
from headrace.log.port import MAX_POLL_BYTES
from tests.support.conditions import DEADLINE_S

ONE, TWO = TopicPartition("t", 0), TopicPartition("t", 1)
NEVER_S = 100 * DEADLINE_S
RECORDS = 10
VERSIONS = {FetchRequest.API_KEY: (11, 11)}


class Brokers:
    """A client whose brokers have records from each offset on.

    Attributes:
        leaders: the broker of each partition; -1 if there is none.
        asked: the brokers to which fetches were sent.
        held: the answer to the next fetch, which has no records; None to answer with records.
        has_request: set by a fetch.
        needs_metadata: set when the leaders are to be asked for.
    """

    def __init__(self) -> None:
        self.leaders = {ONE: 1, TWO: 1}
        self.asked: list[int] = []
        self.held: asyncio.Future[FetchResponse] | None = None
        self.has_request = asyncio.Event()
        self.needs_metadata = asyncio.Event()
        self.cluster = SimpleNamespace(
            leader_for_partition=self.leaders.get, broker_metadata=lambda _: None
        )
        self._loop = asyncio.get_running_loop()
        self._metadata_max_age_ms = 300_000

    def force_metadata_update(self) -> asyncio.Future[bool]:
        """Note that metadata is needed; it never arrives."""
        self.needs_metadata.set()
        return self._loop.create_future()

    async def send(self, node: int, request: Any) -> FetchResponse:
        """Answer a fetch in a later turn, as a broker does."""
        self.asked.append(node)
        self.has_request.set()
        if self.held is not None:
            held, self.held = self.held, None
            return await held
        await asyncio.sleep(0)
        topics = [
            (topic, [(number, 0, 0, 0, 0, None, -1, batch(at)) for number, _, at, *_ in parts])
            for topic, parts in request.prepare(VERSIONS).topics
        ]
        return FetchResponse(topics)


def batch(first: int) -> bytes:
    """Return a record batch from this offset on."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1 << 20)
    for delta in range(RECORDS):
        builder.append(delta, 1_000, None, b"v", [])
    content = builder.build()
    content[:8] = first.to_bytes(8, "big")
    return bytes(content)


class Consumer:
    """Reads two partitions of the brokers by aiokafka's own fetcher, which never looks for fetches
    without being woken.
    """

    def __init__(self) -> None:
        self.brokers = Brokers()
        self.partitions = SubscriptionState()
        self.partitions.assign_from_user([ONE, TWO])
        self.fetcher = Fetcher(
            self.brokers,
            self.partitions,
            fetcher_timeout=NEVER_S,
            prefetch_backoff=NEVER_S,
            isolation_level="read_committed",
        )
        consumer = SimpleNamespace(_fetcher=self.fetcher, seek=self.fetcher.seek_to)
        self.buffer = FetchBuffer(consumer)
        self._state = ReadState()

    async def poll(self, most: int = 3, timeout_s: float = NEVER_S) -> dict[TopicPartition, int]:
        """Return the first offset of the records of each partition."""
        async with asyncio.timeout(DEADLINE_S):
            found = await take_records(self.buffer, timeout_s, most, MAX_POLL_BYTES, self._state)
        return {TopicPartition(*each): records[0].offset for each, records in found.items()}


@pytest.fixture
async def consumer() -> AsyncIterator[Consumer]:
    """A consumer that reads `ONE` from its beginning; `TWO` is paused."""
    made = Consumer()
    made.partitions.seek(TWO, 0)
    made.partitions.pause(TWO)
    made.buffer.seek(ONE, 0)
    yield made
    await made.fetcher.close()


async def test_sought_partition_is_fetched_at_once(consumer: Consumer) -> None:
    """The unread rest of the last fetch is dropped: nobody has to read it first."""
    await consumer.poll()
    consumer.buffer.seek(ONE, 100)

    assert await consumer.poll() == {ONE: 100}


async def test_partition_resumed_instead_of_another_is_fetched_at_once(consumer: Consumer) -> None:
    """Neither the fetch with the unread records nor the look of the fetcher for another may hide
    that the broker can be asked.
    """
    await consumer.poll()
    consumer.partitions.pause(ONE)
    consumer.partitions.resume(TWO)
    await consumer.poll()
    consumer.partitions.pause(TWO)
    consumer.partitions.resume(ONE)

    assert await consumer.poll() == {ONE: 3}


async def test_partition_resumed_as_fetch_ends_without_records_is_fetched_at_once(
    consumer: Consumer,
) -> None:
    """The fetcher may look for the resumed partition just before the broker counts as free."""
    await consumer.poll(RECORDS + 1)
    brokers = consumer.brokers
    brokers.has_request.clear()
    answer = brokers.held = asyncio.get_running_loop().create_future()
    consumer.buffer.fetch_again()
    await brokers.has_request.wait()
    consumer.partitions.pause(ONE)
    consumer.partitions.resume(TWO)
    answer.set_result(FetchResponse([]))

    assert await consumer.poll() == {TWO: 0}


async def test_next_fetch_has_partition_resumed_while_another_was_read(consumer: Consumer) -> None:
    """Each fetch is of all partitions that can be read then."""
    await consumer.poll(RECORDS + 1)
    consumer.partitions.resume(TWO)

    assert await consumer.poll(3 * RECORDS) == {ONE: RECORDS, TWO: 0}


async def test_partition_with_new_leader_is_fetched_from_there(consumer: Consumer) -> None:
    """Fetches of one broker do not go on without looking where its partitions are."""
    await consumer.poll(RECORDS + 1)
    consumer.brokers.leaders[ONE] = 2

    assert await consumer.poll() == {ONE: RECORDS}
    assert consumer.brokers.asked == [1, 2]


async def test_leader_is_asked_for_while_another_partition_is_read(consumer: Consumer) -> None:
    """A partition without a leader does not wait for the end of the fetches of another."""
    await consumer.poll(3 * RECORDS)
    consumer.partitions.resume(TWO)
    assert await consumer.poll(3 * RECORDS) == {ONE: RECORDS, TWO: 0}
    consumer.brokers.leaders[TWO] = -1
    await consumer.poll(3 * RECORDS)

    assert consumer.brokers.needs_metadata.is_set()


async def test_resumed_partition_is_not_fetched_beside_fetch_in_progress(
    consumer: Consumer,
) -> None:
    """A broker has one fetch at a time, also if the last one was sent without the fetcher."""
    await consumer.poll(RECORDS + 1)
    brokers = consumer.brokers
    brokers.held = asyncio.get_running_loop().create_future()
    assert await consumer.poll(timeout_s=0.001) == {}  # sends the next fetch
    consumer.partitions.resume(TWO)

    assert await consumer.poll(timeout_s=0.001) == {}
    assert brokers.asked == [1, 1]


async def test_new_assignment_is_fetched_after_records_of_last_one(consumer: Consumer) -> None:
    """No fetch of the last one follows."""
    await consumer.poll(RECORDS + 1)
    consumer.partitions.unsubscribe()
    consumer.partitions.assign_from_user([TWO])
    consumer.buffer.seek(TWO, 5)

    assert await consumer.poll() == {TWO: 5}
    assert consumer.brokers.asked == [1, 1]
