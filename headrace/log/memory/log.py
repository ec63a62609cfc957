"""The embedded log itself: factory of its members, readers and producers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from headrace.log.memory.broker import Topics
from headrace.log.memory.consumer import MemoryMember, MemoryReader
from headrace.log.memory.faults import Faults
from headrace.log.memory.group import Group
from headrace.log.memory.producer import MemoryProducer, MemoryTransactionalProducer
from headrace.log.memory.transactions import Transactions
from headrace.log.port import (
    Committed,
    Fetched,
    GroupMember,
    RebalanceListener,
    Record,
    TopicInfo,
    TopicPartition,
    Wanted,
)
from headrace.tuning import TUNING, MemoryTuning


def wall_clock_ms() -> int:
    """Return the time of day in epoch milliseconds."""
    return time.time_ns() // 1_000_000


class MemoryLog:
    """A log in this process's memory, shared by all users of this object.

    Args:
        auto_create_partitions: create unknown topics on first use, with this many partitions; None
            refuses them.
        retention_bytes: the most that a partition holds; beyond it the oldest records are dropped.
        rebalance_timeout_s: how long `on_revoked` may take before its member is evicted.
        request_timeout_s: how long requests hang when a fault makes them.
        now_ms: the clock for records without a timestamp, in epoch milliseconds.
        tuning: times and sizes of its consumers and producers.

    Attributes:
        faults: fault injection for tests.
    """

    def __init__(
        self,
        *,
        auto_create_partitions: int | None = None,
        retention_bytes: int = 64 * 1024 * 1024,
        rebalance_timeout_s: float = 30.0,
        request_timeout_s: float = 5.0,
        now_ms: Callable[[], int] = wall_clock_ms,
        tuning: MemoryTuning = TUNING.memory,
    ) -> None:
        self._topics = Topics(retention_bytes, auto_create_partitions, self._rebalance_for)
        self._groups: dict[str, Group] = {}
        self._rebalance_timeout_s = rebalance_timeout_s
        self._now_ms = now_ms
        self._tuning = tuning
        self._transactions = Transactions(self._group)
        self.faults = Faults(self._topics, self._groups, self._transactions, request_timeout_s)

    def member(
        self, group: str, topics: Sequence[str], listener: RebalanceListener, *, kind: str = ""
    ) -> MemoryMember:
        return MemoryMember(
            self._topics,
            self.faults,
            self._group(group),
            (topics, kind),
            listener,
            self._tuning,
        )

    def reader(self, partitions: Sequence[TopicPartition]) -> MemoryReader:
        return MemoryReader(self._topics, self.faults, partitions)

    def producer(self) -> MemoryProducer:
        return MemoryProducer(self._topics, self.faults, self._now_ms, self._tuning)

    def transactional_producer(
        self, transactional_id: str, group: str
    ) -> MemoryTransactionalProducer:
        return MemoryTransactionalProducer(
            self._topics,
            self.faults,
            self._transactions,
            (transactional_id, group),
            self._now_ms,
            self._tuning,
        )

    async def describe_topics(self, topics: Sequence[str]) -> Mapping[str, TopicInfo | None]:
        await self.faults.brokers.answered()
        found = {name: self._topics.find(name) for name in topics}
        return {name: None if topic is None else topic.info for name, topic in found.items()}

    async def create_topics(
        self, topics: Sequence[TopicInfo], *, replication_factor: int
    ) -> Mapping[str, bool]:
        """See the port. There is one copy of each record, whatever the factor."""
        if replication_factor < 1:
            raise ValueError(f"replication_factor: expected at least 1, got {replication_factor}")
        await self.faults.brokers.answered()
        return {info.name: self._topics.create(info) for info in topics}

    async def committed(
        self, group: str, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        await self.faults.brokers.answered()
        committed = self._groups[group].committed if group in self._groups else {}
        return {name: committed.get(name) for name in partitions}

    async def commit(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        await self.faults.groups.commit_answered()
        self._group(group).commit_without_members(offsets)

    async def members(self, group: str) -> Sequence[GroupMember]:
        """See the port. All members are in this process."""
        await self.faults.brokers.answered()
        return [GroupMember(each, "") for each in self.faults.groups.members(group)]

    async def remove_member(self, group: str, member_id: str) -> bool:
        await self.faults.brokers.answered()
        there = member_id in self._group(group).members
        self._group(group).evict(member_id, asyncio.get_running_loop().time())
        return there

    async def fetch(
        self,
        partition: TopicPartition,
        first: int,
        last: int,
        max_bytes: int,
        wanted: Wanted | None = None,
    ) -> Sequence[Record]:
        await self.faults.brokers.answered()
        stored = self._topics.partition(partition)
        first, fetched = max(first, stored.begin), Fetched(wanted)
        if first < stored.end:
            fetched.add(stored.read(first, max(0, last - first + 1))[0])
        return fetched.records

    async def written_ends(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        await self.faults.brokers.answered()
        return {name: self._topics.partition(name).end for name in partitions}

    async def close(self) -> None:
        """Do nothing: the records stay as long as this object does."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _group(self, name: str) -> Group:
        if name not in self._groups:
            self._groups[name] = Group(self._topics.count, self._rebalance_timeout_s)
        return self._groups[name]

    def _rebalance_for(self, topic: str) -> None:
        for group in self._groups.values():
            group.topic_created(topic, asyncio.get_running_loop().time())
