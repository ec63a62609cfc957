"""Assignments: what happens when partitions are assigned, revoked, or change under the reader.

On assignment: for exactly once fence the former owners, read the commits, seek to their bases, and
only then admit records. On revocation: admit nothing more, wait for records in flight until the
drain deadline, commit, and revoke the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

import structlog

from headrace.consumer.backpressure import Backpressure
from headrace.consumer.quarantine import QuarantineGate
from headrace.consumer.reader import RecordReader
from headrace.consumer.ready_queue import ReadyQueue
from headrace.consumer.source_settings import SourceSettings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.committer import Committer
from headrace.delivery.inflight import AssignedPartition, InFlightTracker
from headrace.delivery.offset_reset import TopicIdentity, go_on_in_range, starting_progress
from headrace.delivery.ordering import KeyChains
from headrace.delivery.source_offsets import SourceOffsets
from headrace.delivery.transactions import PartitionTransactions
from headrace.errors import Retriable
from headrace.log.port import Committed, Consumer, Log, TopicPartition
from headrace.primitives.auto_reset_event import AutoResetEvent
from headrace.primitives.backoff import Backoff, Pauses
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.tuning import TUNING, Tuning

log = structlog.get_logger(__name__)


class Assignments:
    """Listener of the group's assignments, for one source.

    Args:
        log_: the log, for the commits of another group.
        settings: settings of the source.
        tracker: in-flight tracker of the source.
        source_offsets: set if `results` is read instead of the source topic.
        transactions: set for exactly-once delivery, if this process answers.
        on_revoked: called whenever ack handles were revoked, and when assignments are leaving.

    Attributes:
        consumer: the consumer of the group; set before the first assignment.
        assigned: set after the first assignment, even an empty one.
        assigning_since_s: monotonic time at which a pending assignment began; None if none is.
        is_drained: False once the end of the source has left requests in flight, or answers whose
            offsets are not committed.
    """

    consumer: Consumer

    def __init__(
        self,
        log_: Log,
        settings: SourceSettings,
        tracker: InFlightTracker,
        ready: ReadyQueue,
        reader: RecordReader,
        backpressure: Backpressure,
        quarantine: QuarantineGate,
        committer: Committer,
        source_offsets: SourceOffsets | None,
        transactions: PartitionTransactions | None,
        metrics: Metrics,
        acked: AutoResetEvent,
        on_revoked: Callable[[], None],
        tuning: Tuning = TUNING,
    ) -> None:
        self._log = log_
        self._settings = settings
        self._tracker = tracker
        self._ready = ready
        self._reader = reader
        self._backpressure = backpressure
        self._quarantine = quarantine
        self._committer = committer
        self._source_offsets = source_offsets
        self._transactions = transactions
        self._metrics = metrics
        self._acked = acked
        self._on_revoked = on_revoked
        self._tuning = tuning.consumer
        self._order_prune_at = tuning.delivery.order_prune_at
        self._backoff = Backoff(tuning.consumer.retry_first_s, tuning.consumer.retry_max_s)
        self._seek_pauses = Pauses(self._backoff)
        self._identity = TopicIdentity(log_, settings.topic)
        self._behind: dict[TopicPartition, Committed | None] = {}
        self.assigned = asyncio.Event()
        self.assigning_since_s: float | None = None
        self.is_drained = True

    # --- the group ---------------------------------------------------------------------------

    async def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Fence the former owners for exactly once, read the commits, seek, and admit records."""
        self._backpressure.on_assigned()
        self._reader.leaving = frozenset()
        self.assigning_since_s = time.monotonic()

        async def prepare() -> dict[TopicPartition, AckedOffsets]:
            progresses = await self._prepare(partitions)
            await self._quarantine.on_assigned(self.consumer, progresses)
            return progresses

        progresses = await self._retry_until_closing(prepare)
        if progresses is None or self._reader.is_closing:
            # Nothing is read: no end of this process is an unclean one for these partitions.
            await self._quarantine.on_revoked(partitions)
            return
        self.assigning_since_s = None
        for partition, progress in progresses.items():
            self.consumer.seek(partition, progress.base)
            self._begin(self._tracker.assign(partition, progress))
        self._metrics.rebalanced()
        # Last, since the process becomes ready by it: the partitions must be readable by then.
        self.assigned.set()
        log.info(Event.ASSIGNED, partitions=[str(p) for p in partitions])

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Finish requests in flight and commit them, within one deadline; revoke the rest."""
        # Admit nothing more first, or the drain would wait for requests that keep coming. What was
        # polled and not admitted is left in the log.
        self._reader.leaving = frozenset(partitions)
        self._ready.drop(self._reader.leaving)
        deadline = asyncio.get_running_loop().time() + self._tuning.revocation_timeout_s
        # Before the drain: requests that wait long are left in the log, and it need not wait.
        self.leave(partitions)
        # A member that the group has removed can commit nothing: its answers would be repeated.
        if self.consumer.membership is not None:
            await self.drain(partitions, self._revocation_drain_s)
            if self._settings.commits:
                async with self.last_commit(deadline):
                    await self._committer.commit(self.consumer, self._reader.leaving)
        # Before the tracker forgets what is answered: the closing marker names no answered suspect.
        await self._quarantine.on_revoked(partitions)
        # After the commit: from here on an acknowledgement marks no offset, and nothing of these
        # partitions is committed.
        self._revoked(partitions)
        # Last: transactions in progress end here, and the next owner aborts what they leave open.
        if self._transactions is not None:
            await self._transactions.release([p.partition for p in partitions])
        log.info(Event.REVOKED, partitions=[str(p) for p in partitions])

    def revoke_all(self) -> None:
        """Revoke all assignments, without waiting for records in flight."""
        self._ready.drop(None)
        self._revoked([assignment.partition for assignment in self._tracker.assignments])

    def report_left(self, partitions: Sequence[TopicPartition] | None) -> None:
        """Log the numbers of requests that are left to the next owners of `partitions`, or of all
        partitions: those in flight, and answered ones whose offsets are not committed.
        """
        in_flight = self._tracker.unfinished(partitions)
        uncommitted = self._tracker.uncommitted(partitions) if self._settings.commits else 0
        if in_flight or uncommitted:
            log.warning(Event.DRAIN_INCOMPLETE, in_flight=in_flight, uncommitted=uncommitted)
            self.is_drained = not (self._reader.is_stopping or self._reader.is_closing)

    def _revoked(self, partitions: Sequence[TopicPartition]) -> None:
        self.report_left(partitions)
        for partition in partitions:
            self._tracker.revoke(partition)
        if self._source_offsets is not None:
            self._source_offsets.on_revoked([p.partition for p in partitions])
        self._on_revoked()

    def leave(self, partitions: Sequence[TopicPartition] | None) -> None:
        """Mark the assignments of `partitions`, or all, as leaving."""
        for assignment in self._tracker.assignments:
            if partitions is None or assignment.partition in partitions:
                assignment.leaving = True
        self._on_revoked()

    async def drain(self, partitions: Sequence[TopicPartition] | None, deadline_s: float) -> None:
        """Wait until no record of `partitions`, or of all, is in flight, up to a deadline.

        Answers that are held behind a request which is not in flight here are not waited for.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while self._tracker.unfinished(partitions):
                    await self._acked.wait(deadline_s)
        except TimeoutError:
            pass  # `report_left` logs how many are left

    @asynccontextmanager
    async def last_commit(self, deadline: float) -> AsyncIterator[None]:
        """Bound a last commit by a deadline, in event-loop time."""
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            log.warning(Event.COMMIT_FAILED, reason="the last commit was not answered in time")

    # --- positions out of range --------------------------------------------------------------

    async def adjust_positions(self, positions: Mapping[TopicPartition, int]) -> None:
        """Seek positions that the log no longer holds, or assign their partitions again."""
        former = self._tracker.assignments
        try:
            replacement = await self._identity.replacement()
            found = await go_on_in_range(
                self.consumer, self._tracker, positions, is_replaced=bool(replacement)
            )
            self._identity.known = replacement or self._identity.known
        except Retriable as unavailable:
            log.warning(Event.SEEK_DELAYED, reason=str(unavailable))
            await self._seek_pauses.sleep()
        else:
            self._seek_pauses.reset()
            for partition, beginning in found.skipped.items():
                assignment = self._tracker.get(partition)
                if assignment is not None:
                    self._metrics.skipped.inc(beginning - positions[partition])
                    self._reader.skip_deleted(assignment, beginning)
            for assignment in self._tracker.assignments:
                if assignment not in former:  # of a topic that replaced the one read before
                    if assignment.progress.base:
                        self._behind[assignment.partition] = None
                    self._begin(assignment)
            self._on_revoked()
            if found.truncated:
                await self._reassign(found.truncated)

    async def _reassign(self, partitions: Sequence[TopicPartition]) -> None:
        """Revoke truncated partitions, and assign them again.

        As in a rebalance, requests in flight end and are committed first, so that answers to the
        remaining records are kept, and no answer to a lost record counts for the new record at
        its offset.
        """
        former = {each: self._tracker.get(each) for each in partitions}
        deadline = asyncio.get_running_loop().time() + self._tuning.revocation_timeout_s
        self._ready.drop(frozenset(partitions))
        self.leave(partitions)
        await self.drain(partitions, self._revocation_drain_s)
        if self._settings.commits:
            async with self.last_commit(deadline):
                await self._committer.commit(self.consumer, frozenset(partitions))
        # A rebalance meanwhile may already have assigned some of them again.
        still_assigned = [
            each for each, one in former.items() if one and self._tracker.get(each) is one
        ]
        self._revoked(still_assigned)
        if not still_assigned:
            return

        begun: set[TopicPartition] = set()

        def unassigned() -> list[TopicPartition]:
            """Return those that no rebalance has taken away, or assigned again, in between."""
            owned = self.consumer.assignment()
            return [
                each for each in still_assigned if each in owned and not self._tracker.get(each)
            ]

        async def prepare() -> dict[TopicPartition, AckedOffsets]:
            # What this has begun, it has to end, also if a rebalance has assigned it meanwhile:
            # fencing that failed has left it without a producer.
            begun.update(unassigned())
            partitions = sorted(begun & self.consumer.assignment())
            return await self._prepare(partitions) if partitions else {}

        progresses = await self._retry_until_closing(prepare) or {}
        for partition in unassigned():
            if partition in progresses:
                self.consumer.seek(partition, progresses[partition].base)
                self._begin(self._tracker.assign(partition, progresses[partition]))
        # Commit at once: with time, more new records take the offsets of the lost ones.
        self._acked.set()

    # --- beginning ---------------------------------------------------------------------------

    async def _retry_until_closing(
        self, prepare: Callable[[], Awaitable[dict[TopicPartition, AckedOffsets]]]
    ) -> dict[TopicPartition, AckedOffsets] | None:
        """Prepare partitions, with retries; return None if the reader is closing.

        Nothing of these partitions can be read meanwhile.
        """
        pauses = Pauses(self._backoff)
        while not self._reader.is_closing:
            try:
                return await prepare()
            except Retriable as error:
                log.warning(Event.ASSIGNMENT_DELAYED, reason=str(error))
                await pauses.sleep()
        return None

    async def _prepare(
        self, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, AckedOffsets]:
        """Fence the former owners for exactly once, and then read the commits."""
        numbers = [each.partition for each in partitions]
        # Fence before reading: a former owner could still commit after an earlier read.
        if self._transactions is not None:
            await self._transactions.fence(self.consumer, numbers)
        progresses = await self._load(partitions)
        if self._source_offsets is not None:
            await self._source_offsets.on_assigned(self.consumer, numbers)
        return progresses

    async def _load(
        self, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, AckedOffsets]:
        replacement = await self._identity.replacement()
        if self._settings.progress_group == self._settings.group:
            committed = await self.consumer.committed(partitions)
        else:
            committed = await self._log.committed(self._settings.progress_group, partitions)
        if replacement:
            committed = dict.fromkeys(partitions)  # the commits belong to the replaced topic
        beginnings = await self.consumer.beginning_offsets(partitions)
        ends = await self.consumer.end_offsets(partitions)
        self._identity.known = replacement or self._identity.known
        self._behind = {
            each: found
            for each, found in committed.items()
            if (0 if found is None else found.offset) < beginnings[each]
        }
        return {
            each: starting_progress(each, committed[each], beginnings[each], ends[each])
            for each in partitions
        }

    def _begin(self, assignment: AssignedPartition) -> None:
        """Begin an assignment; progress comes from our answers or another process's commits."""
        if not self._settings.commits:
            if assignment.partition in self._behind:
                committed = self._behind.pop(assignment.partition)
                beginning = assignment.progress.base
                assignment.last_delivered = (0 if committed is None else committed.offset) - 1
                if committed is not None:  # else this group may never have had a part in them
                    self._metrics.skipped.inc(beginning - committed.offset)
                self._reader.skip_deleted(assignment, beginning)
            self._backpressure.follow(assignment.partition, assignment.progress.copy())
        if self._settings.chains_keys:
            assignment.chains = KeyChains(
                partial(self._is_answered, assignment), self._order_prune_at
            )

    def _is_answered(self, assignment: AssignedPartition, offset: int) -> bool:
        return offset in self._backpressure.progress(assignment)

    @property
    def _revocation_drain_s(self) -> float:
        tuning = self._tuning
        limit_s = tuning.revocation_timeout_s - tuning.last_commit_timeout_s
        return min(self._settings.drain_timeout_s, limit_s)
