"""Source of a process: reads its first topic, tracks records in flight, commits acknowledged ones.

The path of a record here: the reader polls it (`headrace.consumer.reader`) → it waits in the ready
queue → the stage receives it, admits it and works on it → its ack handle is acknowledged → the
committer, in the background, commits the base and the answered ranges above it; no record waits
for a commit. `headrace.consumer.assignments` begins and ends the assignments of partitions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any, Self

import structlog

from headrace.consumer.assignments import Assignments
from headrace.consumer.backpressure import Backpressure
from headrace.consumer.deferring import Deferral, Refusal, Rereading
from headrace.consumer.lag import LagMonitor, StalledOffsetMonitor
from headrace.consumer.quarantine import QuarantineGate
from headrace.consumer.reader import RecordReader
from headrace.consumer.ready_queue import PolledRecords, ReadyQueue
from headrace.consumer.snapshot import SourceParts, partition_snapshots, source_snapshot
from headrace.consumer.source_settings import SourceSettings
from headrace.crash_isolation.markers import CrashMarkers
from headrace.delivery.budget import Budget, BudgetShares
from headrace.delivery.committer import Committer
from headrace.delivery.inflight import InFlightTracker
from headrace.delivery.offset_store import OffsetStore
from headrace.delivery.source_offsets import SourceOffsets
from headrace.delivery.transactions import PartitionTransactions
from headrace.log.port import Consumer, Log
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

    Args:
        log_: the log.
        settings: settings of the source.
        source_offsets: set if `results` is read instead of the source topic.
        refusal: returns the failure of a deferred request that would be late.
        on_revoked: called whenever ack handles were revoked, and when assignments are leaving.

    Attributes:
        tracker: in-flight tracker of the records read.
        offset_store: store of the answered offsets.
        deferral: defers requests over their shares; None without shares.
        transactions: partition transactions, for exactly once, if this process answers.
        reading: activity that each poll renews.
        assigned: set after the group's first assignment, even an empty one.
        freed: set after each acknowledgement, which may have made room in the budget.
    """

    def __init__(
        self,
        log_: Log,
        settings: SourceSettings,
        metrics: Metrics,
        source_offsets: SourceOffsets | None = None,
        refusal: Refusal | None = None,
        on_revoked: Callable[[], None] = lambda: None,
        tuning: Tuning = TUNING,
    ) -> None:
        self._tuning = tuning.consumer
        self._backoff = Backoff(tuning.consumer.retry_first_s, tuning.consumer.retry_max_s)
        self._log = log_
        self._settings = settings
        self._metrics = metrics
        self._on_revoked = on_revoked
        self._acked = AutoResetEvent()
        self.freed = AutoResetEvent()
        self._source_offsets = source_offsets
        budget = Budget(settings.budget_bytes, tuning.delivery.resume_fraction)
        self.tracker = InFlightTracker(budget, self._on_acked, tuning.delivery)
        requests = settings.requests or settings.topic
        self.offset_store = OffsetStore(
            self.tracker, source_offsets, requests, settings.topic, tuning.delivery
        )
        self.transactions = (
            PartitionTransactions(
                log_, self.offset_store, settings.group, metrics, self._revoke_all, tuning.delivery
            )
            if settings.exactly_once and settings.commits
            else None
        )
        # Only records of `requests` would be answered twice if the metadata had no room; repeats on
        # the topics between stages are recognised.
        self._backpressure = Backpressure(
            self.tracker,
            bounds_metadata=settings.requests == settings.topic,
            shares=settings.shares,
            tuning=tuning,
        )
        self.deferral = _make_deferral(budget, settings, refusal, tuning)
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
        self._answers_skipped = settings.requests == settings.topic
        self._committer = Committer(
            self.tracker, source_offsets, metrics, self._acked, self.transactions, tuning.delivery
        )
        self._lag = LagMonitor(self._unanswered, self._is_working, tuning.consumer)
        self.reading = Activity(f"reader of {settings.topic}", tuning.consumer.reader_stall_s)
        self._reader = RecordReader(
            self.tracker,
            self._ready,
            self._backpressure,
            self.quarantine,
            metrics,
            self._acked,
            self.reading,
            tuning.consumer,
        )
        self._assignments = Assignments(
            log_,
            settings,
            self.tracker,
            self._ready,
            self._reader,
            self._backpressure,
            self.quarantine,
            self._committer,
            source_offsets,
            self.transactions,
            metrics,
            self._acked,
            self._after_revocation,
            tuning,
        )
        self.assigned = self._assignments.assigned
        self._is_opened = False
        self._stack = AsyncExitStack()
        self._consumer: Consumer

    async def __aenter__(self) -> Self:
        await self.quarantine.remove_dead_members(self._settings.topic)
        settings = self._settings
        member = self._log.member(
            settings.group, [settings.topic], self._assignments, kind=settings.kind
        )
        self._consumer = await self._stack.enter_async_context(member)
        self._assignments.consumer = self._consumer
        if self.transactions is not None:
            self._stack.push_async_callback(self.transactions.release)
        self._stack.push_async_callback(self._end_reading)
        self._is_opened = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.is_closing = True
        self._assignments.report_left(None)  # nothing is assigned after `close_down`
        await self._stack.aclose()  # the member leaves though what comes before is cancelled

    async def _end_reading(self) -> None:
        try:  # polls are not cancelled: wait for the current one, up to a limit
            async with asyncio.timeout(self._tuning.close_timeout_s):
                while self._reader.is_running:
                    await self._acked.wait(self._tuning.poll_timeout_s)
        except TimeoutError:
            log.warning(Event.CONSUMER_CUT_OFF)

    async def run(self) -> None:
        """Read and commit until `close_down`."""
        self._reader.is_running = True
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(work, name=f"source-{name}")
                    for name, work in self._background()
                ]
                await self._reader.run(self._consumer, self._assignments.adjust_positions)
                for task in background:
                    task.cancel()
        finally:
            self.reading.end()
            self._reader.is_running = False
            self._acked.set()

    def _background(self) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        group = self._settings.progress_group
        yield "lag", self._lag.run(self._consumer)
        yield "quarantine", self.quarantine.run()
        if self.deferral is not None:
            rereading = Rereading(
                self.deferral,
                self._ready,
                self._reader.is_wanted,
                self._reader.report_lost_end,
                self._metrics,
                self._tuning,
            )
            yield "rereading", rereading.run(self._log)
        if self._settings.commits:
            yield "committer", self._committer.run(self._consumer)
        else:
            yield "stalled-offsets", self._stalled.run(self._log, group)
            yield "progress", self._backpressure.watch(self._log, group)

    async def receive(self) -> PolledRecords | None:
        """Return the next records of any partition; None once reading stopped and none are left."""
        self.quarantine.reading.leave()
        while (polled := await self._ready.next()) is not None:
            is_isolated = polled.is_isolated
            if polled.assignment.revoked and not is_isolated:
                continue
            if polled.skipped is None and (is_isolated or self.quarantine.gate.is_marking):
                polled = await self.quarantine.reading.admit(polled)
                if polled.assignment.revoked or not polled.records:
                    self.quarantine.reading.leave()
                    continue
            if polled.skipped is None or self._answers_skipped:
                return polled
            # Nothing of a topic between stages is answered, so nothing else acknowledges the range.
            polled.assignment.admit(polled.skipped, 0).ack()
        return None

    @property
    def is_stopping(self) -> bool:
        """True once nothing more is admitted."""
        return self._reader.is_stopping

    @property
    def is_drained(self) -> bool:
        """False once the source has ended with requests in flight or answers not committed."""
        return self._assignments.is_drained

    def stop_reading(self) -> None:
        """Admit no more records; stay in the group, to keep the partitions of those in flight."""
        self._reader.is_stopping = True
        self._ready.end()
        self._assignments.leave(None)

    async def close_down(self, deadline_s: float) -> None:
        """Wait for records in flight, commit, and end `run`. Call after `stop_reading`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        await self._assignments.drain(None, deadline_s)
        if self._settings.commits:
            # Always try a last commit, for a short time.
            async with self._assignments.last_commit(
                max(deadline, loop.time() + self._tuning.last_commit_timeout_s)
            ):
                pauses = Pauses(self._backoff)
                while not await self._committer.commit(self._consumer) and loop.time() < deadline:
                    await self._acked.wait(pauses.next_s())
        # First: partitions that are assigned from here on get closing markers there.
        self._reader.is_closing = True
        await self.quarantine.on_revoked([each.partition for each in self.tracker.assignments])
        self._assignments.revoke_all()  # later answers would no longer be committed

    def last_contact_s(self) -> float:
        """Return the seconds since the last contact with the log."""
        return self._consumer.last_contact_s()

    def snapshot(self) -> SourceSnapshot:
        """Return a snapshot of the source."""
        settings = self._settings
        return source_snapshot(
            SourceParts(
                topic=settings.topic,
                group=settings.group,
                tracker=self.tracker,
                source_offsets=self._source_offsets,
                committer=self._committer,
                lag=self._lag,
                waiting_bytes=self._ready.waiting_bytes,
                commits=settings.commits,
                backpressure=self._backpressure,
                stalled=self._stalled,
                last_contact_s=self.last_contact_s() if self._is_opened else 0.0,
                deferral=self.deferral,
                assigning_since_s=self._assignments.assigning_since_s,
            )
        )

    def _unanswered(self) -> int:
        return sum(each.backlog_records for each in partition_snapshots(self.tracker, self._lag))

    def _is_working(self) -> bool:
        assignments = self.tracker.assignments
        return bool(self._ready) or any(each.in_flight or each.deferred for each in assignments)

    def _revoke_all(self) -> None:
        self._assignments.revoke_all()

    def _after_revocation(self) -> None:
        if self.deferral is not None:
            self.deferral.records.forget_revoked()
        self._on_revoked()

    def _on_acked(self) -> None:
        self._lag.acked = self.tracker.budget.acked
        self._acked.set()
        self.freed.set()
        if self.deferral is not None:
            self.deferral.freed()


def _make_deferral(
    budget: Budget, settings: SourceSettings, refusal: Refusal | None, tuning: Tuning
) -> Deferral | None:
    if min(settings.model_share, settings.tenant_share) >= 1:
        return None
    shares = BudgetShares(
        budget, settings.model_share, settings.tenant_share, tuning.delivery.max_idle_shares
    )
    return Deferral(shares, refusal, tuning=tuning.consumer)
