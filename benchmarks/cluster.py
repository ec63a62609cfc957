"""The local broker of a measurement: creates topics, writes records in advance, counts answers, and
reports the broker's CPU time.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from aiokafka.admin import AIOKafkaAdminClient

from benchmarks.processes import cpu_s
from headrace.config import KafkaSettings
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import Consumer, NewRecord, TopicInfo, TopicPartition
from headrace.tools.local_kafka import LocalKafka
from headrace.tools.local_kafka.broker import free_port

PARTITIONS = 4
CHUNK = 500
IN_FLIGHT_CHUNKS = 32
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
POLL_S = 0.1
POLL_RECORDS = 10_000


class Cluster:
    """One local Kafka node, and a client for everything that is not measured.

    Args:
        properties: of the node; None for Kafka's defaults.
    """

    def __init__(self, properties: Mapping[str, str] | None = None) -> None:
        self._properties = properties
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._directory = Path(
                stack.enter_context(TemporaryDirectory(prefix="headrace-kafka-"))
            )
            self._kafka = LocalKafka(self._directory, properties=self._properties)
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
        """The broker's address."""
        return self._kafka.bootstrap_servers

    def cpu_s(self) -> float:
        """Return the broker's CPU time since its start."""
        pid = self._kafka.pid()
        assert pid is not None
        return cpu_s(pid)

    def written_bytes(self, topics: Iterable[str]) -> int:
        """Return the size of all records that were written to topics: of their log segments."""
        return sum(
            segment.stat().st_size
            for topic in topics
            for segment in self._directory.glob(f"*/*/{topic}-[0-9]*/*.log")
        )

    async def create(self, topics: Sequence[TopicInfo]) -> None:
        """Create topics."""
        await self.log.create_topics(topics, replication_factor=1)

    async def create_plain(self, name: str) -> None:
        """Create a topic with the usual number of partitions."""
        config = {"max.message.bytes": str(MAX_MESSAGE_BYTES)}
        await self.create([TopicInfo(name, PARTITIONS, config)])

    async def delete(self, topics: Sequence[str]) -> None:
        """Delete topics, which also frees their page cache."""
        await self._admin.delete_topics(list(topics))

    async def fill(self, topic: str, values: Sequence[bytes], count: int) -> None:
        """Write `count` records with the values in rotation, spread over the partitions."""
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
            for sent in waiting:
                await sent.acknowledged

    @asynccontextmanager
    async def counting(self, topic: str) -> AsyncIterator[Counter]:
        """Yield a counter of the topic's records."""
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        async with self.log.reader(partitions) as reader:
            reader.pause(partitions)  # at first only the ends are asked for
            yield Counter(reader, partitions)


def a_port() -> int:
    """Return a free port of this machine."""
    return free_port((), "127.0.0.1")


class Counter:
    """Counts the records of a topic.

    Args:
        reader: of its partitions, which are paused.
    """

    def __init__(self, reader: Consumer, partitions: Sequence[TopicPartition]) -> None:
        self._reader = reader
        self._partitions = partitions

    async def ends(self) -> Mapping[TopicPartition, int]:
        """Return the current end offset of each partition."""
        return await self._reader.end_offsets(self._partitions)

    async def now(self) -> int:
        """Return the sum of the end offsets. It includes the transaction markers, one per
        transaction.
        """
        return sum((await self.ends()).values())

    async def records(
        self, begin: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]
    ) -> int:
        """Read the records between two results of `ends`, and return their number."""
        reader, count = self._reader, 0
        left = [one for one in self._partitions if begin[one] < end[one]]
        for partition in left:
            reader.seek(partition, begin[partition])
        reader.resume(left)
        while left:
            for partition, records in (await reader.poll(POLL_S, POLL_RECORDS)).items():
                count += sum(record.offset < end[partition] for record in records)
            left = [one for one in left if await reader.position(one) < end[one]]
        reader.pause(self._partitions)
        return count
