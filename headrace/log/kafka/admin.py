"""Cache of what a producer needs to know about topics before it writes to them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection
from typing import Final, Generic, NamedTuple, TypeVar

import aiokafka.errors as kafka_errors
from aiokafka.client import AIOKafkaClient

from headrace.log.errors import (
    LogAuthenticationFailed,
    LogUnavailable,
    NoLeader,
    TopicForbidden,
    UnknownPartition,
)
from headrace.log.kafka.connection import RETRY_BACKOFF_S
from headrace.log.kafka.errors import answered
from headrace.log.kafka.requests import partition_counts, topic_configs
from headrace.log.port import TopicPartition

QUESTION_S: Final = 1.0
_ABSENT_FOR_S: Final = 1.0
_COUNT_FOR_S: Final = 30.0
_RULES_FOR_S: Final = 300.0
_REMEMBERED: Final = 10_000

_NOBODY: Final = -1
"""The leader of a partition that has none."""

_FORBIDDEN: Final = -1
"""Stands for the number of partitions of a topic that the broker may not describe to us."""

V = TypeVar("V")


class Rules(NamedTuple):
    """The limits of a topic.

    Attributes:
        limit_bytes: the largest batch (`max.message.bytes`); our batches count uncompressed.
        needs_key: True if the topic is compacted, and so accepts no record without a key.
    """

    limit_bytes: int
    needs_key: bool


_DEFAULT_RULES: Final = Rules(1_048_588, needs_key=False)
"""Kafka's defaults, used when the topic's settings cannot be read."""


class Remembered(Generic[V]):
    """Values by topic, each with its own expiry; the oldest are evicted when there are too many."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, tuple[V, float]] = OrderedDict()

    def get(self, topic: str, now: float) -> tuple[V] | None:
        """Return the value in a tuple, since it may be None; None when unknown or expired."""
        found = self._values.get(topic)
        return None if found is None or found[1] < now else (found[0],)

    def put(self, topic: str, value: V, until: float) -> None:
        """Store a value until a monotonic time."""
        self._values[topic] = (value, until)
        self._values.move_to_end(topic)
        if len(self._values) > _REMEMBERED:
            self._values.popitem(last=False)

    def forget(self, topic: str) -> None:
        """Drop the value, so that the next use requests it again."""
        self._values.pop(topic, None)


