"""Requests of a model over its share of the budget: left in the log, and read again later.

A model that cannot keep up would fill the budget with its requests, and nothing else would be read.
So a request whose model, or tenant, is over its share (`headrace.delivery.budget`) is *deferred*:
its bytes are released, and its offset stays unanswered. Reading continues behind it. When its share
has room again, the record is read a second time, by a separate reader. This reader is in no group
and commits nothing; it is open only while records are deferred. `Deferral` decides which requests
are deferred, `DeferredRecords` which of them are read again, and `Rereading` reads them.

- A share that reaches its limit gets a short time first: a model that keeps up has room by then,
  and no record of its queue is read twice.
- As long as requests of a share are deferred, later ones of it are too, so they do not overtake.
- A request whose deadline passes while it is deferred is read again then, to be answered; so is
  one that would be late, as far as can be predicted, to be refused.
- A partition with `max_deferred_records` of them is paused alone, which bounds how far it is read
  ahead.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, groupby
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import structlog

from headrace.clock import wall_clock_us
from headrace.consumer.ready_queue import PolledRecords, ReadyQueue
from headrace.delivery.budget import BudgetShares, Share
from headrace.delivery.inflight import AssignedPartition, Deferred, InFlightAck
from headrace.errors import Retriable
from headrace.log.errors import OffsetOutOfRange
from headrace.log.port import Consumer, Gap, Log, Record, TopicPartition
from headrace.primitives.backoff import Backoff, Pauses
from headrace.protocol.messages import Envelope, Failure, Request
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.tuning import TUNING, ConsumerTuning

log = structlog.get_logger(__name__)

Refusal: TypeAlias = Callable[[Envelope, int], Failure | None]
"""Returns why a request with this envelope, behind so many deferred rows, would be late; see
`headrace.services.batcher.batcher.DynamicBatcher.refusal`."""


class Charged(NamedTuple):
    """Requests after an attempt to charge them. None is acknowledged yet.

    Attributes:
        kept: have room. The caller passes them on; their answers acknowledge them.
        over: their share has no room. The caller passes them to `wait_for_room`.
        ended: would be late, and have a failure. The caller passes them to the responder, which
            acknowledges them once their error answers are written.
    """

    kept: list[Request]
    over: list[Request]
    ended: list[Request]


class DeferredRecords:
    """Records that are left in the log, and the rule for when each is read again.

    A record is read again when its share has room, when its deadline passes, or when it would be
    late. Synchronous; times are passed in.

    Args:
        shares: shares of the budget of the source.
        refusal: returns the failure of a request that would be late; None if nothing is predicted.
    """

    def __init__(
        self, shares: BudgetShares, refusal: Refusal | None, tuning: ConsumerTuning
    ) -> None:
        self._shares = shares
        self._refusal = refusal
        self._tuning = tuning
        self._waiting: dict[Share, deque[Deferred]] = {}
        self._deadlines: list[tuple[int, int, Deferred]] = []
        self._order = count()
        self._prune_at = tuning.deadline_prune_at
        self._late: dict[tuple[AssignedPartition, int], Failure] = {}
        self._predicted_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, deferred: Deferred, now_s: float) -> None:
        """Add a record; `now_s` is monotonic."""
        deferred.share.deferred_records += 1
        deferred.share.deferred_s = now_s
        self._waiting.setdefault(deferred.share, deque()).append(deferred)
        self._note_deadline(deferred)

    def partitions(self) -> set[TopicPartition]:
        """Return the partitions that have deferred records which are not being read again."""
        return {each.assignment.partition for some in self._waiting.values() for each in some}

    def rows(self, share: Share) -> int:
        """Return the number of rows of a share's deferred records."""
        return sum([each.rows for each in self._waiting.get(share, ())])

    def pop_failure(self, assignment: AssignedPartition, offset: int) -> Failure | None:
        """Return the failure of a record that is read again because it would be late, once; None
        if it is read again for another reason.
        """
        return self._late.pop((assignment, offset), None)

    def forget_revoked(self) -> None:
        """Forget records of revoked partitions: the next owner reads them from the log."""
        for share, waiting in list(self._waiting.items()):
            left = deque(each for each in waiting if not _is_gone(each))
            share.deferred_records -= len(waiting) - len(left)
            self._waiting[share] = left
            if not left:
                del self._waiting[share]
        self._drop_gone_deadlines()
        self._late = {each: failure for each, failure in self._late.items() if not each[0].revoked}

    def pick(self, now_us: int, now_s: float) -> dict[AssignedPartition, list[Deferred]]:
        """Return the records to read again now, in offset order, and reserve their room.

        Args:
            now_us: wall-clock time, in which deadlines are given.
            now_s: monotonic time, in which the interval of predictions is measured.
        """
        # Overdue records before those with room: they must be answered whether there is room or
        # not, and what they reserve is then no room for others.
        picked = self._pick_due(now_us)
        if (
            self._refusal is not None
            and now_s - self._predicted_s >= self._tuning.refusal_interval_s
        ):
            self._predicted_s = now_s
            picked += self._pick_late(self._refusal)
        for deferred in picked:
            self._waiting[deferred.share].remove(deferred)
        # Oldest first, and none past one that has no room: a share's requests do not overtake.
        for share, waiting in self._waiting.items():
            while waiting and self._has_room(share, waiting[0].size_bytes):
                deferred = waiting.popleft()
                deferred.reserve()
                picked.append(deferred)
        self._waiting = {share: waiting for share, waiting in self._waiting.items() if waiting}
        found: dict[AssignedPartition, list[Deferred]] = {}
        for deferred in picked:
            deferred.share.deferred_records -= 1
            found.setdefault(deferred.assignment, []).append(deferred)
        return {each: sorted(some, key=_offset) for each, some in found.items()}

    def put_back(self, unread: Iterable[Deferred]) -> None:
        """Put back records that were picked and could not be read."""
        for deferred in unread:
            deferred.release()
            if _is_gone(deferred):
                continue
            deferred.share.deferred_records += 1
            waiting = self._waiting.get(deferred.share, ())
            self._waiting[deferred.share] = deque(sorted([*waiting, deferred], key=_offset))
            if not deferred.is_noted:
                self._note_deadline(deferred)

    def _has_room(self, share: Share, size_bytes: int) -> bool:
        return self._shares.has_room(share, size_bytes, uncharged_bytes=size_bytes)

    def _note_deadline(self, deferred: Deferred) -> None:
        if deadline_ms := deferred.envelope.deadline_ms:
            entry = (deadline_ms * 1000, next(self._order), deferred)
            heapq.heappush(self._deadlines, entry)
            deferred.is_noted = True
        if len(self._deadlines) >= self._prune_at:
            # Most records are read again long before their deadlines, which may be years away.
            self._drop_gone_deadlines()
            self._prune_at = max(self._tuning.deadline_prune_at, 2 * len(self._deadlines))

    def _drop_gone_deadlines(self) -> None:
        self._deadlines = [entry for entry in self._deadlines if not _is_gone(entry[2])]
        heapq.heapify(self._deadlines)

    def _pick_due(self, now_us: int) -> list[Deferred]:
        """Pick overdue records, as many as may be read at a time."""
        due: list[Deferred] = []
        left_bytes = self._shares.limit_bytes * self._tuning.overdue_fraction
        while self._deadlines and self._deadlines[0][0] <= now_us and left_bytes > 0:
            deferred = heapq.heappop(self._deadlines)[2]
            deferred.is_noted = False
            if not deferred.is_reserved and not _is_gone(deferred):
                deferred.reserve()
                left_bytes -= deferred.size_bytes
                due.append(deferred)
        return due

    def _pick_late(self, refusal: Refusal) -> list[Deferred]:
        """Pick records that would be late behind all that is deferred before them."""
        # A record that was read again and ended for another reason was never looked up here.
        self._late = {
            place: failure for place, failure in self._late.items() if place[1] in place[0].deferred
        }
        late: list[Deferred] = []
        left_bytes = self._shares.limit_bytes * self._tuning.overdue_fraction
        for waiting in self._waiting.values():
            rows = 0
            for deferred in waiting:
                if left_bytes <= 0:
                    return late
                if deferred.is_reserved:
                    continue
                failure = None
                if deferred.envelope.deadline_ms:
                    failure = refusal(deferred.envelope, rows)
                if failure is None:
                    rows += deferred.rows
                    continue
                self._late[deferred.assignment, deferred.offset] = failure
                deferred.reserve()
                left_bytes -= deferred.size_bytes
                late.append(deferred)
        return late


