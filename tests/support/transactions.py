"""Members of a group that own source partitions, and commit their answers; without a responder."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import cast

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import InFlightTracker
from headrace.delivery.offset_store import OffsetStore, PendingAnswer, requests_of
from headrace.delivery.transactions import PartitionTransactions, TransactionAborted
from headrace.log.errors import LogUnavailable
from headrace.log.memory import MemoryLog
from headrace.log.memory.faults import TransactionFault
from headrace.log.port import (
    Committed,
    Consumer,
    Membership,
    NewRecord,
    TopicInfo,
    TopicPartition,
)
from headrace.protocol.messages import Envelope, Request
from headrace.telemetry.metrics import Metrics
from headrace.tuning import DeliveryTuning
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.logs import RecordingListener
from tests.support.tuning import QUICK
from tests.support.visible import visible

SOURCE = TopicPartition("requests", 0)
ANSWERS = TopicPartition("answers", 0)
AT_ONCE = replace(
    QUICK.delivery,
    retry_first_s=0.0,
    retry_max_s=0.0,
    max_shared_wait_s=DEADLINE_S,
    unshared_after_timeout_s=DEADLINE_S,
    unshared_after_failure_s=DEADLINE_S,
    unshared_after_delay_s=DEADLINE_S,
    unshared_after_refusal_s=DEADLINE_S,
)


async def log_with_topics(partitions: int = 1) -> MemoryLog:
    """An embedded log with the source, of so many partitions, and the topic of answers, of one."""
    log = MemoryLog()
    topics = [TopicInfo(SOURCE.topic, partitions, {}), TopicInfo(ANSWERS.topic, 1, {})]
    await log.create_topics(topics, replication_factor=1)
    return log


async def leave_transaction_open(
    log: MemoryLog, partition: TopicPartition, transactional_id: str
) -> None:
    """Write one record in a transaction that stays open, until a successor or the log ends it."""
    log.faults.transactions.fail(TransactionFault.UNKNOWN_AND_OPEN)
    async with log.transactional_producer(transactional_id, transactional_id) as producer:
        with suppress(LogUnavailable):
            await producer.commit_transaction({partition: [NewRecord(None, b"undecided")]}, {})


class Member:
    """The consumer of an owner: a member of the group, which is asked whether it still is one.

    Attributes:
        counted_in: what the group says when it is asked.
        asked: how often it was.
        is_reading: whether it waits for committed offsets.
        answers: it does, as soon as this is set.
    """

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._consumer: Consumer | None = None
        self.counted_in = True
        self.asked = 0
        self.is_reading = False
        self.answers = asyncio.Event()
        self.answers.set()

    async def join(self) -> None:
        """Become the only member; the former one has lost its session without knowing it."""
        listener = RecordingListener()
        self._consumer = self._log.member("group", [SOURCE.topic], listener)
        for member_id in self._log.faults.groups.members("group"):
            self._log.faults.groups.expire_session("group", member_id, noticed=False)
        await self._consumer.__aenter__()
        await eventually(lambda: listener.held)

    @property
    def membership(self) -> Membership | None:
        return None if self._consumer is None else self._consumer.membership

    async def is_member(self) -> bool:
        self.asked += 1
        await self.answers.wait()
        await self._log.faults.brokers.answered()
        return self.counted_in

    async def committed(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        assert self._consumer is not None
        self.is_reading = True
        try:
            return await self._consumer.committed(partitions)
        finally:
            self.is_reading = False


class Owner:
    """One owner of source partitions, from their assignment on.

    Args:
        log: the log.
        numbers: those of the partitions.
        tuning: by default without pauses, and patient with transactions that tests hold.

    Attributes:
        requests: what it has read and has not answered, by partition and offset.
        registry: its metrics.
        aborted: how often a transaction of one of its partitions was aborted.
        losses: how often it was told that all is revoked.
    """

    def __init__(
        self, log: MemoryLog, numbers: Sequence[int] = (0,), tuning: DeliveryTuning = AT_ONCE
    ) -> None:
        self._log = log
        self._numbers = numbers
        self._tracker = InFlightTracker(Budget(1_000_000), lambda: None)
        self._offset_store = OffsetStore(self._tracker, None, SOURCE.topic, SOURCE.topic)
        self.registry = CollectorRegistry()
        metrics = Metrics(self.registry)
        self.transactions = PartitionTransactions(
            log, self._offset_store, "group", metrics, self._lose, tuning
        )
        self.source = SOURCE
        self.losses = 0
        self.aborted = 0
        self.member = Member(log)
        self.requests: dict[tuple[int, int], Request] = {}

    async def assign(self, offsets: int) -> None:
        """Join, fence, read what is committed, and admit what is not answered."""
        if self.member.membership is None:
            await self.member.join()
        await self.fence()
        self.requests.clear()
        for source in self._sources:
            committed = (await self.member.committed([source]))[source]
            self._admit(source, offsets, committed)

    def _admit(self, source: TopicPartition, offsets: int, committed: Committed | None) -> None:
        progress = AckedOffsets(0) if committed is None else AckedOffsets.from_committed(committed)
        assignment = self._tracker.assign(source, progress)
        for offset in range(progress.base, offsets):
            if offset in progress:
                assignment.skip_answered(offset)
                continue
            ack_handle = assignment.admit(offset, 1)
            origin = (source.partition, offset, ack_handle.previous, 0)
            request = Request(ack_handle, *origin, None, None, [], Envelope())
            self.requests[source.partition, offset] = request

    async def fence(self, numbers: Sequence[int] | None = None) -> None:
        """The first part of an assignment, of all its partitions or of these."""
        fenced = self._numbers if numbers is None else numbers
        await self.transactions.fence(cast(Consumer, self.member), fenced)

    @property
    def _sources(self) -> list[TopicPartition]:
        return [TopicPartition(SOURCE.topic, number) for number in self._numbers]

    def revoke(self) -> None:
        """All that was read is revoked."""
        for source in self._sources:
            self._tracker.revoke(source)

    def renew(self) -> None:
        """Mark the committed offsets as due to be committed again."""
        self._tracker.forget_committed()

    def _lose(self) -> None:
        self.losses += 1
        self.revoke()

    async def commit_transaction(self, offsets: Iterable[int], number: int = 0) -> None:
        """Answer these, as far as they are not answered, until that is done."""
        wanted = [(number, offset) for offset in offsets]
        pending = [(self.requests.pop(each), ANSWERS) for each in wanted if each in self.requests]
        while pending:
            try:
                await self.transactions.commit_transaction(number, pending, compose)
            except TransactionAborted:
                self.aborted += 1
                continue
            return


def compose(pending: Sequence[PendingAnswer]) -> dict[TopicPartition, list[NewRecord]]:
    """One record for each, which says whose answer it is."""
    return {
        ANSWERS: [
            NewRecord(None, None, [("x-request", f"{request.partition}/{request.offset}".encode())])
            for request in requests_of(pending)
        ]
    }


async def answers(log: MemoryLog, number: int = 0) -> Counter[int]:
    """How often each offset of a source partition has a visible answer."""
    found = Counter[int]()
    for record in await visible(log, ANSWERS.topic):
        partition, offset = (dict(record.headers)["x-request"] or b"").split(b"/")
        if int(partition) == number:
            found[int(offset)] += 1
    return found


def pending_of(owner: Owner, *offsets: int, number: int = 0) -> list[PendingAnswer]:
    """Requests of an owner, as they go to be committed."""
    return [(owner.requests[number, offset], ANSWERS) for offset in offsets]
