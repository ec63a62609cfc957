"""A member of a consumer group of the embedded log."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Self

from headrace.log.errors import Fenced
from headrace.log.memory.faults import Faults
from headrace.log.memory.group import Group
from headrace.log.memory.reader import MemoryReader
from headrace.log.memory.topics import Topics
from headrace.log.port import Committed, RebalanceListener, TopicPartition

_CLOSE_TIMEOUT_S = 3.0  # for a listener's call in progress when the member closes


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
    """

    def __init__(
        self,
        topics: Topics,
        faults: Faults,
        group: Group,
        subscription: tuple[Sequence[str], str],
        listener: RebalanceListener,
    ) -> None:
        super().__init__(topics, faults, ())
        self._group = group
        topics_read, self._kind = subscription
        self._subscription = tuple(topics_read)
        self._listener = listener
        self._member_id: str | None = None
        self._generation = -1
        self._group_news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        await self._faults.commit_answered()
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
        await self._faults.answered()
        return {name: self._group.committed.get(name) for name in partitions}

    @property
    def member_id(self) -> str:
        return self._member_id or ""

    async def is_member(self) -> bool:
        await self._faults.answered()
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
                await asyncio.wait((following,), timeout=_CLOSE_TIMEOUT_S)
        finally:  # even if cancelled here, leave the group
            if self._member_id is not None:
                self._group.leave(self._member_id, _now())
                self._member_id = None
            await super().close()

    async def __aenter__(self) -> Self:
        await self._faults.answered()
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
            await self._faults.until_up()
            share = await self._join()
            if share is None:
                continue  # evicted, or the next rebalance has begun already
            await self._assign(share)
            await self._until_rejoin()
            await self._faults.until_up()
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
        if self._reading:
            await self._listener.on_revoked(sorted(self._reading))
        self._give_up()

    def _raise_what_ended_it(self) -> None:
        super()._raise_what_ended_it()
        if self._following is not None and self._following.done():
            self._following.result()


def _now() -> float:
    return asyncio.get_running_loop().time()
