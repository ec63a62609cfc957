"""What a producer has to know of topics before it writes to them, remembered for a while."""

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
"""In the place of a number of partitions."""

V = TypeVar("V")


class Rules(NamedTuple):
    """What a topic takes.

    Attributes:
        limit_bytes: the largest batch (`max.message.bytes`); ours count uncompressed.
        needs_key: whether it is compacted, and so takes no record without a key.
    """

    limit_bytes: int
    needs_key: bool


_DEFAULT_RULES: Final = Rules(1_048_588, needs_key=False)
"""Kafka's defaults, where the topic's settings cannot be had."""


class Remembered(Generic[V]):
    """Values by topic, each for its time; the oldest leave first when there are too many."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, tuple[V, float]] = OrderedDict()

    def get(self, topic: str, now: float) -> tuple[V] | None:
        """The value in a tuple, since it may be None; None when unknown or too old."""
        found = self._values.get(topic)
        return None if found is None or found[1] < now else (found[0],)

    def put(self, topic: str, value: V, until: float) -> None:
        """Remember a value until a monotonic time."""
        self._values[topic] = (value, until)
        self._values.move_to_end(topic)
        if len(self._values) > _REMEMBERED:
            self._values.popitem(last=False)

    def forget(self, topic: str) -> None:
        """Ask again next time."""
        self._values.pop(topic, None)


class KnownTopics:
    """The partitions of topics and their limits, asked for through a producer's client.

    The cached answers outlive the client, which changes when the producer is replaced.
    """

    def __init__(self) -> None:
        self._counts: Remembered[int | None] = Remembered()
        self._rules: Remembered[Rules] = Remembered()

    async def partitions(self, client: AIOKafkaClient, topic: str) -> int | None:
        """The number of partitions; None when there is no such topic.

        Raises:
            LogUnavailable: no broker answered within a second.
            TopicForbidden: the broker does not let us know.
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
        """What a broker says now, which is remembered from then on."""
        count = await _count(client, topic)
        lasts_s = _COUNT_FOR_S if count and count != _FORBIDDEN else _ABSENT_FOR_S
        self._counts.put(topic, count, time.monotonic() + lasts_s)
        if count is None or count == _FORBIDDEN:
            # Otherwise the client would ask for a deleted topic with each refresh, and could
            # have it made again by a broker that creates topics by itself.
            client._topics.discard(topic)
        return _unless_forbidden(topic, count)

    async def check(self, client: AIOKafkaClient, partition: TopicPartition) -> None:
        """Make sure that the client knows the partition, without which aiokafka would wait for
        its whole timeout, or assert.

        Raises:
            UnknownPartition: there is no such topic, or it has fewer partitions.
            TopicForbidden: we may not know of it.
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
            # A count that is remembered may be of a topic that has grown, or was deleted, since.
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
        """What the topic takes, by its settings, which may be five minutes old."""
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
            # Writing needs no right to read a topic's settings.
            config = {}
        rules = Rules(
            int(config.get("max.message.bytes", _DEFAULT_RULES.limit_bytes)),
            "compact" in config.get("cleanup.policy", ""),
        )
        self._rules.put(topic, rules, now + _RULES_FOR_S)
        return rules

    def forget_rules(self, topic: str) -> None:
        """Ask for them again, since a broker went by others."""
        self._rules.forget(topic)

    async def ask(self, client: AIOKafkaClient, partition: TopicPartition) -> Rules:
        """All that there is to know before sending to a partition. Raises as `check` does."""
        await self.check(client, partition)
        return await self.rules(client, partition.topic)

    def recall(self, client: AIOKafkaClient, partition: TopicPartition) -> Rules | None:
        """What `ask` would say, where no question is needed for it; else None."""
        if client.cluster.leader_for_partition(partition) is None:  # not in its metadata
            return None
        remembered = self._rules.get(partition.topic, time.monotonic())
        return None if remembered is None else remembered[0]


async def require_leaders(client: AIOKafkaClient, partitions: Collection[TopicPartition]) -> None:
    """Raises `NoLeader` for the first partition that has none, as a broker says now.

    A client that knows of leaders asks no broker; one that goes is found out by what is sent to it.
    """
    if _leaderless(client, partitions) is None:
        return
    async with answered("metadata", QUESTION_S):
        await client.force_metadata_update()
    partition = _leaderless(client, partitions)
    if partition is not None:
        raise NoLeader(partition)


def require_known_leaders(client: AIOKafkaClient, partitions: Collection[TopicPartition]) -> None:
    """The same, as the client knows; raises `LogUnavailable`."""
    partition = _leaderless(client, partitions)
    if partition is not None:
        raise LogUnavailable(f"{partition}: it has no leader any more")


def _leaderless(
    client: AIOKafkaClient, partitions: Collection[TopicPartition]
) -> TopicPartition | None:
    leader = client.cluster.leader_for_partition
    return next((each for each in partitions if leader(each) == _NOBODY), None)


async def _count(client: AIOKafkaClient, topic: str) -> int | None:
    """The number of partitions, as a broker says now; `_FORBIDDEN` where it does not say."""
    async with answered(f"metadata of topic {topic}", QUESTION_S):
        try:
            return (await partition_counts(client, [topic]))[topic]
        except kafka_errors.TopicAuthorizationFailedError:
            return _FORBIDDEN


def _unless_forbidden(topic: str, count: int | None) -> int | None:
    if count == _FORBIDDEN:
        raise TopicForbidden(topic)
    return count
