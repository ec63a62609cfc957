"""Short ways to write to a log, to read from it and to watch a member of a group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace

from headrace.log.port import Consumer, Log, NewRecord, Producer, Record, TopicPartition
from headrace.tuning import TUNING

POLL_S = 0.1
DEADLINE_S = 20.0
PATIENT = replace(TUNING.kafka, topic_timeout_s=DEADLINE_S)
"""For tests that are not about slow brokers: on a busy machine one may take seconds to answer."""

OnPartitions = Callable[[Sequence[TopicPartition]], Awaitable[None]]


async def nothing(partitions: Sequence[TopicPartition]) -> None:
    """A listener's call that does nothing."""


class RecordingListener:
    """A rebalance listener that keeps what it was told, after `assigned` or `revoked` ran.

    Attributes:
        held: the partitions whose `on_assigned` has returned and that were not revoked since.
        inside: whether a call is under way.
        assignments: how many times `on_assigned` has returned.
        revocations: how many times `on_revoked` was called with partitions.
    """

    def __init__(self, assigned: OnPartitions = nothing, revoked: OnPartitions = nothing) -> None:
        self._assigned = assigned
        self._revoked = revoked
        self.held: frozenset[TopicPartition] = frozenset()
        self.inside = False
        self.assignments = 0
        self.revocations = 0

    async def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.inside = True
        await self._assigned(partitions)
        self.held = frozenset(partitions)
        self.assignments += 1
        self.inside = False

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        self.inside = True
        self.held = frozenset()
        self.revocations += bool(partitions)
        await self._revoked(partitions)
        self.inside = False


async def write(producer: Producer, partition: TopicPartition, *records: NewRecord | bytes) -> None:
    """Send records, or values, and await their acknowledgements."""
    news = [r if isinstance(r, NewRecord) else NewRecord(None, r) for r in records]
    for sent in await producer.send(partition, news):
        await sent.acknowledged


async def write_to(log: Log, partition: TopicPartition, *records: NewRecord | bytes) -> None:
    """`write`, with a producer of its own."""
    async with log.producer() as producer:
        await write(producer, partition, *records)


async def read(consumer: Consumer, count: int, *, max_records: int = 500) -> list[Record]:
    """Poll until `count` records have come, and return all that came."""
    found: list[Record] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(found) < count:
            for records in (await consumer.poll(POLL_S, max_records)).values():
                found.extend(records)
    return found


def values(records: Sequence[Record]) -> list[bytes | None]:
    """The values of records."""
    return [record.value for record in records]


@asynccontextmanager
async def polling(consumer: Consumer, seen: list[Record]) -> AsyncIterator[None]:
    """Poll in a task beside, adding to `seen`, until the block is left."""
    stopping = False

    async def poll() -> None:
        while not stopping:
            for records in (await consumer.poll(POLL_S, 100)).values():
                seen.extend(records)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(poll(), name="polling")
        try:
            yield
        finally:
            stopping = True
