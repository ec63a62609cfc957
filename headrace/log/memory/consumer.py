"""Consumers of the embedded log: readers of given partitions, and members of groups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from headrace.log.errors import Fenced, LogRefused, LogUnavailable, OffsetOutOfRange
from headrace.log.memory.broker import Partition, Topics
from headrace.log.memory.faults import Faults
from headrace.log.memory.group import Group
from headrace.log.port import (
    MAX_POLL_BYTES,
    Committed,
    Gap,
    Membership,
    RebalanceListener,
    Record,
    TopicPartition,
)
from headrace.tuning import TUNING, MemoryTuning


class MemoryReader:
    """A reader of given partitions, in no group; it starts at their ends.

    Args:
        topics: the log's topics.
        faults: the injected faults.
        partitions: the partitions to read.
    """

    def __init__(
        self, topics: Topics, faults: Faults, partitions: Sequence[TopicPartition]
    ) -> None:
        self._topics = topics
        self._faults = faults
        self._requested = tuple(partitions)
        self._reading: dict[TopicPartition, Partition] = {}
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._turns: list[TopicPartition] = []
        self._gaps: list[Gap] = []
        self._gate_is_open = False
        self._is_closed = False
        self._news = asyncio.Event()

    async def poll(
        self, timeout_s: float, max_records: int, max_bytes: int = MAX_POLL_BYTES
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """See the port. Partitions are read in turn, so that a busy one does not starve the
        others.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await asyncio.sleep(0)  # a poll that always finds records must not block the loop
        while True:
            self._raise_what_ended_it()
            self._news.clear()
            found = self._take(max_records, max_bytes)
            if found or self._gaps or loop.time() >= deadline:
                return found
            timer = loop.call_at(deadline, self._news.set)
            try:
                await self._news.wait()
            finally:
                timer.cancel()

    def gaps(self) -> Sequence[Gap]:
        return self._gaps

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._reading)

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._require(partitions)
        self._paused.update(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._require(partitions)
        self._paused.difference_update(partitions)
        self._news.set()

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._require((partition,))
        self._positions[partition] = offset
        self._news.set()

    async def position(self, partition: TopicPartition) -> int:
        self._require((partition,))
        return self._positions[partition]

    async def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        raise LogRefused(f"a reader is in no group: it cannot commit {dict(offsets)}")

    async def committed(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        return dict.fromkeys(partitions)

    async def beginning_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        await self._faults.brokers.answered()
        return {name: self._topics.partition(name).begin for name in partitions}

    async def end_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        await self._faults.brokers.answered()
        return {name: self._topics.partition(name).stable_end for name in partitions}

    async def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, int | None]:
        await self._faults.brokers.answered()
        return {
            name: self._topics.partition(name).offset_at(timestamp_ms)
            for name, timestamp_ms in timestamps_ms.items()
        }

    def last_contact_s(self) -> float:
        """Return 0.0, or the seconds since a fault made the log unavailable."""
        return self._faults.brokers.down_for_s()

    @property
    def member_id(self) -> str:
        return ""

    @property
    def membership(self) -> Membership | None:
        return None

    async def is_member(self) -> bool:
        return False

    async def close(self) -> None:
        """Release the partitions; a pending poll ends, and later ones raise."""
        self._is_closed = True
        self._give_up()
        self._faults.brokers.unwatch(self._news.set)
        self._news.set()

    async def __aenter__(self) -> Self:
        await self._faults.brokers.answered()
        self._faults.brokers.watch(self._news.set)
        self._take_up({name: self._topics.partition(name).stable_end for name in self._requested})
        self._gate_is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _take_up(self, positions: Mapping[TopicPartition, int]) -> None:
        """Start reading these partitions from these positions, once the gate is open."""
        self._reading = {name: self._topics.partition(name) for name in positions}
        self._positions = dict(positions)
        self._turns = sorted(positions)
        for partition in self._reading.values():
            partition.watch(self._news.set)

    def _give_up(self) -> None:
        """Stop reading, and forget positions and pauses."""
        for partition in self._reading.values():
            partition.unwatch(self._news.set)
        self._gate_is_open = False
        self._reading, self._positions, self._turns = {}, {}, []
        self._paused.clear()

    def _take(self, max_records: int, max_bytes: int) -> dict[TopicPartition, Sequence[Record]]:
        found: dict[TopicPartition, Sequence[Record]] = {}
        self._gaps = []
        if not self._gate_is_open or self._faults.brokers.is_down:
            return found
        reading, positions, paused = self._reading, self._positions, self._paused
        turns = [
            name
            for name in self._turns
            if positions[name] != reading[name].end and name not in paused
        ]
        if not turns:
            return found
        self._require_positions_in_range(turns)  # before any position moves
        for name in turns:
            partition, position = reading[name], positions[name]
            stable_end = partition.stable_end
            if position >= stable_end:
                continue
            records, size_bytes = partition.read(position, max_records, max_bytes)
            if records:
                found[name] = records
                self._positions[name] = records[-1].offset + 1
                max_records -= len(records)
                max_bytes -= size_bytes
            else:
                self._positions[name] = stable_end  # the rest is a gap
            self._gaps += partition.gaps_between(position, self._positions[name])
            if not max_records or max_bytes <= 0:
                break
        if found:
            self._turns = [name for name in self._turns if name not in found] + list(found)
        return found

    def _require_positions_in_range(self, names: Iterable[TopicPartition]) -> None:
        outside = {
            name: self._positions[name]
            for name in names
            if not self._reading[name].begin <= self._positions[name] <= self._reading[name].end
        }
        if outside:
            where = "; ".join(
                f"{name}: expected an offset from {self._reading[name].begin} "
                f"to {self._reading[name].end}, stood at {position}"
                for name, position in outside.items()
            )
            raise OffsetOutOfRange(where, outside)

    def _require(self, partitions: Sequence[TopicPartition]) -> None:
        strangers = [name for name in partitions if name not in self._reading]
        if strangers:
            raise Fenced(f"not assigned: {', '.join(map(str, strangers))}")

    def _raise_what_ended_it(self) -> None:
        if self._is_closed:
            raise RuntimeError("the consumer is closed")
        self._faults.topics.require_readable(self._reading)


class MemoryMember(MemoryReader):
    """A member of a group; a task of its own follows the group and calls the listener.

    As with aiokafka, rebalances happen beside `poll`, and a member that does not poll takes part
    all the same. An error that the listener raises ends the membership, and `poll` raises it.

    Args:
        topics: the log's topics.
        faults: the injected faults.
        group: the group to join.
        subscription: the topics to read, and the kind of member.
        listener: called with assignments.
        tuning: how long closing waits for the listener.
    """

    def __init__(
        self,
        topics: Topics,
        faults: Faults,
        group: Group,
        subscription: tuple[Sequence[str], str],
        listener: RebalanceListener,
        tuning: MemoryTuning = TUNING.memory,
    ) -> None:
        super().__init__(topics, faults, ())
        self._group = group
        topics_read, self._kind = subscription
        self._subscription = tuple(topics_read)
        self._listener = listener
        self._tuning = tuning
        self._member_id: str | None = None
        self._generation = -1
        self._group_news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        await self._faults.groups.commit_answered()
        if self._member_id is None:
            raise Fenced("the consumer is in no group: it was not entered, or is closed")
        try:
            self._group.commit(self._member_id, self._generation, offsets, _now())
        except Fenced:
            self._group_news.set()  # this is how a member learns that its session was lost
            raise

    async def committed(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        await self._faults.brokers.answered()
        await self._offsets_are_stable(partitions)
        return {name: self._group.committed.get(name) for name in partitions}

    async def _offsets_are_stable(self, partitions: Sequence[TopicPartition]) -> None:
        changed = asyncio.Event()
        self._group.watch_stable(changed.set)
        try:
            async with asyncio.timeout(self._tuning.stable_offsets_timeout_s):
                while not self._group.is_stable(partitions):
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            raise LogUnavailable("an open transaction commits these offsets") from None
        finally:
            self._group.unwatch_stable(changed.set)

    @property
    def member_id(self) -> str:
        return self._member_id or ""

    @property
    def membership(self) -> Membership | None:
        if self._member_id is None or self._generation < 0:
            return None
        return Membership(self._generation, self._member_id)

    async def is_member(self) -> bool:
        await self._faults.brokers.answered()
        if self._member_id is None:
            return False
        is_member = self._group.counts_in(self._member_id, self._generation, _now())
        if not is_member:
            self._group_news.set()  # so it learns that its session was lost
        return is_member

    async def close(self) -> None:
        """Leave the group; `on_revoked` is not called: drain and commit before."""
        following, self._following = self._following, None
        self._gate_is_open = False
        try:
            if following is not None:
                following.cancel()
                await asyncio.wait((following,), timeout=self._tuning.listener_timeout_s)
        finally:  # even if cancelled here, leave the group
            if self._member_id is not None:
                self._group.leave(self._member_id, _now())
                self._member_id = None
            await super().close()

    async def __aenter__(self) -> Self:
        await self._faults.brokers.answered()
        for topic in self._subscription:
            self._topics.use(topic)
        await super().__aenter__()
        self._gate_is_open = False
        self._following = asyncio.create_task(
            self._follow_group(), name=f"log-member {','.join(self._subscription)}"
        )
        self._following.add_done_callback(lambda _: self._news.set())
        return self

    async def _follow_group(self) -> None:
        while True:
            await self._faults.brokers.until_up()
            share = await self._join()
            if share is None:
                continue  # evicted, or the next rebalance has begun already
            await self._assign(share)
            await self._until_rejoin()
            await self._faults.brokers.until_up()
            await self._revoke()

    async def _join(self) -> frozenset[TopicPartition] | None:
        group, notify = self._group, self._group_news.set
        subscription = (self._subscription, self._kind)
        member_id = group.join(self._member_id, subscription, notify, _now())
        self._member_id = member_id
        while group.is_joining(member_id):
            self._group_news.clear()
            try:
                async with asyncio.timeout_at(group.deadline):
                    await self._group_news.wait()
            except TimeoutError:
                group.expire(_now())
        if group.must_rejoin(member_id):
            return None
        self._generation = group.generation
        return group.share(member_id)

    async def _assign(self, share: frozenset[TopicPartition]) -> None:
        positions = {}
        for name in share:
            committed = self._group.committed.get(name)
            beginning = self._topics.partition(name).begin
            positions[name] = beginning if committed is None else committed.offset
        self._take_up(positions)
        await self._listener.on_assigned(sorted(share))
        self._gate_is_open = True
        self._news.set()

    async def _until_rejoin(self) -> None:
        while self._member_id is not None and not self._group.must_rejoin(self._member_id):
            self._group_news.clear()
            await self._group_news.wait()

    async def _revoke(self) -> None:
        self._gate_is_open = False
        if self._member_id is None or not self._group.counts_in(
            self._member_id, self._generation, _now()
        ):
            self._generation = -1
        if self._reading:
            await self._listener.on_revoked(sorted(self._reading))
        self._give_up()

    def _raise_what_ended_it(self) -> None:
        super()._raise_what_ended_it()
        if self._following is not None and self._following.done():
            self._following.result()


def _now() -> float:
    return asyncio.get_running_loop().time()
