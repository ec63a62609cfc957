"""Owners of one source partition, who seal its answers; no responder, and no member of a group."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import InFlightTracker
from headrace.delivery.offset_store import OffsetStore, PendingAnswer, requests_of
from headrace.delivery.transactions import PartitionTransactions, TransactionAborted
from headrace.log.memory import MemoryLog
from headrace.log.port import Committed, Consumer, NewRecord, TopicInfo, TopicPartition
from headrace.protocol.messages import Envelope, Request
from headrace.telemetry.metrics import Metrics
from tests.support.tuning import QUICK
from tests.support.visible import visible

SOURCE = TopicPartition("requests", 0)
ANSWERS = TopicPartition("answers", 0)
AT_ONCE = replace(QUICK.delivery, retry_first_s=0.0, retry_max_s=0.0)


async def log_with_topics() -> MemoryLog:
    """An embedded log with the source and the topic of answers, of one partition each."""
    log = MemoryLog()
    topics = [TopicInfo(each.topic, 1, {}) for each in (SOURCE, ANSWERS)]
    await log.create_topics(topics, replication_factor=1)
    return log


class Member:
    """A stand-in for the consumer of a seat: the calls that a seat makes to it.

    Attributes:
        counted_in: what the group says when it is asked.
        asked: how often it was.
        answers: it does, as soon as this is set.
    """

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self.counted_in = True
        self.asked = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def is_member(self) -> bool:
        self.asked += 1
        await self.answers.wait()
        await self._log.faults.brokers.answered()
        return self.counted_in

    async def committed(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        return await self._log.committed("group", partitions)


class Owner:
    """One owner of the source partition, from its assignment on.

    Attributes:
        requests: what it has read and has not answered, by offset.
        losses: how often it was told that all is revoked.
    """

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._tracker = InFlightTracker(Budget(1_000_000), lambda: None)
        self._offset_store = OffsetStore(self._tracker, None, SOURCE.topic, SOURCE.topic)
        metrics = Metrics(CollectorRegistry())
        self.transactions = PartitionTransactions(
            log, self._offset_store, "group", metrics, self._lose, AT_ONCE
        )
        self.source = SOURCE
        self.losses = 0
        self.member = Member(log)
        self.requests: dict[int, Request] = {}

    async def assign(self, offsets: int) -> None:
        """Fence, read what is committed, and admit what is not answered."""
        await self.fence()
        committed = (await self._log.committed("group", [SOURCE]))[SOURCE]
        progress = AckedOffsets(0) if committed is None else AckedOffsets.from_committed(committed)
        assignment = self._tracker.assign(SOURCE, progress)
        for offset in range(progress.base, offsets):
            if offset in progress:
                assignment.skip_answered(offset)
                continue
            ack_handle = assignment.admit(offset, 1)
            origin = (0, offset, ack_handle.previous, 0)
            self.requests[offset] = Request(ack_handle, *origin, None, None, [], Envelope())

    async def fence(self) -> None:
        """The first part of an assignment."""
        await self.transactions.fence(cast(Consumer, self.member), [0])

    def revoke(self) -> None:
        """All that was read is revoked."""
        self._tracker.revoke(SOURCE)

    def renew(self) -> None:
        """Mark the committed offsets as due to be committed again."""
        self._tracker.forget_committed()

    def _lose(self) -> None:
        self.losses += 1
        self._tracker.revoke(SOURCE)

    async def commit_transaction(self, offsets: list[int]) -> None:
        """Answer these, as far as they are not answered, until that is done."""
        pending = [(self.requests.pop(each), ANSWERS) for each in offsets if each in self.requests]
        while pending:
            try:
                await self.transactions.commit_transaction(0, pending, compose)
            except TransactionAborted:
                continue
            return


def compose(pending: Sequence[PendingAnswer]) -> dict[TopicPartition, list[NewRecord]]:
    """One record for each, which says whose answer it is."""
    return {
        ANSWERS: [
            NewRecord(None, None, [("x-request", f"requests/0/{request.offset}".encode())])
            for request in requests_of(pending)
        ]
    }


async def answers(log: MemoryLog) -> Counter[int]:
    """How often each offset has a visible answer."""
    found = Counter[int]()
    for record in await visible(log, ANSWERS.topic):
        found[int((dict(record.headers)["x-request"] or b"").rsplit(b"/", 1)[1])] += 1
    return found


def pending_of(owner: Owner, *offsets: int) -> list[PendingAnswer]:
    """Requests of an owner, as they go to be sealed."""
    return [(owner.requests[offset], ANSWERS) for offset in offsets]
