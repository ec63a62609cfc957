"""Writing until it is acknowledged, and telling what never will be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from headrace.delivery.producing import deliver as deliver_with
from headrace.delivery.producing import refused_for_size
from headrace.log.errors import (
    LogRefused,
    RecordRefused,
    RecordTooLarge,
    TopicForbidden,
    UnknownPartition,
)
from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, Record, SentBatch, TopicInfo, TopicPartition
from headrace.telemetry.metrics import Metrics
from tests.support.conditions import eventually
from tests.support.logs import read
from tests.support.tuning import QUICK

ANSWERS = TopicPartition("answers", 0)
COMPACTED = TopicPartition("compacted", 0)

deliver = partial(deliver_with, tuning=QUICK.delivery)


@pytest.fixture
async def log() -> MemoryLog:
    """A topic of small records and a compacted one; retries follow at once."""
    log = MemoryLog()
    topics = [
        TopicInfo(ANSWERS.topic, 1, {"max.message.bytes": "1000"}),
        TopicInfo(COMPACTED.topic, 1, {"cleanup.policy": "compact"}),
    ]
    await log.create_topics(topics, replication_factor=1)
    return log


def retries(metrics: Metrics) -> float:
    """How often a record was sent again."""
    name = "headrace_retries_total"
    return metrics.registry.get_sample_value(name, {"operation": "send"}) or 0.0


def records(*sizes: int) -> list[NewRecord]:
    """Records of these sizes, each of another letter."""
    return [
        NewRecord(None, chr(ord("a") + place % 26).encode() * size)
        for place, size in enumerate(sizes)
    ]


async def written(log: MemoryLog, partition: TopicPartition = ANSWERS) -> list[Record]:
    """All that the partition holds."""
    async with log.reader([partition]) as reader:
        end = (await reader.end_offsets([partition]))[partition]
        reader.seek(partition, 0)
        return await read(reader, end)


def letters(found: Iterable[Record]) -> str:
    """The first letter of each value."""
    return "".join((record.value or b"?")[:1].decode() for record in found)


async def test_producing_writes_records_in_order(log: MemoryLog) -> None:
    """Without faults, each once, as handed over."""
    async with log.producer() as producer:
        assert await deliver(producer, ANSWERS, records(*[100] * 20)) == {}

    assert letters(await written(log)) == "abcdefghijklmnopqrst"


async def test_producing_refuses_only_oversized_records(log: MemoryLog) -> None:
    """The refused indexes are in order; the other records of their batches are written."""
    async with log.producer() as producer:
        refused = await deliver(producer, ANSWERS, records(10, 2000, 500, 500, 3000, 10))

    assert list(refused) == [1, 4]
    assert all(isinstance(error, RecordTooLarge) for error in refused.values())
    assert letters(await written(log)) == "acdf"


class BatchLimit:
    """A producer whose broker refuses batches of more than some records, as one that counts
    bytes does, and single records of more than ten bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.batches: list[int] = []
        self.taken: list[bytes | None] = []

    async def send(self, partition: TopicPartition, batch: list[NewRecord]) -> list[SentBatch]:
        self.batches.append(len(batch))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if len(batch) > self._most or any(len(one.value or b"") > 10 for one in batch):
            future.set_exception(RecordTooLarge("refused"))
        else:
            self.taken += [one.value for one in batch]
            future.set_result(None)
        return [SentBatch(len(batch), future)]


async def test_refused_batch_is_halved_until_accepted() -> None:
    """The limit is on batches: one that is refused may hold no record that is too large."""
    producer = BatchLimit(4)

    refused = await deliver(producer, ANSWERS, records(*[5] * 9, 11, *[5] * 6))  # type: ignore[arg-type]  # what is used of it

    assert list(refused) == [9]
    assert len(producer.taken) == 15
    assert max(producer.batches[1:]) <= 8


async def test_producing_waits_for_end_of_outage(log: MemoryLog) -> None:
    """While no broker answers it tries again; then everything is written once."""
    metrics = Metrics(CollectorRegistry())
    async with log.producer() as producer:
        log.faults.brokers.take_down()
        writing = asyncio.create_task(deliver(producer, ANSWERS, records(10, 20, 30), metrics))
        await eventually(lambda: retries(metrics) >= 2 * 3)
        assert not writing.done()
        log.faults.brokers.bring_back()

        assert await writing == {}
    assert letters(await written(log)) == "abc"


async def test_records_with_lost_acknowledgement_are_written_again(log: MemoryLog) -> None:
    """A lost acknowledgement means a record twice, never none."""
    async with log.producer() as producer:
        log.faults.acknowledgements.lose(1)
        assert await deliver(producer, ANSWERS, records(*[400] * 4)) == {}

    assert letters(await written(log)) in {"abcdab", "ababcd", "abcdabcd"}


async def test_retry_does_not_repeat_acknowledged_records(log: MemoryLog) -> None:
    """Only the batches that failed are sent again."""
    async with log.producer() as producer:
        log.faults.acknowledgements.lose(1)
        await deliver(producer, ANSWERS, records(900, 900, 900))

    assert sorted(letters(await written(log))) == ["a", "a", "b", "c"]


async def test_compacted_topic_refuses_records_without_key(log: MemoryLog) -> None:
    """A compacted topic takes the records with a key, whatever company they are in."""
    batch = [NewRecord(b"k", b"a"), NewRecord(None, b"b"), NewRecord(b"k", b"c")]
    async with log.producer() as producer:
        refused = await deliver(producer, COMPACTED, batch)

    assert list(refused) == [1]
    assert isinstance(refused[1], RecordRefused)
    assert letters(await written(log, COMPACTED)) == "ac"


async def test_missing_partition_refuses_all_records(log: MemoryLog) -> None:
    """A topic may be deleted while its name is remembered: nobody tries for ever."""
    async with log.producer() as producer:
        refused = await deliver(producer, TopicPartition("deleted", 0), records(1, 2, 3))

    assert list(refused) == [0, 1, 2]
    assert isinstance(refused[0], UnknownPartition)


async def test_forbidden_topic_refuses_all_at_once(log: MemoryLog) -> None:
    """Records for a forbidden topic are refused together, without a search for the one at fault."""
    log.faults.topics.forbid(ANSWERS.topic)
    async with log.producer() as producer:
        refused = await deliver(producer, ANSWERS, records(500, 300, 900))

    assert list(refused) == [0, 1, 2]
    assert all(isinstance(error, TopicForbidden) for error in refused.values())


async def test_own_topic_refusing_for_other_reason_than_size_is_fatal(log: MemoryLog) -> None:
    """Any other refusal means that the topic is not what was checked at the start."""
    async with log.producer() as producer:
        large = await deliver(producer, ANSWERS, records(10, 2000))
        gone = await deliver(producer, TopicPartition("deleted", 0), records(1))

    assert refused_for_size(large) == [1]
    with pytest.raises(LogRefused, match=r"^deleted/0: expected a topic with this partition"):
        refused_for_size(gone)


async def test_cancelling_producing_ends_retries(log: MemoryLog) -> None:
    """A process that must end at once does not wait for its broker."""
    metrics = Metrics(CollectorRegistry())
    async with log.producer() as producer:
        log.faults.brokers.take_down()
        writing = asyncio.create_task(deliver(producer, ANSWERS, records(1), metrics))
        await eventually(lambda: retries(metrics) >= 2)
        writing.cancel()
        await eventually(writing.done)

    assert writing.cancelled()
