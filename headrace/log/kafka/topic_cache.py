"""Cache of what a producer needs to know about topics before it writes to them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Hashable
from functools import partial
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
from headrace.log.kafka._aiokafka import forget_topic
from headrace.log.kafka.admin import AdminClient
from headrace.log.kafka.errors import answered
from headrace.log.port import TopicPartition
from headrace.tuning import TUNING, KafkaTuning

_NO_LEADER: Final = -1
"""Stands in metadata for the leader of a partition that has none."""

_FORBIDDEN: Final = -1
"""Stands for the number of partitions of a topic that the broker may not describe to us."""

V = TypeVar("V")


class TopicLimits(NamedTuple):
    """The limits of a topic.

    Attributes:
        limit_bytes: the largest batch (`max.message.bytes`); our batches count uncompressed.
        needs_key: True if the topic is compacted, and so accepts no record without a key.
    """

    limit_bytes: int
    needs_key: bool


_DEFAULT_LIMITS: Final = TopicLimits(1_048_588, needs_key=False)
"""Kafka's defaults, used when the topic's settings cannot be read."""


class ExpiringCache(Generic[V]):
    """Values by topic, each with its own expiry; the oldest is evicted when there are too many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[str, tuple[V, float]] = OrderedDict()

    def get(self, topic: str, now: float) -> tuple[V] | None:
        """Return the value in a tuple, since it may be None; None when unknown or expired."""
        found = self._values.get(topic)
        return None if found is None or found[1] < now else (found[0],)

    def put(self, topic: str, value: V, until: float) -> None:
        """Store a value until a monotonic time."""
        self._values[topic] = (value, until)
        self._values.move_to_end(topic)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def expire_by(self, topic: str, until: float) -> None:
        """Keep the value until then at most."""
        found = self._values.get(topic)
        if found is not None and found[1] > until:
            self._values[topic] = (found[0], until)

    def forget(self, topic: str) -> None:
        """Drop the value, so that the next use requests it again."""
        self._values.pop(topic, None)


class SharedRequests(Generic[V]):
    """Lets concurrent callers with the same question share one request."""

    def __init__(self) -> None:
        self._asked: dict[Hashable, asyncio.Future[V]] = {}

    async def answer(self, question: Hashable, request: Callable[[], Awaitable[V]]) -> V:
        """Return what the request returns, or one in progress does; raise as it does.

        If the caller that makes it is cancelled, another one makes it anew.
        """
        while (in_progress := self._asked.get(question)) is not None:
            await asyncio.wait([in_progress])
            if not in_progress.cancelled():
                return in_progress.result()
        asked = self._asked[question] = asyncio.get_running_loop().create_future()
        try:
            found = await request()
        except Exception as error:
            asked.set_exception(error)
            asked.exception()  # mark it as retrieved: there may be no other caller
            raise
        else:
            asked.set_result(found)
            return found
        finally:
            asked.cancel()  # if neither was set
            del self._asked[question]


