"""The producer's cache of topics that have changed since."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from headrace.log.errors import LogRefused, UnknownPartition
from headrace.log.kafka.admin import TopicsRequest
from headrace.log.kafka.topic_cache import SharedRequests, TopicCache
from headrace.log.port import TopicPartition

UNKNOWN_TOPIC = 3


LIMIT_BYTES = 5_000


class Cluster:
    """The topics that brokers tell of, and a client that has heard of none of them yet."""

    def __init__(self, **counts: int) -> None:
        self.counts = counts
        self.questions = 0

    async def _answer(self, node: int, request: Any) -> SimpleNamespace:
        """A broker's response to a request for metadata, or for the settings of topics."""
        self.questions += 1
        await asyncio.sleep(0)
        if not isinstance(request, TopicsRequest):
            settings = [("max.message.bytes", str(LIMIT_BYTES))]
            return SimpleNamespace(resources=[(0, "", 2, topic, settings) for topic in self.counts])
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


async def test_concurrent_first_sends_to_topic_share_requests() -> None:
    """One asks for its partitions, and one for its settings."""
    cluster, topics = Cluster(t=4), TopicCache()
    client = cluster.new_client()
    partitions = [TopicPartition("t", number) for number in range(4)]
    limits = await asyncio.gather(*(topics.fetch_limits(client, each) for each in partitions * 5))

    assert {each.limit_bytes for each in limits} == {LIMIT_BYTES}
    assert cluster.questions == 2


async def test_request_of_cancelled_caller_is_made_by_another() -> None:
    """The deadline of one caller is not that of all."""
    cluster, topics = Cluster(t=4), TopicCache()
    client = cluster.new_client()
    callers = [asyncio.create_task(topics.partitions(client, "t"), name=name) for name in "ab"]
    await asyncio.sleep(0)
    callers[0].cancel()

    assert await callers[1] == 4


async def test_failure_of_shared_request_is_that_of_all_callers() -> None:
    """Each would otherwise wait for a failure of its own, one after the other."""
    requests = SharedRequests[int]()

    async def refused() -> int:
        await asyncio.sleep(0)
        raise LogRefused("no")

    callers = (requests.answer("t", refused) for _ in range(3))
    failures = await asyncio.gather(*callers, return_exceptions=True)

    assert len(set(map(id, failures))) == 1