class Deferral:
    """Admission to a model's or tenant's share of the budget: decides which requests are deferred.

    Three objects divide the work: `headrace.delivery.budget.BudgetShares` says how much a share may
    hold, this class defers the requests above it, and `DeferredRecords` says when each is read
    again; `Rereading` reads them.

    Args:
        shares: shares of the budget of the source.
        refusal: returns the failure of a request that would be late; None if nothing is predicted.

    Attributes:
        records: the deferred records.
    """

    def __init__(
        self,
        shares: BudgetShares,
        refusal: Refusal | None = None,
        tuning: ConsumerTuning = TUNING.consumer,
    ) -> None:
        self.shares = shares
        self.records = DeferredRecords(shares, refusal, tuning)
        self._refusal = refusal
        self._tuning = tuning
        self._wanted = asyncio.Event()
        self._freed = asyncio.Event()

    # --- admission ----------------------------------------------------------------------------

    def charge(
        self, requests: Sequence[Request], *, is_reread: bool, is_isolated: bool = False
    ) -> Charged:
        """Charge requests to their shares if there is room, and fail those that would be late.

        Args:
            requests: admitted requests, in offset order.
            is_reread: they were deferred before, and their room is reserved.
            is_isolated: they run alone for crash isolation, whether there is room or not.
        """
        ended: list[Request] = []
        if is_reread:
            requests, ended = self._fail_late(requests)
        kept, over = self._charge_shares(requests, free=is_reread or is_isolated)
        if over and self._refusal is not None:
            over, late = self._refuse(over, self._refusal)
            ended += late
        return Charged(kept, over, ended)

    def charge_again(self, request: Request, *, is_reread: bool) -> Charged:
        """Charge a request whose model has become known to the share of that model instead."""
        ack_handle = request.ack_handle
        if isinstance(ack_handle, InFlightAck) and ack_handle.share is not None:
            ack_handle.share.charge(-ack_handle.size_bytes)
            ack_handle.share = None
        return self.charge([request], is_reread=is_reread)

    def _charge_shares(
        self, requests: Sequence[Request], *, free: bool
    ) -> tuple[list[Request], list[Request]]:
        kept: list[Request] = []
        over: list[Request] = []
        model, tenant, share = "", "", None
        # What is known to have room is charged together.
        room, taken = 0.0, 0
        charged: InFlightAck | None = None
        refused: InFlightAck | None = None
        for request in requests:
            ack_handle = request.ack_handle
            envelope = request.envelope
            if type(ack_handle) is not InFlightAck or ack_handle is charged:
                # A record that was not admitted, or another request of the record before.
                kept.append(request)
                continue
            if envelope.cancels is not None and envelope.fault is None:
                kept.append(request)  # it is done at once, and later it would find nothing
                continue
            if ack_handle is refused:
                over.append(request)
                continue
            if share is None or request.model != model or envelope.tenant != tenant:
                if share is not None:
                    share.charge(taken)
                model, tenant, taken = request.model, envelope.tenant, 0
                share = self.shares.share(model, tenant)
                room = self._room(share, free=free)
            size_bytes = ack_handle.size_bytes
            if size_bytes > room:
                share.charge(taken)
                taken = 0
                if share.deferred_records or not self.shares.has_room(share, size_bytes):
                    refused = ack_handle
                    over.append(request)
                    continue
                room = self._room(share, free=free)
            room -= size_bytes
            taken += size_bytes
            ack_handle.share = share
            charged = ack_handle
            kept.append(request)
        if share is not None:
            share.charge(taken)
        return kept, over

    def _room(self, share: Share, *, free: bool) -> float:
        """Return how many bytes a share may take without a further look at what it holds."""
        if free:
            return math.inf
        return -math.inf if share.deferred_records else self.shares.room(share)

    def _refuse(
        self, requests: Sequence[Request], refusal: Refusal
    ) -> tuple[list[Request], list[Request]]:
        """Fail requests that would be late behind all that is deferred before them."""
        runnable: list[Request] = []
        ended: list[Request] = []
        rows_ahead: dict[Share, int] = {}
        for request in requests:
            share = self.shares.share(request.model, request.envelope.tenant)
            if share not in rows_ahead:
                rows_ahead[share] = self.records.rows(share)
            failure = None
            if request.envelope.deadline_ms:
                failure = refusal(_refusal_envelope(request), rows_ahead[share])
            if failure is None:
                rows_ahead[share] += request.rows
                runnable.append(request)
            else:
                ended.append(_fail(request, failure))
        return runnable, ended

    def _fail_late(self, requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """Fail requests that were read again because they would be late."""
        runnable: list[Request] = []
        ended: list[Request] = []
        for ack_handle, chunk in _by_record(requests):
            failure = self.records.pop_failure(ack_handle.assignment, ack_handle.offset)
            # The prediction was for the earliest deadline in the record.
            deadline_ms = _most_urgent(chunk).envelope.deadline_ms
            for request in chunk:
                if failure is None or request.envelope.deadline_ms != deadline_ms:
                    runnable.append(request)
                else:
                    ended.append(_fail(request, failure))
        return runnable, ended

    async def wait_for_room(self, requests: Sequence[Request]) -> list[Request]:
        """Wait a short time for room, and defer the requests that got none; return the others."""
        kept: list[Request] = []
        over = list(requests)
        try:
            async with asyncio.timeout(self._tuning.deferral_grace_s):
                while over and not self._is_saturated(over[0]):
                    self._freed.clear()
                    await self._freed.wait()
                    more, over = self._charge_shares(over, free=False)
                    kept += more
        except TimeoutError:
            pass
        for ack_handle, chunk in _by_record(over):
            self._defer(ack_handle, chunk)
        return kept

    def _is_saturated(self, request: Request) -> bool:
        share = self.shares.share(request.model, request.envelope.tenant)
        recently_s = time.monotonic() - self._tuning.saturated_s
        return share.deferred_records > 0 or share.deferred_s > recently_s

    def _defer(self, ack_handle: InFlightAck, chunk: Sequence[Request]) -> None:
        """Leave a record in the log with all its requests that have not ended."""
        if ack_handle.revoked:
            for request in chunk:
                request.ack_handle.ack()
            return
        request = _most_urgent(chunk)
        share = self.shares.share(request.model, request.envelope.tenant)
        rows = sum([each.rows for each in chunk])
        deferred = ack_handle.defer(share, rows, _refusal_envelope(request))
        self.records.add(deferred, time.monotonic())
        self._wanted.set()

    # --- rereading ----------------------------------------------------------------------------

    def freed(self) -> None:
        """Wake waiting requests: an acknowledgement may have made room."""
        self._freed.set()

    async def wait_deferred(self, timeout_s: float | None = None) -> bool:
        """Wait until something is deferred; return False after a time in which nothing was."""
        if self.records:
            return True
        self._wanted.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._wanted.wait()
        except TimeoutError:
            return False
        return True

    def pick(self) -> dict[AssignedPartition, list[Deferred]]:
        """Return the records to read again now; see `DeferredRecords.pick`."""
        return self.records.pick(wall_clock_us(), time.monotonic())

    def put_back(self, unread: Iterable[Deferred]) -> None:
        """Put back records that were picked and could not be read."""
        self.records.put_back(unread)


def _by_record(requests: Iterable[Request]) -> Iterator[tuple[InFlightAck, list[Request]]]:
    """Yield the requests of each record, which follow each other and share an ack handle."""
    for ack_handle, chunk in groupby(requests, key=_ack_handle):
        assert isinstance(ack_handle, InFlightAck)
        yield ack_handle, list(chunk)


def _most_urgent(requests: Sequence[Request]) -> Request:
    """Return the request with the earliest deadline; the first one if none has a deadline."""
    return min(requests, key=lambda request: request.envelope.deadline_ms or math.inf)


_ack_handle = attrgetter("ack_handle")


def _refusal_envelope(request: Request) -> Envelope:
    """Return the envelope for a refusal, without what only the answer needs."""
    return request.envelope._replace(
        correlation_id=None,
        reply_topic=None,
        traceparent=None,
        tracestate=None,
        model=request.model,
        version=request.version,
    )


def _fail(request: Request, failure: Failure) -> Request:
    request.fail(failure)
    request.value = None  # the caller may send it again: nothing else needs it
    return request


def _offset(deferred: Deferred) -> int:
    return deferred.offset


def _is_gone(deferred: Deferred) -> bool:
    """Return True if its assignment has ended, or no longer defers it."""
    assignment = deferred.assignment
    return assignment.revoked or assignment.deferred.get(deferred.offset) is not deferred


class Rereading:
    """Reads the records that a `Deferral` picks.

    Args:
        deferral: picks records that have room.
        ready: receives the records read.
        is_wanted: returns True if records of a partition may be admitted now.
        on_lost_end: called with a partition and an offset that was read and is now at or beyond
            the end of the log; it may be called again until the partition is reassigned.
        metrics: counts records that the log no longer holds.
    """

    def __init__(
        self,
        deferral: Deferral,
        ready: ReadyQueue,
        is_wanted: Callable[[TopicPartition], bool],
        on_lost_end: Callable[[TopicPartition, int], None],
        metrics: Metrics,
        tuning: ConsumerTuning = TUNING.consumer,
    ) -> None:
        self._deferral = deferral
        self._ready = ready
        self._is_wanted = is_wanted
        self._on_lost_end = on_lost_end
        self._metrics = metrics
        self._tuning = tuning
        self._backoff = Backoff(tuning.retry_first_s, tuning.retry_max_s)

    async def run(self, log_: Log) -> None:
        """Read, until cancelled."""
        pauses = Pauses(self._backoff)
        while True:
            await self._deferral.wait_deferred()
            try:
                await self._read_while_deferred(log_)
                pauses.reset()
            except Retriable as error:
                log.warning(Event.REREADING_DELAYED, reason=str(error))
                await pauses.sleep()

    async def _read_while_deferred(self, log_: Log) -> None:
        """Read with one reader, until a partition that it lacks is added."""
        deferral, records = self._deferral, self._deferral.records
        partitions = sorted(records.partitions())
        async with log_.reader(partitions) as reader:
            reader.pause(partitions)
            while records.partitions() <= set(partitions):
                if not await deferral.wait_deferred(self._tuning.reread_idle_s):
                    return
                await asyncio.sleep(self._tuning.room_check_interval_s)
                if records.partitions() <= set(partitions):
                    await self._read_picked(reader, deferral.pick())

    async def _read_picked(
        self, reader: Consumer, picked: dict[AssignedPartition, list[Deferred]]
    ) -> None:
        """Read the partitions one by one; put back records left unread by an error."""
        try:
            while picked:
                await self._read(reader, *picked.popitem())
        finally:
            for unread in picked.values():
                self._deferral.put_back(unread)

    async def _read(
        self, reader: Consumer, assignment: AssignedPartition, picked: Sequence[Deferred]
    ) -> None:
        partition = assignment.partition
        wanted = {each.offset: each for each in picked}
        reader.resume([partition])
        try:
            try:
                await self._read_all(reader, assignment, wanted)
            except OffsetOutOfRange:
                beginning = (await reader.beginning_offsets([partition]))[partition]
                for offset in [each for each in wanted if each < beginning]:
                    self._lose(wanted.pop(offset))
            # The first lost record is often exactly at the new end, which is in range: only the
            # end shows that it will not come.
            if wanted and not assignment.revoked:
                end = (await reader.end_offsets([partition]))[partition]
                if max(wanted) >= end:
                    self._on_lost_end(partition, max(wanted))
        finally:
            reader.pause([partition])
            self._deferral.put_back(wanted.values())

    async def _read_all(
        self, reader: Consumer, assignment: AssignedPartition, wanted: dict[int, Deferred]
    ) -> None:
        """Read the wanted records, and remove each from `wanted` once found."""
        tuning, partition = self._tuning, assignment.partition
        near, position = tuning.reread_near_offsets, -tuning.reread_near_offsets
        until_s = time.monotonic() + tuning.reread_timeout_s
        while wanted and not assignment.revoked and time.monotonic() < until_s:
            first = min(wanted)
            if not position <= first < position + near:
                reader.seek(partition, first)
                position = first
            polled = await reader.poll(tuning.poll_timeout_s, tuning.max_poll_records)
            records: Sequence[Record] = polled.get(partition, ())
            gaps = [gap for gap in reader.gaps() if gap.partition == partition]
            if not (records or gaps):
                continue
            position = max(
                *[record.offset + 1 for record in records[-1:]], *[gap.end for gap in gaps[-1:]], 0
            )
            found = [record for record in records if record.offset in wanted]
            for record in found:
                del wanted[record.offset]
            if found and self._is_wanted(partition):
                self._ready.put(PolledRecords(assignment, found, is_reread=True))
                self._ready.notify()
            for gap in gaps:
                for offset in [each for each in wanted if gap.first <= each < gap.end]:
                    self._skip_unreadable(wanted.pop(offset), gap)
            for offset in [each for each in wanted if each < position]:
                self._lose(wanted.pop(offset))  # deleted while it was deferred

    def _lose(self, deferred: Deferred) -> None:
        """Skip a record that was deleted while it was deferred; it counts as never read."""
        where, offset = deferred.assignment.partition, deferred.offset
        self._metrics.skipped.inc()
        log.error(Event.RECORDS_SKIPPED, partition=str(where), first=offset, count=1)
        self._skip(deferred)

    def _skip_unreadable(self, deferred: Deferred, gap: Gap) -> None:
        """Skip a record that became unreadable while it was deferred."""
        where, offset = deferred.assignment.partition, deferred.offset
        self._metrics.unreadable(gap._replace(first=offset, end=offset + 1))
        log.error(
            Event.RECORDS_UNREADABLE,
            partition=str(where),
            first=offset,
            count=1,
            code=gap.code,
            reason=gap.reason,
        )
        self._skip(deferred)

    def _skip(self, deferred: Deferred) -> None:
        if self._is_wanted(deferred.assignment.partition):
            skipped = PolledRecords(
                deferred.assignment, (), skipped=deferred.offset, is_reread=True
            )
            self._ready.put(skipped)
            self._ready.notify()
