"""Topics that the broker's access rules keep us from: one refusal, and nobody else concerned."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from headrace.config import KafkaSettings
from headrace.log.errors import TopicForbidden
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import TopicInfo, TopicPartition
from headrace.tools.local_kafka import LocalKafka
from tests.support.acl import Operation, allow_only
from tests.support.logs import read, values, write

pytestmark = pytest.mark.timeout(120)


class Guarded(NamedTuple):
    """A log with a topic that may be written, one that may be read, and one neither.

    `requests` are the names of the requests to the broker.
    """

    log: KafkaLog
    requests: list[str]
    open: TopicPartition
    readable: TopicPartition
    hidden: TopicPartition


@pytest.fixture
async def guarded(kafka: LocalKafka, unique_name: str) -> AsyncIterator[Guarded]:
    """The topics on the shared broker."""
    servers = kafka.bootstrap_servers
    topics = [f"{unique_name}.{kind}" for kind in ("open", "readable", "hidden")]
    requests: list[str] = []
    settings = KafkaSettings(bootstrap_servers=servers)
    async with KafkaLog(settings, on_request=requests.append) as log:
        await log.create_topics([TopicInfo(each, 1, {}) for each in topics], replication_factor=1)
        await allow_only(servers, topics[1], Operation.READ)
        await allow_only(servers, topics[2], Operation.CREATE)
        yield Guarded(log, requests, *[TopicPartition(each, 0) for each in topics])


async def test_forbidden_topic_is_refused_and_producer_is_kept(guarded: Guarded) -> None:
    """Whether it may be seen or not; what else is sent keeps its producer id."""
    log = guarded.log
    async with log.producer() as producer, log.reader([guarded.open]) as reader:
        await write(producer, guarded.open, b"before")
        for forbidden in (guarded.readable, guarded.hidden):
            with pytest.raises(TopicForbidden, match=f"not allowed .* topic {forbidden.topic}"):
                await write(producer, forbidden, b"v")
        await write(producer, guarded.open, b"after")

        assert values(await read(reader, 2)) == [b"before", b"after"]
    assert guarded.requests.count("InitProducerId") == 1


async def test_partitions_of_read_only_topic_are_known(guarded: Guarded) -> None:
    """A topic that we may not know of is no topic that does not exist."""
    async with guarded.log.producer() as producer:
        assert await producer.partitions_for(guarded.readable.topic) == 1
        for _ in range(2):  # the second answer is a remembered one
            with pytest.raises(TopicForbidden):
                await producer.partitions_for(guarded.hidden.topic)