class TopicCache:
    """Cache of the partition counts and limits of topics, requested through a producer's client.

    The cached values outlive the client, which changes when the producer is replaced.
    """

    def __init__(self, tuning: KafkaTuning = TUNING.kafka) -> None:
        self._tuning = tuning
        self._counts: ExpiringCache[int | None] = ExpiringCache(tuning.cached_topics)
        self._limits: ExpiringCache[TopicLimits] = ExpiringCache(tuning.cached_topics)
        self._batch_bytes: ExpiringCache[int] = ExpiringCache(tuning.cached_topics)
        # Of each client: a client that is being closed must not fail the requests of others.
        self._asked_counts: SharedRequests[int | None] = SharedRequests()
        self._asked_limits: SharedRequests[TopicLimits] = SharedRequests()

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
        cached = self._counts.get(topic, now)
        if cached is not None:
            return _unless_forbidden(topic, cached[0])
        return await self._fetch_count(client, topic)

    async def _fetch_count(self, client: AIOKafkaClient, topic: str) -> int | None:
        """Request the number of partitions from a broker and cache it."""
        count = await self._asked_counts.answer(
            (id(client), topic), partial(self._request_count, client, topic)
        )
        lasts_s = (
            self._tuning.partition_count_ttl_s
            if count and count != _FORBIDDEN
            else self._tuning.absent_topic_ttl_s
        )
        self._counts.put(topic, count, time.monotonic() + lasts_s)
        if count is None or count == _FORBIDDEN:
            # Otherwise the client would ask for a deleted topic with each refresh, and could
            # have it made again by a broker that creates topics by itself.
            forget_topic(client, topic)
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
        cached = self._counts.get(topic, time.monotonic())
        if cached is not None and cached[0] in {None, _FORBIDDEN}:
            count = _unless_forbidden(topic, cached[0])
        else:
            # A cached count may belong to a topic that has grown, or was deleted, since.
            count = await self._fetch_count(client, topic)
        if count is None or not 0 <= partition.partition < count:
            raise UnknownPartition(partition, count or 0)
        client.add_topic(topic)
        while partition.partition not in (client.cluster.partitions_for_topic(topic) or ()):
            await client.force_metadata_update()
            await asyncio.sleep(
                0 if client.cluster.partitions_for_topic(topic) else self._tuning.request_retry_s
            )

    async def _fetch_limits(self, client: AIOKafkaClient, topic: str) -> TopicLimits:
        """Return the topic's limits from its settings, which may be five minutes old."""
        cached = self._limits.get(topic, time.monotonic())
        if cached is not None:
            return cached[0]
        return await self._asked_limits.answer(
            (id(client), topic), partial(self._request_limits, client, topic)
        )

    async def _request_limits(self, client: AIOKafkaClient, topic: str) -> TopicLimits:
        """Request the topic's settings from a broker and cache its limits."""
        now = time.monotonic()
        try:
            async with answered(f"settings of topic {topic}", self._tuning.topic_timeout_s):
                config = (await self._admin(client).topic_configs([topic])).get(topic, {})
        except LogUnavailable:
            return _DEFAULT_LIMITS
        except LogAuthenticationFailed:
            # Writing does not require the right to read a topic's settings.
            config = {}
        limits = TopicLimits(
            int(config.get("max.message.bytes", _DEFAULT_LIMITS.limit_bytes)),
            "compact" in config.get("cleanup.policy", ""),
        )
        self._limits.put(topic, limits, now + self._tuning.topic_limits_ttl_s)
        return limits

    def forget_limits(self, topic: str) -> None:
        """Drop the cached limits, since a broker applied different ones."""
        self._limits.forget(topic)

    def recheck_limits(self, topic: str) -> None:
        """Request the limits again soon, since a record was refused by them without a broker: an
        operator who sees that may raise them, and expects the next records to be accepted.
        """
        until_s = time.monotonic() + self._tuning.refusing_limits_ttl_s
        self._limits.expire_by(topic, until_s)

    def limit_batches(self, topic: str, size_bytes: int) -> None:
        """Limit batches of several records to this size for a while. A larger record is sent alone:
        the topic's settings may not be readable, so only a broker can refuse it.
        """
        until_s = time.monotonic() + self._tuning.topic_limits_ttl_s
        self._batch_bytes.put(topic, size_bytes, until_s)

    def max_batch_bytes(self, topic: str) -> int:
        """Return the largest batch of several records, if the topic accepts it."""
        cached = self._batch_bytes.get(topic, time.monotonic())
        most_bytes = self._tuning.max_batch_bytes
        return most_bytes if cached is None else min(cached[0], most_bytes)

    async def fetch_limits(self, client: AIOKafkaClient, partition: TopicPartition) -> TopicLimits:
        """Return the limits needed to send to a partition. Raises as `check` does."""
        await self.check(client, partition)
        return await self._fetch_limits(client, partition.topic)

    def cached_limits(
        self, client: AIOKafkaClient, partition: TopicPartition
    ) -> TopicLimits | None:
        """Return what `fetch_limits` would, if it is cached; else None."""
        if client.cluster.leader_for_partition(partition) is None:  # not in its metadata
            return None
        cached = self._limits.get(partition.topic, time.monotonic())
        return None if cached is None else cached[0]

    def _admin(self, client: AIOKafkaClient) -> AdminClient:
        return AdminClient(client, self._tuning.request_retry_s)

    async def _request_count(self, client: AIOKafkaClient, topic: str) -> int | None:
        """Request the number of partitions; `_FORBIDDEN` if the broker may not describe it."""
        async with answered(f"metadata of topic {topic}", self._tuning.topic_timeout_s):
            try:
                return (await self._admin(client).partition_counts([topic]))[topic]
            except kafka_errors.TopicAuthorizationFailedError:
                return _FORBIDDEN


async def require_leaders(
    client: AIOKafkaClient, partitions: Collection[TopicPartition], timeout_s: float
) -> None:
    """Raise `NoLeader` for the first partition that has no leader, according to a broker now.

    No broker is asked while the client knows a leader for each; a leader that has gone shows when a
    request to it fails.
    """
    if _find_leaderless(client, partitions) is None:
        return
    async with answered("metadata", timeout_s):
        await client.force_metadata_update()
    partition = _find_leaderless(client, partitions)
    if partition is not None:
        raise NoLeader(partition)


def require_known_leaders(client: AIOKafkaClient, partitions: Collection[TopicPartition]) -> None:
    """Raise `LogUnavailable` if, according to the client's metadata, a partition has no leader."""
    partition = _find_leaderless(client, partitions)
    if partition is not None:
        raise LogUnavailable(f"{partition}: it has no leader any more")


def _find_leaderless(
    client: AIOKafkaClient, partitions: Collection[TopicPartition]
) -> TopicPartition | None:
    leader = client.cluster.leader_for_partition
    return next((each for each in partitions if leader(each) == _NO_LEADER), None)


def _unless_forbidden(topic: str, count: int | None) -> int | None:
    if count == _FORBIDDEN:
        raise TopicForbidden(topic)
    return count
