"""The broker under load: topics, records in advance, how many answers there are, its own cost."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

from aiokafka.admin import AIOKafkaAdminClient

from benchmarks.processes import cpu_s
from headrace.config import KafkaSettings
from headrace.local_kafka import LocalKafka
from headrace.local_kafka.ports import free_port
from headrace.log.kafka import KafkaLog
from headrace.log.port import NewRecord, TopicInfo, TopicPartition

PARTITIONS = 4
CHUNK = 500
IN_FLIGHT_CHUNKS = 32
MAX_MESSAGE_BYTES = 16 * 1024 * 1024


class Cluster:
    """One local node, and a client of it for everything that is not measured."""

    def __init__(self) -> None:
        self._kafka = LocalKafka()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._kafka)
            settings = KafkaSettings(bootstrap_servers=self.bootstrap_servers)
            self.log = await stack.enter_async_context(KafkaLog(settings))
            self._admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap_servers)
            await self._admin.start()
            stack.push_async_callback(self._admin.close)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    @property
    def bootstrap_servers(self) -> str:
        """Where it listens."""
        return self._kafka.bootstrap_servers

    def cpu_s(self) -> float:
        """The processor time of the broker until now."""
        pid = self._kafka.pid()
        assert pid is not None
        return cpu_s(pid)

    async def create(self, topics: Sequence[TopicInfo]) -> None:
        """Create topics."""
        await self.log.create_topics(topics, replication_factor=1)

    async def create_plain(self, name: str) -> None:
        """Create a topic of the usual number of partitions."""
        config = {"max.message.bytes": str(MAX_MESSAGE_BYTES)}
        await self.create([TopicInfo(name, PARTITIONS, config)])

    async def delete(self, topics: Sequence[str]) -> None:
        """Delete topics, so that their pages leave the cache."""
        await self._admin.delete_topics(list(topics))

    async def fill(self, topic: str, values: Sequence[bytes], count: int) -> None:
        """Write so many records, spread over the partitions; the values take turns."""
        turns = itertools.cycle(values)
        async with self.log.producer() as producer:
            waiting = []
            chunk = max(1, min(CHUNK, 4 * 1024 * 1024 // len(values[0])))
            for number, start in enumerate(range(0, count, chunk)):
                size = min(chunk, count - start)
                records = [NewRecord(None, value) for value in itertools.islice(turns, size)]
                target = TopicPartition(topic, number % PARTITIONS)
                waiting += await producer.send(target, records)
                if len(waiting) > IN_FLIGHT_CHUNKS:
                    await waiting.pop(0).acknowledged
            for run in waiting:
                await run.acknowledged

    @asynccontextmanager
    async def counting(self, topic: str) -> AsyncIterator[Counter]:
        """Something that tells how many records a topic has got."""
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        async with self.log.reader(partitions) as reader:
            reader.pause(partitions)  # only the ends are asked for
            yield Counter(lambda: reader.end_offsets(partitions))


def a_port() -> int:
    """A port of this machine on which nothing listens now."""
    return free_port((), "127.0.0.1")


class Counter:
    """How many records a topic has got."""

    def __init__(self, ends: Callable[[], Awaitable[Mapping[TopicPartition, int]]]) -> None:
        self._ends = ends

    async def now(self) -> int:
        """Up to this moment."""
        return sum((await self._ends()).values())
