"""Writing in order: nothing overtakes what is refused, or what has to be tried again."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from headrace.delivery.producing import deliver_in_order as deliver_with
from headrace.log.errors import RecordRefused, RecordTooLarge, TopicForbidden, UnknownPartition
from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, TopicInfo, TopicPartition
from headrace.telemetry.metrics import Metrics
from tests.support.tuning import QUICK
from tests.support.visible import visible

ANSWERS = TopicPartition("answers", 0)
METRICS = Metrics(CollectorRegistry())

deliver_in_order = partial(deliver_with, tuning=QUICK.delivery)


@pytest.fixture
async def log() -> MemoryLog:
    """A topic of small batches and a compacted one; retries follow at once."""
    log = MemoryLog()
    topics = [
        TopicInfo(ANSWERS.topic, 1, {"max.message.bytes": "1000"}),
        TopicInfo("compacted", 1, {"cleanup.policy": "compact"}),
    ]
    await log.create_topics(topics, replication_factor=1)
    return log


def records(*sizes: int) -> list[NewRecord]:
    """Records of these sizes, each of another letter."""
    return [
        NewRecord(None, chr(ord("a") + place).encode() * size) for place, size in enumerate(sizes)
    ]


async def written(log: MemoryLog, topic: str = ANSWERS.topic) -> str:
    """The first letter of each record, as they stand."""
    return "".join((one.value or b"?")[:1].decode() for one in await visible(log, topic))


async def test_records_in_order_are_written_in_pieces_of_batch_size(log: MemoryLog) -> None:
    """Each piece is acknowledged before the next one goes."""
    async with log.producer() as producer:
        log.faults.acknowledgements.hold()
        writing = asyncio.create_task(
            deliver_in_order(producer, ANSWERS, records(*[300] * 9), METRICS)
        )
        for _ in range(20):
            await asyncio.sleep(0)
        assert await written(log) == "ab"
        log.faults.acknowledgements.release()
        assert await writing is None

    assert await written(log) == "abcdefghi"


async def test_records_after_refused_one_are_not_written_in_order(log: MemoryLog) -> None:
    """Its index says where to go on, once it was dealt with."""
    async with log.producer() as producer:
        refused = await deliver_in_order(producer, ANSWERS, records(10, 20, 2000, 30), METRICS)

    assert refused is not None
    assert (refused[0], type(refused[1])) == (2, RecordTooLarge)
    assert await written(log) == "ab"


async def test_refused_piece_in_order_is_halved(log: MemoryLog) -> None:
    """Halving finds the record at fault where its size is not the reason."""
    compacted = TopicPartition("compacted", 0)
    keyed = [NewRecord(b"k", bytes([value])) for value in b"abcdefg"]
    keyed[4] = NewRecord(None, b"e")
    async with log.producer() as producer:
        refused = await deliver_in_order(producer, compacted, keyed, METRICS)

    assert refused is not None
    assert (refused[0], type(refused[1])) == (4, RecordRefused)
    assert await written(log, "compacted") == "abcd"


async def test_unacknowledged_records_are_repeated_before_following_ones(log: MemoryLog) -> None:
    """A lost acknowledgement may mean a record twice; what comes after it waits."""
    async with log.producer() as producer:
        log.faults.acknowledgements.lose(1)
        assert await deliver_in_order(producer, ANSWERS, records(800, 800, 800), METRICS) is None

    assert await written(log) == "aabc"


@pytest.mark.parametrize("hidden", [True, False])
async def test_forbidden_topic_refuses_first_record_in_order(log: MemoryLog, hidden: bool) -> None:
    """Whether we may know of it or not."""
    log.faults.topics.forbid(ANSWERS.topic, hidden=hidden)
    async with log.producer() as producer:
        refused = await deliver_in_order(producer, ANSWERS, records(1, 2), METRICS)

    assert refused is not None
    assert (refused[0], type(refused[1])) == (0, TopicForbidden)


async def test_missing_partition_refuses_first_record_in_order(log: MemoryLog) -> None:
    """Before anything is sent."""
    nowhere = TopicPartition("nowhere", 0)
    async with log.producer() as producer:
        refused = await deliver_in_order(producer, nowhere, records(1, 2), METRICS)

    assert refused is not None
    assert (refused[0], type(refused[1])) == (0, UnknownPartition)
