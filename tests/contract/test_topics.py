"""Topics: making them, describing them, asking for their partitions."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from headrace.log.errors import LogUnavailable
from headrace.log.port import Log, Producer, TopicInfo
from tests.contract.conftest import MakeTopic
from tests.support.conditions import DEADLINE_S


async def test_creating_existing_topic_changes_nothing(log: Log, unique_name: str) -> None:
    """The second creation says that it was there, and changes nothing."""
    first = await log.create_topics([TopicInfo(unique_name, 2, {})], replication_factor=1)
    second = await log.create_topics([TopicInfo(unique_name, 5, {})], replication_factor=1)
    described = (await log.describe_topics([unique_name]))[unique_name]
    assert (first, second) == ({unique_name: True}, {unique_name: False})
    assert described is not None
    assert described.partitions == 2


async def test_topic_is_described_with_its_settings(log: Log, make_topic: MakeTopic) -> None:
    """Partitions and settings come back by Kafka's names, as text."""
    (name, _), *_ = await make_topic(3, max_message_bytes="2000000", cleanup_policy="compact")
    described = (await log.describe_topics([name]))[name]
    assert described is not None
    assert (described.name, described.partitions) == (name, 3)
    assert described.config["max.message.bytes"] == "2000000"
    assert described.config["cleanup.policy"] == "compact"


async def test_unknown_topic_is_described_as_none(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """One unknown topic does not hide the others."""
    await make_topic()
    described = await log.describe_topics([unique_name, f"{unique_name}-missing"])
    assert described[f"{unique_name}-missing"] is None
    assert described[unique_name] is not None


async def test_known_topic_has_its_partitions(log: Log, make_topic: MakeTopic) -> None:
    """A producer tells how many partitions a topic has."""
    (name, _), *_ = await make_topic(3)
    async with log.producer() as producer:
        assert await producer.partitions_for(name) == 3


async def test_unknown_topic_has_no_partitions(log: Log, unique_name: str) -> None:
    """It has none, and no topic is made by asking."""
    async with log.producer() as producer:
        assert await _asked(producer, unique_name) is None
    assert await log.describe_topics([unique_name]) == {unique_name: None}


async def _asked(producer: Producer, topic: str) -> int | None:
    """Ask again when a busy broker has not answered within a second."""
    while True:
        with suppress(LogUnavailable):
            return await producer.partitions_for(topic)


async def test_topic_created_later_shows_its_partitions(log: Log, make_topic: MakeTopic) -> None:
    """A lookup does not remember for ever that a topic was unknown."""
    async with log.producer() as producer:
        (name, _), *_ = await make_topic(2)
        created = TopicInfo(f"{name}-missing", 4, {})
        async with asyncio.timeout(DEADLINE_S):
            assert await _asked(producer, created.name) is None
            await log.create_topics([created], replication_factor=1)
            while (count := await _asked(producer, created.name)) is None:
                pass
        assert count == 4


async def test_recreated_topic_has_another_id(log: Log, unique_name: str) -> None:
    """The id tells a topic from one created in its place; each topic keeps its own."""
    names = [f"{unique_name}-{number}" for number in range(2)]
    await log.create_topics([TopicInfo(each, 1, {}) for each in names], replication_factor=1)
    first, again = [await log.describe_topics(names) for _ in range(2)]
    ids = [None if topic is None else topic.topic_id for topic in first.values()]
    assert len({*ids, "", None}) == 4
    assert first == again
