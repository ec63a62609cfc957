"""Members of consumer groups.

Two of aiokafka's own states implement the port's rule that no record is returned before
`on_assigned` has returned: a rebalance in progress blocks reading, and a paused partition is not
fetched. aiokafka activates an assignment before it calls its listener, but none of its partitions
has a position by then; so the adapter pauses all of them first, lets the listener seek, and resumes
them when it has returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import aiokafka
from aiokafka import AIOKafkaConsumer
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

from headrace.log.errors import Fenced
from headrace.log.kafka.connection import RETRY_BACKOFF_S, Connection
from headrace.log.kafka.consumer import REBALANCE_TIMEOUT_MS, KafkaConsumer, theirs
from headrace.log.kafka.requests import fetch_committed, is_counted_in
from headrace.log.port import Committed, RebalanceListener, TopicPartition


class KafkaMember(KafkaConsumer):
    """A member of a consumer group that reports assignments to its listener."""

    def __init__(
        self,
        connection: Connection,
        group: str,
        topics: Sequence[str],
        listener: RebalanceListener,
        kind: str = "",
    ) -> None:
        super().__init__(connection)
        self._kind = kind
        self._group = group
        self._topics = tuple(topics)
        self._listener = listener

    def _group_options(self) -> dict[str, Any]:
        session_timeout_ms = self._connection.settings.session_timeout_ms
        return {
            "group_id": self._group,
            "session_timeout_ms": session_timeout_ms,
            "heartbeat_interval_ms": session_timeout_ms // 10,
            "rebalance_timeout_ms": REBALANCE_TIMEOUT_MS,
            "max_poll_interval_ms": 300_000,
            "partition_assignment_strategy": (_assignor(self._kind),),
        }

    async def _start(self, consumer: AIOKafkaConsumer) -> None:
        await super()._start(consumer)
        # Subscribe only now: a consumer that starts with topics waits for the whole rebalance.
        consumer.subscribe(self._topics, listener=_Adapter(self))

    async def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Called by aiokafka when the partitions are ours, before any of them has a position."""
        if self._closed:
            return
        consumer = self._consumer
        # Pause first: nothing may be read before the listener has returned.
        consumer.pause(*theirs(partitions))
        self._paused.clear()
        self._owned = frozenset(partitions)
        try:
            await self._listener.on_assigned(partitions)
        except Exception as error:  # noqa: BLE001  # aiokafka would log it; poll raises it instead
            self._failure = error
        else:
            # A newer rebalance cannot have started: aiokafka awaits this call.
            consumer.resume(*theirs(set(partitions) - self._paused))
        self._open.set()

    async def revoked(self) -> None:
        """Called by aiokafka before it rejoins; all our partitions are revoked."""
        # Close the gate before the listener runs: polls return none of these partitions any more.
        self._open.clear()
        try:
            if self._owned and not self._closed:
                await self._listener.on_revoked(sorted(self._owned))
        except Exception as error:  # noqa: BLE001  # aiokafka would log it; poll raises it instead
            self._failure = error
        finally:
            self._owned = frozenset()

    async def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Commit in the current generation, within the deadline.

        Partitions of topics that the member does not subscribe to can be committed as well: the
        broker checks only the membership.
        """
        if not offsets:
            return
        coordinator = self._consumer._coordinator
        generation = coordinator.generation
        wanted = {
            aiokafka.TopicPartition(*each): OffsetAndMetadata(*at) for each, at in offsets.items()
        }
        what = f"commit for group {self._group}"
        lost = sorted(each for each in offsets if self._is_lost(each))
        if lost:
            raise Fenced(f"{what}: not assigned: {', '.join(map(str, lost))}")
        async with self._asking(what):
            while True:
                await coordinator.ensure_coordinator_known()
                # After it lost its membership, aiokafka commits as if it were in no group, which a
                # broker accepts once the group is empty.
                if generation < 0 or coordinator.generation != generation:
                    raise Fenced(f"{what}: no longer a member of this generation")
                try:
                    await coordinator._do_commit_offsets(None, wanted)
                except KafkaError as error:
                    if not error.retriable:
                        raise
                else:
                    return
                await asyncio.sleep(RETRY_BACKOFF_S)

    def _is_lost(self, partition: TopicPartition) -> bool:
        return partition.topic in self._topics and partition not in self._owned

    @property
    def member_id(self) -> str:
        """See the port."""
        return str(self._consumer._coordinator.member_id)

    async def is_member(self) -> bool:
        """See the port. Returns False without a request if aiokafka already knows that we are no
        member.
        """
        consumer = self._consumer
        coordinator = consumer._coordinator
        generation, member_id = coordinator.generation, coordinator.member_id
        if generation < 0:
            return False
        async with self._asking(f"membership in group {self._group}"):
            counted_in = await is_counted_in(consumer._client, self._group, generation, member_id)
        return counted_in and coordinator.generation == generation

    async def committed(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        """See the port."""
        async with self._asking(f"committed offsets of group {self._group}"):
            return await fetch_committed(self._consumer._client, self._group, partitions)


def _assignor(kind: str) -> Any:
    """Return the assignor for a kind of member; a kind of its own keeps it apart from other kinds.

    A coordinator refuses a member that supports none of the protocols common to the others. Every
    rebalance revokes everything, so a sticky assignment would save nothing.
    """
    if not kind:
        return RoundRobinPartitionAssignor

    class Assignor(RoundRobinPartitionAssignor):  # type: ignore[misc]  # aiokafka publishes no types
        name = kind

    return Assignor


class _Adapter(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka publishes no types
    def __init__(self, member: KafkaMember) -> None:
        self._member = member

    async def on_partitions_assigned(self, assigned: Iterable[aiokafka.TopicPartition]) -> None:
        await self._member.assigned(sorted(TopicPartition(*each) for each in assigned))

    async def on_partitions_revoked(self, revoked: Iterable[aiokafka.TopicPartition]) -> None:
        await self._member.revoked()
