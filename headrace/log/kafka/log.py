"""The log on Kafka. Only the modules of this package import aiokafka, and
`headrace.tools.local_kafka`, which waits for the brokers that it starts.

aiokafka's version is pinned: the adapter relies on the behaviour, and in places on the internals,
of 0.14.0, where its public interface cannot keep the port's promises. The internals are used in
`headrace.log.kafka._aiokafka` alone; `tests/contract` and `tests/broker` check that they work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Self

from aiokafka.client import AIOKafkaClient

from headrace.config import KafkaSettings
from headrace.log.errors import LogUnavailable
from headrace.log.kafka.admin import AdminClient
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.consumer import KafkaMember, KafkaReader
from headrace.log.kafka.direct_fetch import DirectFetch
from headrace.log.kafka.errors import answered
from headrace.log.kafka.producer import KafkaProducer
from headrace.log.kafka.record_batches import DEFAULT_DECOMPRESSED_BYTES
from headrace.log.kafka.topic_cache import TopicCache
from headrace.log.kafka.transactions import KafkaTransactionalProducer
from headrace.log.port import (
    Committed,
    Consumer,
    GroupMember,
    Producer,
    RebalanceListener,
    Record,
    TopicInfo,
    TopicPartition,
    TransactionalProducer,
    Wanted,
)
from headrace.tuning import TUNING, KafkaTuning


class KafkaLog:
    """Consumers, producers and administration for the brokers in the settings.

    Connections are opened on demand. Entering reads the files that the settings name.

    Args:
        settings: how to reach the brokers.
        decompressed_bytes: the limit on the decompressed records of one batch; a larger batch is
            skipped, see `Gap`.
        tuning: times and sizes of all its clients.
        on_request: called with the name of each request to a broker.

    Raises:
        ConfigurationError: (on entering, or on the first use) such a file cannot be read.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        decompressed_bytes: int = DEFAULT_DECOMPRESSED_BYTES,
        tuning: KafkaTuning = TUNING.kafka,
        on_request: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._on_request = on_request
        self._settings = settings
        self._decompressed_bytes = decompressed_bytes
        self._tuning = tuning
        self._opened: Connection | None = None
        self._client: AIOKafkaClient | None = None
        self._connecting = asyncio.Lock()
        self._topics = TopicCache(tuning)  # shared by all transactional producers, and `fetch`
        self._direct_fetch: DirectFetch | None = None

    def __repr__(self) -> str:
        return f"KafkaLog({self._settings.bootstrap_servers!r})"

    @property
    def _connection(self) -> Connection:
        if self._opened is None:
            self._opened = self._new_connection()
        return self._opened

    def _new_connection(self) -> Connection:
        return Connection(self._settings, self._decompressed_bytes, self._tuning, self._on_request)

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
        async with self._administer("describe topics") as admin:
            found = await admin.describe_topics(topics)
            there = [name for name, topic in found.items() if topic is not None]
            configs = await admin.topic_configs(there)
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
        async with self._administer("create topics") as admin:
            made = await admin.create_topics(
                topics, replication_factor, self._settings.request_timeout_ms
            )
            await admin.wait_until_known([each.name for each in topics])
        return made

    async def committed(
        self, group: str, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        """See the port."""
        async with self._administer(f"committed offsets of group {group}") as admin:
            return await admin.fetch_committed(group, partitions)

    async def commit(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """See the port."""
        async with self._administer(f"commit for group {group}") as admin:
            await admin.commit_without_members(group, offsets)

    async def members(self, group: str) -> Sequence[GroupMember]:
        """See the port."""
        async with self._administer(f"members of group {group}") as admin:
            return await admin.members(group)

    async def remove_member(self, group: str, member_id: str) -> bool:
        """See the port."""
        async with self._administer(f"member {member_id} of group {group}") as admin:
            return await admin.remove_member(group, member_id)

    async def fetch(
        self,
        partition: TopicPartition,
        first: int,
        last: int,
        max_bytes: int,
        wanted: Wanted | None = None,
    ) -> Sequence[Record]:
        """See the port."""
        return await self._fetching().fetch(partition, first, last, max_bytes, wanted)

    async def written_ends(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """See the port."""
        return {each: await self._fetching().written_end(each) for each in partitions}

    def _fetching(self) -> DirectFetch:
        if self._direct_fetch is None:
            self._direct_fetch = DirectFetch(self._connection, self._topics)
        return self._direct_fetch

    @asynccontextmanager
    async def _administer(self, what: str) -> AsyncIterator[AdminClient]:
        """Connect for administration, and bound the body by the request deadline."""
        async with self._connecting:
            if self._client is None:
                self._client = await self._connection.open_client()
            client = self._client
        try:
            async with answered(what, self._connection.request_timeout_s):
                yield AdminClient(client, self._tuning.request_retry_s)
        except LogUnavailable:
            # All brokers may have new addresses, and only a new client goes back to the bootstrap
            # servers.
            if self._client is client:
                self._client = None
                await self._connection.close_client(client)
            raise

    async def close(self) -> None:
        """See the port."""
        client, self._client = self._client, None
        if client is not None:
            await self._connection.close_client(client)
        if self._direct_fetch is not None:
            await self._direct_fetch.close()

    async def __aenter__(self) -> Self:
        self._opened = self._new_connection()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
