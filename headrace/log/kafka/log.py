"""The log on Kafka. Only the modules of this package import aiokafka.

aiokafka's version is pinned: the adapter relies on the behaviour, and in places on the internals,
of 0.14.0, where its public interface cannot keep the port's promises. Comments in those places say
why; `tests/contract` and `tests/broker` check that they work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from aiokafka.client import AIOKafkaClient

from headrace.config import KafkaSettings
from headrace.log.errors import LogUnavailable
from headrace.log.kafka import requests
from headrace.log.kafka.admin import KnownTopics
from headrace.log.kafka.closing import close_client
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.consumer import KafkaReader
from headrace.log.kafka.errors import answered
from headrace.log.kafka.member import KafkaMember
from headrace.log.kafka.producer import KafkaProducer
from headrace.log.kafka.record_batches import DEFAULT_DECOMPRESSED_BYTES
from headrace.log.kafka.transactions import KafkaTransactionalProducer
from headrace.log.port import (
    Committed,
    Consumer,
    GroupMember,
    Producer,
    RebalanceListener,
    TopicInfo,
    TopicPartition,
    TransactionalProducer,
)


class KafkaLog:
    """Consumers, producers and administration for the brokers in the settings.

    Connections are opened on demand. Entering reads the files that the settings name.

    Args:
        settings: how to reach the brokers.
        decompressed_bytes: the limit on the decompressed records of one batch; a larger batch is
            skipped, see `Gap`.

    Raises:
        ConfigurationError: (on entering, or on the first use) such a file cannot be read.
    """

    def __init__(
        self, settings: KafkaSettings, *, decompressed_bytes: int = DEFAULT_DECOMPRESSED_BYTES
    ) -> None:
        self._settings = settings
        self._decompressed_bytes = decompressed_bytes
        self._made: Connection | None = None
        self._client: AIOKafkaClient | None = None
        self._connecting = asyncio.Lock()
        self._topics = KnownTopics()  # shared by all transactional producers

    def __repr__(self) -> str:
        return f"KafkaLog({self._settings.bootstrap_servers!r})"

    @property
    def _connection(self) -> Connection:
        if self._made is None:
            self._made = self._connect()
        return self._made

    def _connect(self) -> Connection:
        return Connection(self._settings, self._decompressed_bytes)

    def member(
        self, group: str, topics: Sequence[str], listener: RebalanceListener, *, kind: str = ""
    ) -> Consumer:
        """See the port."""
        return KafkaMember(self._connection, group, topics, listener, kind)

    def reader(self, partitions: Sequence[TopicPartition]) -> Consumer:
        """See the port."""
        return KafkaReader(self._connection, partitions)

    def producer(self) -> Producer:
        """See the port."""
        return KafkaProducer(self._connection)

    def transactional_producer(self, transactional_id: str, group: str) -> TransactionalProducer:
        """See the port."""
        return KafkaTransactionalProducer(self._connection, self._topics, transactional_id, group)

    async def describe_topics(self, topics: Sequence[str]) -> Mapping[str, TopicInfo | None]:
        """See the port. Raises `LogAuthenticationFailed` if we may not describe a topic."""
        async with self._asking("describe topics") as client:
            found = await requests.outlines(client, topics)
            there = [name for name, topic in found.items() if topic is not None]
            configs = await requests.topic_configs(client, there)
        return {
            name: None
            if topic is None
            else TopicInfo(name, topic.partitions, configs.get(name, {}), topic.topic_id)
            for name, topic in found.items()
        }

    async def create_topics(
        self, topics: Sequence[TopicInfo], *, replication_factor: int
    ) -> Mapping[str, bool]:
        """See the port. Raises `LogRefused` if a topic cannot be created with these settings."""
        if not topics:
            return {}
        async with self._asking("create topics") as client:
            made = await requests.create(
                client, topics, replication_factor, self._settings.request_timeout_ms
            )
            await requests.wait_until_known(client, [each.name for each in topics])
        return made

    async def committed(
        self, group: str, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        """See the port."""
        async with self._asking(f"committed offsets of group {group}") as client:
            return await requests.fetch_committed(client, group, partitions)

    async def commit(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """See the port."""
        async with self._asking(f"commit for group {group}") as client:
            await requests.commit_without_members(client, group, offsets)

    async def members(self, group: str) -> Sequence[GroupMember]:
        """See the port."""
        async with self._asking(f"members of group {group}") as client:
            return await requests.members(client, group)

    async def remove_member(self, group: str, member_id: str) -> bool:
        """See the port."""
        async with self._asking(f"member {member_id} of group {group}") as client:
            return await requests.remove_member(client, group, member_id)

    @asynccontextmanager
    async def _asking(self, what: str) -> AsyncIterator[AIOKafkaClient]:
        """Provide a connected client, and bound the body by the request deadline."""
        async with self._connecting:
            if self._client is None:
                self._client = await self._connection.open_client()
            client = self._client
        try:
            async with answered(what, self._connection.request_timeout_s):
                yield client
        except LogUnavailable:
            # All brokers may have new addresses, and only a new client goes back to the bootstrap
            # servers.
            if self._client is client:
                self._client = None
                await close_client(client)
            raise

    async def close(self) -> None:
        """Release the connections used for administration."""
        client, self._client = self._client, None
        if client is not None:
            await close_client(client)

    async def __aenter__(self) -> Self:
        self._made = self._connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