class KnownTopics:
    """Cache of the partition counts and limits of topics, requested through a producer's client.

    The cached values outlive the client, which changes when the producer is replaced.
    """

    def __init__(self) -> None:
        self._counts: Remembered[int | None] = Remembered()
        self._rules: Remembered[Rules] = Remembered()

    async def partitions(self, client: AIOKafkaClient, topic: str) -> int | None:
        """Return the number of partitions; None when there is no such topic.

        Raises:
            LogUnavailable: no broker answered within a second.
            TopicForbidden: the broker does not allow us to describe the topic.
        """
        known = client.cluster.partitions_for_topic(topic)
        if known:
            return len(known)
        now = time.monotonic()
        remembered = self._counts.get(topic, now)
        if remembered is not None:
            return _unless_forbidden(topic, remembered[0])
        return await self._ask_count(client, topic)

    async def _ask_count(self, client: AIOKafkaClient, topic: str) -> int | None:
        """Request the number of partitions from a broker and cache it."""
        count = await _count(client, topic)
        lasts_s = _COUNT_FOR_S if count and count != _FORBIDDEN else _ABSENT_FOR_S
        self._counts.put(topic, count, time.monotonic() + lasts_s)
        if count is None or count == _FORBIDDEN:
            # Otherwise the client would ask for a deleted topic with each refresh, and could
            # have it made again by a broker that creates topics by itself.
            client._topics.discard(topic)
        return _unless_forbidden(topic, count)

    async def check(self, client: AIOKafkaClient, partition: TopicPartition) -> None:
        """Make sure that the client knows the partition; otherwise aiokafka would wait for its
        whole timeout, or assert.

        Raises:
            UnknownPartition: there is no such topic, or it has fewer partitions.
            TopicForbidden: we are not allowed to describe the topic.
            LogUnavailable: no broker answered in time.
        """
        topic = partition.topic
        known = client.cluster.partitions_for_topic(topic)
        if known and partition.partition in known:
            return
        remembered = self._counts.get(topic, time.monotonic())
        if remembered is not None and remembered[0] in {None, _FORBIDDEN}:
            count = _unless_forbidden(topic, remembered[0])
        else:
            # A cached count may belong to a topic that has grown, or was deleted, since.
            count = await self._ask_count(client, topic)
        if count is None or not 0 <= partition.partition < count:
            raise UnknownPartition(partition, count or 0)
        client.add_topic(topic)
        while partition.partition not in (client.cluster.partitions_for_topic(topic) or ()):
            await client.force_metadata_update()
            await asyncio.sleep(
                0 if client.cluster.partitions_for_topic(topic) else RETRY_BACKOFF_S
            )

    async def rules(self, client: AIOKafkaClient, topic: str) -> Rules:
        """Return the topic's limits from its settings, which may be five minutes old."""
        now = time.monotonic()
        remembered = self._rules.get(topic, now)
        if remembered is not None:
            return remembered[0]
        try:
            async with answered(f"settings of topic {topic}", QUESTION_S):
                config = (await topic_configs(client, [topic])).get(topic, {})
        except LogUnavailable:
            return _DEFAULT_RULES
        except LogAuthenticationFailed:
            # Writing does not require the right to read a topic's settings.
            config = {}
        rules = Rules(
            int(config.get("max.message.bytes", _DEFAULT_RULES.limit_bytes)),
            "compact" in config.get("cleanup.policy", ""),
        )
        self._rules.put(topic, rules, now + _RULES_FOR_S)
        return rules

    def forget_rules(self, topic: str) -> None:
        """Drop the cached limits, since a broker applied different ones."""
        self._rules.forget(topic)

    async def ask(self, client: AIOKafkaClient, partition: TopicPartition) -> Rules:
        """Return the limits needed to send to a partition. Raises as `check` does."""
        await self.check(client, partition)
        return await self.rules(client, partition.topic)

    def recall(self, client: AIOKafkaClient, partition: TopicPartition) -> Rules | None:
        """Return what `ask` would, if it is cached; else None."""
        if client.cluster.leader_for_partition(partition) is None:  # not in its metadata
            return None
        remembered = self._rules.get(partition.topic, time.monotonic())
        return None if remembered is None else remembered[0]


async def require_leaders(client: AIOKafkaClient, partitions: Collection[TopicPartition]) -> None:
    """Raise `NoLeader` for the first partition that has no leader, according to a broker now.

    No broker is asked while the client knows a leader for each; a leader that has gone shows when a
    request to it fails.
    """
    if _leaderless(client, partitions) is None:
        return
    async with answered("metadata", QUESTION_S):
        await client.force_metadata_update()
    partition = _leaderless(client, partitions)
    if partition is not None:
        raise NoLeader(partition)


def require_known_leaders(client: AIOKafkaClient, partitions: Collection[TopicPartition]) -> None:
    """Raise `LogUnavailable` if, according to the client's metadata, a partition has no leader."""
    partition = _leaderless(client, partitions)
    if partition is not None:
        raise LogUnavailable(f"{partition}: it has no leader any more")


def _leaderless(
    client: AIOKafkaClient, partitions: Collection[TopicPartition]
) -> TopicPartition | None:
    leader = client.cluster.leader_for_partition
    return next((each for each in partitions if leader(each) == _NOBODY), None)


async def _count(client: AIOKafkaClient, topic: str) -> int | None:
    """Request the number of partitions; `_FORBIDDEN` if the broker may not describe the topic."""
    async with answered(f"metadata of topic {topic}", QUESTION_S):
        try:
            return (await partition_counts(client, [topic]))[topic]
        except kafka_errors.TopicAuthorizationFailedError:
            return _FORBIDDEN


def _unless_forbidden(topic: str, count: int | None) -> int | None:
    if count == _FORBIDDEN:
        raise TopicForbidden(topic)
    return count
