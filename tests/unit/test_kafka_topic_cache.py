"""The producer's cache of topics that have changed since."""

from __future__ import annotations

from types import SimpleNamespace
from uuid import UUID

import pytest

from headrace.log.errors import UnknownPartition
from headrace.log.kafka.admin import TopicsRequest
from headrace.log.kafka.topic_cache import TopicCache
from headrace.log.port import TopicPartition

UNKNOWN_TOPIC = 3


class Cluster:
    """The topics that brokers tell of, and a client that has heard of none of them yet."""

    def __init__(self, **counts: int) -> None:
        self.counts = counts
        self.questions = 0

    async def _answer(self, node: int, request: TopicsRequest) -> SimpleNamespace:
        """A broker's response to a metadata request."""
        self.questions += 1
        described = []
        for name in request.names:
            count = self.counts.get(name)
            code = UNKNOWN_TOPIC if count is None else 0
            described.append((code, name, UUID(int=1), False, [()] * (count or 0)))
        return SimpleNamespace(topics=described)

    def new_client(self) -> SimpleNamespace:
        """A client as a new producer has it."""
        heard: dict[str, set[int]] = {}

        async def force_metadata_update() -> None:
            heard.update({topic: set(range(count)) for topic, count in self.counts.items()})

        return SimpleNamespace(
            cluster=SimpleNamespace(partitions_for_topic=heard.get),
            _topics=set(),
            get_random_node=lambda: 1,
            send=self._answer,
            add_topic=lambda topic: None,
            force_metadata_update=force_metadata_update,
        )


async def test_next_producer_notices_deleted_topic() -> None:
    """The stale cache entry does not delay the next producer."""
    cluster, topics = Cluster(t=4), TopicCache()
    assert await topics.partitions(cluster.new_client(), "t") == 4
    del cluster.counts["t"]
    with pytest.raises(UnknownPartition, match="no such topic"):
        await topics.check(cluster.new_client(), TopicPartition("t", 0))


async def test_producer_writes_to_added_partitions() -> None:
    """Its new partition is known as soon as somebody asks for it."""
    cluster, topics = Cluster(t=1), TopicCache()
    assert await topics.partitions(cluster.new_client(), "t") == 1
    cluster.counts["t"] = 2
    client = cluster.new_client()
    await topics.check(client, TopicPartition("t", 1))
    assert client.cluster.partitions_for_topic("t") == {0, 1}


async def test_missing_topic_is_looked_up_once_for_many_records() -> None:
    """Its absence is remembered for a moment."""
    cluster, topics = Cluster(), TopicCache()
    for _ in range(3):
        with pytest.raises(UnknownPartition):
            await topics.check(cluster.new_client(), TopicPartition("t", 0))
    assert cluster.questions == 1
