"""Topics that the broker's access rules keep us from: one refusal, and nobody else concerned."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace.config import KafkaSettings
from headrace.log.errors import TopicForbidden
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import TopicInfo, TopicPartition
from headrace.tools.local_kafka import LocalKafka
from tests.support.acl import AUTHORIZER, Operation, allow_only
from tests.support.aiokafka_tasks import sending_tasks
from tests.support.logs import read, values, write

TOPICS = ("open", "readable", "hidden")
OPEN, READABLE, HIDDEN = (TopicPartition(topic, 0) for topic in TOPICS)
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def log(kafka_installed: None) -> AsyncIterator[KafkaLog]:
    """A broker's log, with a topic that may be written, one that may be read, and one neither."""
    async with (
        LocalKafka(properties=AUTHORIZER) as cluster,
        KafkaLog(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as log,
    ):
        infos = [TopicInfo(topic, 1, {}) for topic in TOPICS]
        await log.create_topics(infos, replication_factor=1)
        await allow_only(cluster.bootstrap_servers, "readable", Operation.READ)
        await allow_only(cluster.bootstrap_servers, "hidden", Operation.CREATE)
        yield log


async def test_forbidden_topic_is_refused_and_producer_is_kept(log: KafkaLog) -> None:
    """Whether it may be seen or not; what else is sent goes through the same connection."""
    async with log.producer() as producer, log.reader([OPEN]) as reader:
        before = sending_tasks()
        await write(producer, OPEN, b"before")
        for forbidden in (READABLE, HIDDEN):
            with pytest.raises(TopicForbidden, match=f"not allowed .* topic {forbidden.topic}"):
                await write(producer, forbidden, b"v")
        await write(producer, OPEN, b"after")

        assert values(await read(reader, 2)) == [b"before", b"after"]
        assert sending_tasks() == before


async def test_partitions_of_read_only_topic_are_known(log: KafkaLog) -> None:
    """A topic that we may not know of is no topic that does not exist."""
    async with log.producer() as producer:
        assert await producer.partitions_for("readable") == 1
        for _ in range(2):  # the second answer is a remembered one
            with pytest.raises(TopicForbidden):
                await producer.partitions_for("hidden")
