"""A process's source: reads its first topic, keeps the ledger, commits what is settled.

The path of a record here: `poll` → its partition's assignment is looked up → it waits in the
ready queue → the stage receives it, admits it and works on it → its receipt is settled → the
committer, in the background, commits the base and what is answered above it. Commits are never
awaited on the path of a record, and there is at most one under way.

On assignment: read what is committed, seek to its base, and only then let records in. On
revocation: let nothing more in, give what is in flight until the drain deadline, commit, and void
the rest. Reading pauses while the budget is exceeded; polling never does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import structlog

from headrace.errors import Retriable
from headrace.flow.answered import Progress
from headrace.flow.inflight import Assignment, Budget, Ledger
from headrace.log.port import Committed, Consumer, Fenced, Log, Record, TopicPartition
from headrace.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

POLL_TIMEOUT_S = 0.2
PAUSED_POLL_S = 0.01
MAX_POLL_RECORDS = 512
COMMIT_INTERVAL_S = 0.05
COMMIT_RETRY_S = 0.5


class Delivery(NamedTuple):
    """Records of one partition, in offset order, not yet admitted."""

    assignment: Assignment
    records: Sequence[Record]


class Companion(Protocol):
    """Another partition whose progress is kept with each one of ours (see `origins.py`)."""

    async def assigned(self, consumer: Consumer, partitions: Sequence[int]) -> None: ...
    def revoked(self, partitions: Sequence[int]) -> None: ...
    def committable(self) -> dict[TopicPartition, Committed]: ...
    def was_committed(self, offsets: Mapping[TopicPartition, Committed]) -> None: ...


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """What a source reads and how.

    Attributes:
        group: the consumer group of the membership.
        progress_group: whose committed offsets say where to start; ours, except for an ingest
            without its responder.
        commits: whether settled work is committed here.
    """

    topic: str
    group: str
    progress_group: str
    commits: bool
    budget_bytes: int
    drain_timeout_s: float


class Source:
    """The first inlet of a process. Enter it, `run` it in a task, and `receive` from it.

    Attributes:
        ledger: of what was read.
        assigned: set when the group has assigned partitions for the first time, be it none.
    """

    def __init__(
        self,
        log_: Log,
        settings: SourceSettings,
        metrics: Metrics,
        companion: Companion | None = None,
    ) -> None:
        self._log = log_
        self._settings = settings
        self._metrics = metrics
        self._companion = companion
        self.ledger = Ledger(Budget(settings.budget_bytes), self._on_settled)
        self._ready: deque[Delivery] = deque()
        self._ready_bytes = 0
        self._arrived = asyncio.Event()
        self._settled = asyncio.Event()
        self.assigned = asyncio.Event()
        self._stopping = False
        self._closing = False
        self._paused: frozenset[TopicPartition] = frozenset()
        self._stack = AsyncExitStack()
        self._consumer: Consumer

    async def __aenter__(self) -> Self:
        member = self._log.member(self._settings.group, [self._settings.topic], self)
        self._consumer = await self._stack.enter_async_context(member)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self) -> None:
        """Read and commit until `close_down`."""
        async with asyncio.TaskGroup() as tasks:
            committer = tasks.create_task(self._commit_forever(), name="source-committer")
            await self._read()
            committer.cancel()

    async def receive(self) -> Delivery | None:
        """The next records of some partition; None when reading has stopped and none are left."""
        while not self._ready:
            if self._stopping:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        delivery = self._ready.popleft()
        self._ready_bytes -= _size(delivery.records)
        return delivery

    def stop_reading(self) -> None:
        """Let nothing more in; stay in the group, so that what is in flight stays ours."""
        self._stopping = True
        self._drop_ready(None)
        self._arrived.set()

    async def close_down(self, deadline_s: float) -> None:
        """Wait for what is in flight, commit it, and end `run`. Call after `stop_reading`."""
        await self._drain(None, deadline_s)
        if self._settings.commits:
            await self._commit(self._committable())
        self._closing = True

    @property
    def is_assigned(self) -> bool:
        """Whether any partition is ours now."""
        return bool(self.ledger.assignments)

    def last_contact_s(self) -> float:
        """Seconds since the log was last heard of."""
        return self._consumer.last_contact_s()

    # --- reading ---------------------------------------------------------------------------

    async def _read(self) -> None:
        while not self._closing:
            if self._regulate():
                await self._wait_settled(PAUSED_POLL_S)
                polled = await self._consumer.poll(0, MAX_POLL_RECORDS)
            else:
                polled = await self._consumer.poll(POLL_TIMEOUT_S, MAX_POLL_RECORDS)
            for partition, records in polled.items():
                assignment = self.ledger.get(partition)
                if assignment is not None and not self._stopping:
                    self._ready.append(Delivery(assignment, records))
                    self._ready_bytes += _size(records)
            if self._ready:
                self._arrived.set()

    def _regulate(self) -> bool:
        """Pause or resume as the budget says; True while paused."""
        budget = self.ledger.budget
        # What was polled and not yet admitted is charged as well, but only here.
        budget.used_bytes += self._ready_bytes
        wanted = budget.exceeded or self._stopping
        budget.used_bytes -= self._ready_bytes
        assigned = self._consumer.assignment()
        if wanted:
            if fresh := assigned - self._paused:
                self._consumer.pause(sorted(fresh))
            self._paused = assigned
        elif self._paused:
            self._consumer.resume(sorted(self._paused & assigned))
            self._paused = frozenset()
        self._metrics.in_flight(budget.used_bytes, budget.limit_bytes, paused=wanted)
        return wanted

    # --- assignment ------------------------------------------------------------------------

    async def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Read what is committed, seek there, and open the partitions."""
        self._paused -= set(partitions)
        progresses = await self._load(partitions)
        if self._companion is not None:
            await self._companion.assigned(self._consumer, [p.partition for p in partitions])
        for partition, progress in progresses.items():
            self._consumer.seek(partition, progress.base)
            self.ledger.assign(partition, progress)
        self._metrics.rebalanced(len(self.ledger.assignments))
        self.assigned.set()
        log.info("partitions_assigned", partitions=[str(p) for p in partitions])

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Finish what is in flight within the drain deadline, commit it, void the rest."""
        self._drop_ready(frozenset(partitions))
        await self._drain(partitions, self._settings.drain_timeout_s)
        if self._settings.commits:
            ours = frozenset(partitions)
            await self._commit(
                {
                    partition: committed
                    for partition, committed in self._committable().items()
                    if partition in ours or partition.topic != self._settings.topic
                }
            )
        for partition in partitions:
            self.ledger.revoke(partition)
        if self._companion is not None:
            self._companion.revoked([p.partition for p in partitions])
        log.info("partitions_revoked", partitions=[str(p) for p in partitions])

    async def _load(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Progress]:
        if self._settings.progress_group == self._settings.group:
            committed = await self._consumer.committed(partitions)
        else:
            committed = await self._log.committed(self._settings.progress_group, partitions)
        beginnings = await self._consumer.beginning_offsets(partitions)
        return {
            partition: starting_progress(committed[partition], beginnings[partition])
            for partition in partitions
        }

    def _drop_ready(self, partitions: frozenset[TopicPartition] | None) -> None:
        """Forget records that were read and not admitted; their next owner reads them again."""
        kept = [
            delivery
            for delivery in self._ready
            if partitions is not None and delivery.assignment.partition not in partitions
        ]
        self._ready = deque(kept)
        self._ready_bytes = sum(_size(delivery.records) for delivery in kept)

    # --- settling and committing -----------------------------------------------------------

    def _on_settled(self) -> None:
        self._settled.set()

    async def _wait_settled(self, timeout_s: float) -> None:
        self._settled.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError:
            pass

    async def _drain(self, partitions: Sequence[TopicPartition] | None, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while self.ledger.in_flight(partitions):
                    await self._wait_settled(deadline_s)
        except TimeoutError:
            log.warning("drain_incomplete", in_flight=self.ledger.in_flight(partitions))

    def _committable(self) -> dict[TopicPartition, Committed]:
        offsets = self.ledger.committable()
        if self._companion is not None:
            offsets |= self._companion.committable()
        return offsets

    async def _commit_forever(self) -> None:
        while self._settings.commits:
            offsets = self._committable()
            if not offsets:
                self._settled.clear()
                await self._settled.wait()
            committed = await self._commit(offsets)
            await asyncio.sleep(COMMIT_INTERVAL_S if committed else COMMIT_RETRY_S)

    async def _commit(self, offsets: dict[TopicPartition, Committed]) -> bool:
        if not offsets:
            return True
        try:
            with self._metrics.commit():
                await self._consumer.commit(offsets)
        except Fenced as error:
            # The group has moved on: a rebalance is coming, and these are no longer ours to say.
            log.warning("commit_refused", reason=str(error))
            return False
        except Retriable as error:
            log.warning("commit_failed", reason=str(error))
            return False
        self.ledger.was_committed(offsets)
        if self._companion is not None:
            self._companion.was_committed(offsets)
        return True


def starting_progress(committed: Committed | None, beginning: int) -> Progress:
    """Where to start reading: at what is committed, but not below what the log still holds."""
    if committed is None:
        return Progress(beginning)
    progress = Progress.from_committed(committed)
    if progress.base < beginning:
        log.warning("records_skipped", first=progress.base, count=beginning - progress.base)
        progress.cover(progress.base - 1, beginning - 1)
    return progress


def _size(records: Sequence[Record]) -> int:
    return sum(len(record.value) for record in records if record.value is not None)
