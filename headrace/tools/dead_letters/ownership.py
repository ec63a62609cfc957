"""Redrive lock: a consumer group member that must own all partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.errors import Retriable
from headrace.log.errors import LogUnavailable
from headrace.log.port import Consumer, TopicPartition
from headrace.tools.dead_letters.reading import POLL_TIMEOUT_S

JOIN_TIMEOUT_S = 120.0
"""Long enough for the session of a killed member to expire, which blocks the group until then."""


class RedriveUnderWay(Retriable):
    """Another run of the command is a member of the group."""


class SoleOwner:
    """Rebalance listener of the group's only member.

    Attributes:
        working: held while letters are sent and committed, so that a rebalance waits for them.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._assigned = False
        self._revoked = False
        self.working = asyncio.Lock()

    async def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """See the port."""
        self._assigned = True

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """See the port. The chunk being sent is committed in the old generation."""
        async with self.working:
            self._revoked = True

    async def own(self, member: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """Join the group and wait for all partitions.

        Raises:
            RedriveUnderWay: there is another member.
            LogUnavailable: the group did not form within two minutes.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + JOIN_TIMEOUT_S
        while not self._assigned:
            if loop.time() > deadline:
                raise LogUnavailable(f"group {self._group}: no assignment in {JOIN_TIMEOUT_S:g} s")
            await member.poll(POLL_TIMEOUT_S, 1)
        if member.assignment() != frozenset(partitions):
            raise self._under_way()

    def require(self) -> None:
        """Raise `RedriveUnderWay` if a rebalance has revoked the partitions."""
        if self._revoked:
            raise self._under_way()

    def _under_way(self) -> RedriveUnderWay:
        return RedriveUnderWay(
            f"group {self._group}: expected no other member, but another redrive has joined; what "
            "was sent is remembered: run it again when the other one has ended"
        )
