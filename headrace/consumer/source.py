"""Source of a process: reads its first topic, tracks records in flight, commits acknowledged ones.

The path of a record here: `poll` → its partition's assignment is looked up → it waits in the
ready queue → the stage receives it, admits it and works on it → its ack handle is acknowledged →
the committer, in the background, commits the base and the answered ranges above it; no record
waits for a commit.

On assignment: read the commits, seek to their bases, and only then admit records. For exactly
once, the former owners are fenced before that. On revocation: admit nothing more, wait for records
in flight until the drain deadline, commit, and revoke the rest. Reading pauses while the budget is
exceeded; polling never does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Self

import structlog

from headrace.consumer.backpressure import Backpressure
from headrace.consumer.deferring import Deferral, Refusal, Rereading
from headrace.consumer.lag import LagMonitor, StalledOffsetMonitor
from headrace.consumer.quarantine import QuarantineGate
from headrace.consumer.ready_queue import PolledRecords, ReadyQueue
from headrace.consumer.snapshot import Parts, partition_snapshots, source_snapshot
from headrace.consumer.source_settings import SourceSettings
from headrace.crash_isolation.markers import CrashMarkers
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget, FairQueue
from headrace.delivery.committer import Committer
from headrace.delivery.inflight import AssignedPartition, InFlightTracker
from headrace.delivery.offset_reset import TopicIdentity, go_on_in_range, starting_progress
from headrace.delivery.offset_store import OffsetStore
from headrace.delivery.ordering import KeyChains
from headrace.delivery.source_offsets import SourceOffsets
from headrace.delivery.transactions import PartitionTransactions
from headrace.errors import Retriable
from headrace.log.errors import OffsetOutOfRange
from headrace.log.port import Consumer, Gap, Log, Record, TopicPartition
from headrace.primitives.auto_reset_event import AutoResetEvent
from headrace.primitives.backoff import Backoff, Pauses
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.snapshots import SourceSnapshot
from headrace.telemetry.watchdog import Activity
from headrace.tuning import TUNING, Tuning

log = structlog.get_logger(__name__)


class Source:
    """First input of a process. Enter it, `run` it in a task, and `receive` from it.

    Attributes:
        tracker: in-flight tracker of the records read.
        offset_store: store of the answered offsets.
        deferral: defers requests over their shares; None without shares.
        transactions: partition transactions, for exactly once, if this process answers.
        reading: activity that each poll renews.
        assigned: set after the group's first assignment, even an empty one.
    """

    def __init__(
        self,
        log_: Log,
        settings: SourceSettings,
        metrics: Metrics,
        source_offsets: SourceOffsets | None = None,
        refusal: Refusal | None = None,
        tuning: Tuning = TUNING,
    ) -> None:
        self._tuning = tuning.consumer
        self._order_prune_at = tuning.delivery.order_prune_at
        self._backoff = Backoff(tuning.consumer.retry_first_s, tuning.consumer.retry_max_s)
        self._seek_pauses = Pauses(self._backoff)
        self._log = log_
        self._settings = settings
        self._metrics = metrics
        self._source_offsets = source_offsets
        budget = Budget(settings.budget_bytes, tuning.delivery.resume_fraction)
        self.tracker = InFlightTracker(budget, self._on_settled, tuning.delivery)
        requests = settings.requests or settings.topic
        self.offset_store = OffsetStore(
            self.tracker, source_offsets, requests, settings.topic, tuning.delivery
        )
        self.transactions = (
            PartitionTransactions(
                log_, self.offset_store, settings.group, metrics, self._void_all, tuning.delivery
            )
            if settings.exactly_once and settings.commits
            else None
        )
        # What answers repeats is on `requests`; repeats on the topics between are recognised.
        self._backpressure = Backpressure(
            self.tracker,
            bounds_metadata=settings.requests == settings.topic,
            shares=settings.shares,
            tuning=tuning,
        )
        self.deferral = _deferral(budget, settings, refusal, tuning)
        self._stalled = StalledOffsetMonitor(self.tracker, settings.kept_s, tuning.consumer)
        self._ready = ReadyQueue(tuning.consumer)
        self.quarantine = QuarantineGate(
            CrashMarkers(log_, settings.group),
            self.tracker,
            metrics,
            settings,
            self._ready,
            tuning.consumer,
        )
        self._revocations: list[Callable[[], None]] = []
        if self.deferral is not None:
            self.when_revoked(self.deferral.forget)
        self._reads_requests = requests == settings.topic
        self._identity = TopicIdentity(log_, settings.topic)
        self._behind: dict[TopicPartition, int] = {}
        self._lost_ends: dict[TopicPartition, int] = {}
        self._acked = AutoResetEvent()
        self._committer = Committer(
            self.tracker, source_offsets, metrics, self._acked, self.transactions, tuning.delivery
        )
        self._lag = LagMonitor(self._unanswered, self._is_working, tuning.consumer)
        self._assigning_since_s: float | None = None
        self.reading = Activity(f"reader of {settings.topic}", tuning.consumer.reader_stall_s)
        self.assigned = asyncio.Event()
        self._stopping = self._closing = self._reading = self._opened = False
        self._leaving: frozenset[TopicPartition] = frozenset()
        self._stack = AsyncExitStack()
        self._consumer: Consumer

    async def __aenter__(self) -> Self:
        await self.quarantine.joining(self._settings.topic)
        settings = self._settings
        member = self._log.member(settings.group, [settings.topic], self, kind=settings.kind)
        self._consumer = await self._stack.enter_async_context(member)
        if self.transactions is not None:
            self._stack.push_async_callback(self.transactions.release)
        self._stack.push_async_callback(self._end_reading)
        self._opened = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        await self._stack.aclose()  # the member leaves though what comes before is cancelled

    async def _end_reading(self) -> None:
        try:  # polls are not cancelled: wait for the current one, up to a limit
            async with asyncio.timeout(self._tuning.close_timeout_s):
                while self._reading:
                    await self._acked.wait(self._tuning.poll_timeout_s)
        except TimeoutError:
            log.warning(Event.CONSUMER_CUT_OFF)

    async def run(self) -> None:
        """Read and commit until `close_down`."""
        self._reading = True
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(one, name=f"source-{of}") for of, one in self._beside()]
                await self._read()
                for task in beside:
                    task.cancel()
        finally:
            self.reading.end()
            self._reading = False
            self._acked.set()

    def _beside(self) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        group = self._settings.progress_group
        yield "backlog", self._lag.run(self._consumer)
        yield "probation", self.quarantine.run()
        if self.deferral is not None:
            rereading = Rereading(
                self.deferral,
                self._ready,
                self._is_wanted,
                self._lost_ends.__setitem__,
                self._metrics,
                self._tuning,
            )
            yield "rereading", rereading.run(self._log)
        if self._settings.commits:
            yield "committer", self._committer.run(self._consumer)
        else:
            yield "bases", self._stalled.run(self._log, group)
            yield "progress", self._backpressure.watch(self._log, group)

    async def receive(self) -> PolledRecords | None:
        """Return the next records of any partition; None once reading stopped and none are left."""
        self.quarantine.is_done()
        while (delivery := await self._ready.next()) is not None:
            is_isolated = delivery.isolation is not None and delivery.isolation.isolated is not None
            if delivery.assignment.revoked and not is_isolated:
                continue
            if delivery.skipped is None and (is_isolated or self.quarantine.gate.is_marking):
                delivery = await self.quarantine.let_in(delivery)
                if delivery.assignment.revoked or not delivery.records:
                    self.quarantine.is_done()
                    continue
            if delivery.skipped is None or self._reads_requests:
                return delivery
            delivery.assignment.admit(delivery.skipped, 0).ack()
        return None

    def stop_reading(self) -> None:
        """Admit no more records; stay in the group, to keep the partitions of those in flight."""
        self._stopping = True
        self._ready.end()

    async def close_down(self, deadline_s: float) -> None:
        """Wait for records in flight, commit, and end `run`. Call after `stop_reading`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        await self._drain(None, deadline_s)
        if self._settings.commits:
            # Always try a last commit, for a short time.
            async with self._last_commit(
                max(deadline, loop.time() + self._tuning.last_commit_timeout_s)
            ):
                pauses = Pauses(self._backoff)
                while not await self._committer.commit(self._consumer) and loop.time() < deadline:
                    await self._acked.wait(pauses.next_s())
        await self.quarantine.revoked([each.partition for each in self.tracker.assignments])
        self._void_all()  # later answers would no longer be committed
        self._closing = True

    def when_revoked(self, call: Callable[[], None]) -> None:
        """Register a callback for whenever ack handles were revoked."""
        self._revocations.append(call)

    def last_contact_s(self) -> float:
        """Return the seconds since the last contact with the log."""
        return self._consumer.last_contact_s()

    def snapshot(self) -> SourceSnapshot:
        """Return a snapshot of the source."""
        settings = self._settings
        return source_snapshot(
            Parts(
                topic=settings.topic,
                group=settings.group,
                tracker=self.tracker,
                source_offsets=self._source_offsets,
                committer=self._committer,
                lag=self._lag,
                waiting_bytes=self._ready.waiting_bytes,
                commits=settings.commits,
                pauses=self._backpressure,
                stalled=self._stalled,
                last_contact_s=self.last_contact_s() if self._opened else 0.0,
                deferral=self.deferral,
                assigning_since_s=self._assigning_since_s,
            )
        )

    def _unanswered(self) -> int:
        return sum(each.backlog_records for each in partition_snapshots(self.tracker, self._lag))

    def _is_working(self) -> bool:
        assignments = self.tracker.assignments
        return bool(self._ready) or any(each.in_flight or each.deferred for each in assignments)

    # --- reading ---------------------------------------------------------------------------

    async def _read(self) -> None:
        while not self._closing:
            self.reading.begin()
            try:
                polled = await self._poll()
            except OffsetOutOfRange as error:
                if not error.positions:
                    raise
                await self._go_on_in_range(error.positions)
                continue
            if self._lost_ends:  # of partitions that are paused, so that no poll notices it
                await self._go_on_in_range(dict(self._lost_ends))
                self._lost_ends.clear()  # also what was reported meanwhile, of the same loss
            for partition, records in polled.items():
                assignment = self.tracker.get(partition)
                if assignment is None or not self._is_wanted(partition):
                    continue
                for delivery in self.quarantine.divided(PolledRecords(assignment, records)):
                    self._enqueue(delivery)
            for gap in self._consumer.gaps():
                self._pass_over(gap, polled.get(gap.partition, ()))
            if self._ready:
                self._ready.tell()
                await self._ready.yield_to_stages(self.tracker.budget)

    def _enqueue(self, delivery: PolledRecords) -> None:
        assignment, records = delivery.assignment, delivery.records
        self._ready.put(delivery)
        assignment.last_read = records[-1].offset
        assignment.ages.note(assignment.last_read, records[0].timestamp)

    def _is_wanted(self, partition: TopicPartition) -> bool:
        """Return False for partitions about to be revoked: the next owner reads their records."""
        return not self._stopping and partition not in self._leaving

    def _pass_over(self, gap: Gap, polled: Sequence[Record]) -> None:
        """Count unreadable records, and let the base move past them.

        Args:
            gap: offsets that the last poll skipped.
            polled: records that it returned of the same partition.
        """
        assignment = self.tracker.get(gap.partition)
        if assignment is None or not self._is_wanted(gap.partition):
            return  # the next owner handles it
        if gap.end - 1 in assignment.progress:
            return
        self._metrics.passed_over(gap)
        log.error(
            Event.RECORDS_UNREADABLE,
            partition=str(gap.partition),
            first=gap.first,
            count=gap.end - gap.first,
            code=gap.code,
            reason=gap.reason,
        )
        # A record after the gap closes it. If it was not admitted, both are read again.
        if not polled or gap.end > polled[-1].offset == assignment.last_read:
            self._ready.put(PolledRecords(assignment, (), skipped=gap.end - 1))

    async def _poll(self) -> Mapping[TopicPartition, Sequence[Record]]:
        tuning = self._tuning
        if self.quarantine.is_active:
            await self.quarantine.look(self._consumer)
        if not self._backpressure.update(
            self._consumer, self._ready.waiting_bytes, stopping=self._stopping
        ):
            timeout_s = (
                tuning.paused_poll_timeout_s if self._backpressure.paused else tuning.poll_timeout_s
            )
            return await self._consumer.poll(timeout_s, tuning.max_poll_records)
        await self._acked.wait(tuning.paused_poll_timeout_s)
        return await self._consumer.poll(0, tuning.max_poll_records)

    async def _go_on_in_range(self, positions: Mapping[TopicPartition, int]) -> None:
        former = self.tracker.assignments
        try:
            replacement = await self._identity.replacement()
            found = await go_on_in_range(
                self._consumer, self.tracker, positions, is_replaced=bool(replacement)
            )
            self._identity.known = replacement or self._identity.known
        except Retriable as unavailable:
            log.warning(Event.SEEK_DELAYED, reason=str(unavailable))
            await self._seek_pauses.sleep()
        else:
            self._seek_pauses.reset()
            for partition, beginning in found.skipped.items():
                assignment = self.tracker.get(partition)
                if assignment is not None:
                    self._skip(assignment, positions[partition], beginning)
            for assignment in self.tracker.assignments:
                if assignment not in former:  # of a topic that replaced the one read before
                    self._begin(assignment)
            for call in self._revocations:
                call()
            if found.truncated:
                await self._take_up_again(found.truncated)

    async def _take_up_again(self, partitions: Sequence[TopicPartition]) -> None:
        """Revoke truncated partitions, and assign them again.

        As in a rebalance, requests in flight end and are committed first, so that answers to the
        remaining records are kept, and no answer to a lost record counts for the new record at
        its offset.
        """
        former = {each: self.tracker.get(each) for each in partitions}
        pauses = Pauses(self._backoff)
        deadline = asyncio.get_running_loop().time() + self._tuning.revocation_timeout_s
        self._ready.drop(frozenset(partitions))
        await self._drain(partitions, self._revocation_drain_s)
        if self._settings.commits:
            async with self._last_commit(deadline):
                await self._committer.commit(self._consumer, frozenset(partitions))
        # A rebalance meanwhile may already have assigned some of them again.
        ours = [each for each, one in former.items() if one and self.tracker.get(each) is one]
        self._revoked(ours)
        while ours and not self._closing:
            try:
                progresses = await self._prepare(ours)
                break
            except Retriable as error:
                log.warning(Event.ASSIGNMENT_DELAYED, reason=str(error))
                await pauses.sleep()
        else:
            return
        for partition in ours:
            if partition in self._consumer.assignment() and self.tracker.get(partition) is None:
                self._consumer.seek(partition, progresses[partition].base)
                self._begin(self.tracker.assign(partition, progresses[partition]))
        # Commit at once: with time, more new records take the offsets of the lost ones.
        self._acked.set()

    def _skip(self, assignment: AssignedPartition, first: int, beginning: int) -> None:
        """Skip the offsets from `first` to `beginning`, which were deleted unread."""
        self._metrics.skipped.inc(beginning - first)
        self._ready.put(PolledRecords(assignment, (), skipped=beginning - 1))
        self._ready.tell()

    # --- assignment ------------------------------------------------------------------------

    async def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Fence the former owners for exactly once, read the commits, seek, and admit records."""
        self._backpressure.assigned_anew()
        self._leaving = frozenset()
        self._assigning_since_s = time.monotonic()
        pauses = Pauses(self._backoff)
        while not self._closing:
            try:
                progresses = await self._prepare(partitions)
                await self.quarantine.assigned(self._consumer, progresses)
                break
            except Retriable as error:
                # Nothing of these partitions can be read meanwhile.
                log.warning(Event.ASSIGNMENT_DELAYED, reason=str(error))
                await pauses.sleep()
        else:
            return
        self._assigning_since_s = None
        for partition, progress in progresses.items():
            self._consumer.seek(partition, progress.base)
            self._begin(self.tracker.assign(partition, progress))
        self._metrics.rebalanced()
        self.assigned.set()
        log.info(Event.ASSIGNED, partitions=[str(p) for p in partitions])

    async def _prepare(
        self, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, AckedOffsets]:
        """Fence the former owners for exactly once, and then read the commits."""
        numbers = [each.partition for each in partitions]
        # Fence before reading: a former owner could still commit after an earlier read.
        if self.transactions is not None:
            await self.transactions.fence(self._consumer, numbers)
        progresses = await self._load(partitions)
        if self._source_offsets is not None:
            await self._source_offsets.assigned(self._consumer, numbers)
        return progresses

    def _begin(self, assignment: AssignedPartition) -> None:
        """Begin an assignment; progress comes from our answers or another process's commits."""
        committed = self._behind.pop(assignment.partition, None)
        if committed is not None and not self._settings.commits:
            assignment.last_delivered = committed - 1
            self._skip(assignment, committed, assignment.progress.base)
        if not self._settings.commits:
            self._backpressure.follow(assignment.partition, assignment.progress.copy())
        if self._settings.chains_keys:
            assignment.chains = KeyChains(
                partial(self._is_answered, assignment), self._order_prune_at
            )

    def _is_answered(self, assignment: AssignedPartition, offset: int) -> bool:
        return offset in self._backpressure.progress(assignment)

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Finish requests in flight and commit them, within one deadline; revoke the rest."""
        self._leaving = frozenset(partitions)
        self._ready.drop(self._leaving)
        deadline = asyncio.get_running_loop().time() + self._tuning.revocation_timeout_s
        await self._drain(partitions, self._revocation_drain_s)
        if self._settings.commits:
            async with self._last_commit(deadline):
                await self._committer.commit(self._consumer, self._leaving)
        await self.quarantine.revoked(partitions)
        self._revoked(partitions)
        if self.transactions is not None:
            await self.transactions.release([p.partition for p in partitions])
        log.info(Event.REVOKED, partitions=[str(p) for p in partitions])

    @property
    def _revocation_drain_s(self) -> float:
        tuning = self._tuning
        limit_s = tuning.revocation_timeout_s - tuning.last_commit_timeout_s
        return min(self._settings.drain_timeout_s, limit_s)

    def _void_all(self) -> None:
        self._ready.drop(None)
        self._revoked([assignment.partition for assignment in self.tracker.assignments])

    def _revoked(self, partitions: Sequence[TopicPartition]) -> None:
        for partition in partitions:
            self.tracker.revoke(partition)
        if self._source_offsets is not None:
            self._source_offsets.revoked([p.partition for p in partitions])
        for call in self._revocations:
            call()

    @asynccontextmanager
    async def _last_commit(self, deadline: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            log.warning(Event.COMMIT_FAILED, reason="the last commit was not answered in time")

    async def _load(
        self, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, AckedOffsets]:
        replacement = await self._identity.replacement()
        if self._settings.progress_group == self._settings.group:
            committed = await self._consumer.committed(partitions)
        else:
            committed = await self._log.committed(self._settings.progress_group, partitions)
        if replacement:
            committed = dict.fromkeys(partitions)  # the commits belong to the replaced topic
        beginnings = await self._consumer.beginning_offsets(partitions)
        ends = await self._consumer.end_offsets(partitions)
        self._identity.known = replacement or self._identity.known
        self._behind = {
            each: found.offset
            for each, found in committed.items()
            if found is not None and found.offset < beginnings[each]
        }
        return {
            each: starting_progress(each, committed[each], beginnings[each], ends[each])
            for each in partitions
        }

    # --- acks and commits -----------------------------------------------------------

    def _on_settled(self) -> None:
        self._lag.acked = self.tracker.budget.acked
        self._acked.set()
        if self.deferral is not None:
            self.deferral.freed()

    async def _drain(self, partitions: Sequence[TopicPartition] | None, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while self.tracker.in_flight(partitions):
                    await self._acked.wait(deadline_s)
        except TimeoutError:
            log.warning(Event.DRAIN_INCOMPLETE, in_flight=self.tracker.in_flight(partitions))


def _deferral(
    budget: Budget, settings: SourceSettings, refusal: Refusal | None, tuning: Tuning
) -> Deferral | None:
    if min(settings.model_share, settings.tenant_share) >= 1:
        return None
    shares = FairQueue(
        budget, settings.model_share, settings.tenant_share, tuning.delivery.max_idle_claims
    )
    return Deferral(shares, refusal, tuning=tuning.consumer)
