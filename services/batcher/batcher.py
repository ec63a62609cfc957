"""The dynamic batcher: pure rules without I/O; callers pass the time.

A free executor instance pulls the next batch of its model and gets the rows that wait; a busy one
says when it will be free, and its batch closes just in time. Batches do not wait to fill unless
the model has a `max_queue_delay_ms`. Limits count rows, not requests. A request's rows stay
together, and a request that alone exceeds the limits runs alone.

Requests that are expired, would be late, were cancelled, or belong to a revoked partition end
instead of joining a batch; the caller collects them from `ended`. The order of requests is in
`headrace.services.batcher.model_queue`, and refusals are in `headrace.services.batcher.admission`.

All times here are of a steady clock that is never set: `arrived_us` and `due_us` of a request,
`now_us` of a call. A deadline arrives as wall-clock time and is converted when its request
arrives; if the wall clock is set later, waiting requests keep the time they had left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple, TypeAlias

from headrace.delivery.cancelling import cancelled_failure, find_cancelled
from headrace.delivery.failures import REVOKED, deadline_exceeded, rejection
from headrace.errors import Rejected
from headrace.protocol.messages import (
    Batch,
    BatchSummary,
    Envelope,
    Failure,
    IngestedRequest,
    Request,
)
from headrace.services.batcher.admission import late_refusal
from headrace.services.batcher.fair_queue import BatchLimits, Fifo, ShapeGroup, TenantQueue
from headrace.services.batcher.model_queue import ModelQueue
from headrace.topics import Stage
from headrace.transport.channels import IDLE, Demand, ModelKey
from headrace.transport.rebinding import Rebind, refuse_to_rebind
from headrace.tuning import TUNING, BatcherTuning

_Deadline: TypeAlias = tuple[int, int]
"""Heap entry: deadline in microseconds, and the number of the request."""


class Deadlines:
    """Deadlines of the waiting requests, the earliest first.

    The deadline of a request that no longer waits stays in the heap until it is first, or until
    there are many such deadlines: they may be hours away. The request itself does not: its value
    and its outputs would stay in memory, which no budget counts any more.

    Args:
        max_stale: deadlines of requests that no longer wait to keep before they are removed.

    Attributes:
        waiting: the requests, by their numbers.
    """

    def __init__(self, max_stale: int) -> None:
        self._max_stale = max_stale
        self._numbers = count(1)
        self._heap: list[_Deadline] = []
        self.waiting: dict[int, Request] = {}

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests whose `due_us` is set."""
        heap, waiting, numbers = self._heap, self.waiting, self._numbers
        if len(heap) > 2 * len(waiting) + self._max_stale:
            heap[:] = [entry for entry in heap if entry[1] in waiting]
            heapq.heapify(heap)
        for request in requests:
            number = request.deadline_number = next(numbers)
            waiting[number] = request
            heapq.heappush(heap, (request.due_us, number))

    def remove(self, requests: Sequence[Request]) -> None:
        """Remove those of the requests that are there: they no longer wait."""
        waiting = self.waiting
        for request in requests:
            if request.deadline_number in waiting:
                del waiting[request.deadline_number]

    def earliest_us(self) -> int | None:
        """Return the earliest deadline of the waiting requests; None if none has one."""
        heap = self._heap
        while heap and heap[0][1] not in self.waiting:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_passed(self, now_us: int) -> Iterator[Request]:
        """Remove and return the waiting requests whose deadlines have passed."""
        while self._heap and self._heap[0][0] <= now_us:
            _, number = heapq.heappop(self._heap)
            request = self.waiting.pop(number, None)
            if request is not None:
                yield request


def _scan_similar(requests: Sequence[IngestedRequest], start: int) -> tuple[int, bool]:
    """Return the end of the run of requests like the first, and whether any has a deadline."""
    first = requests[start]
    model, version, shape_class = first.model, first.version, first.shape_class
    envelope = first.envelope
    tenant, priority = envelope.tenant, envelope.priority
    has_deadline = bool(envelope.deadline_ms)
    for place in range(start + 1, len(requests)):
        request = requests[place]
        if request.envelope is not envelope:
            envelope = request.envelope
            if envelope.tenant != tenant or envelope.priority != priority:
                return place, has_deadline
            has_deadline = has_deadline or envelope.deadline_ms > 0
        if (
            request.model != model
            or request.version != version
            or request.shape_class != shape_class
        ):
            return place, has_deadline
    return len(requests), has_deadline


class DynamicBatcher:
    """Queues of requests that wait for an executor, and the batches formed from them.

    Args:
        limits: returns the limits of a model version; raises `Rejected` if it is not served.
        prefix: prefix of batch ids; differs between processes.
        rebind: binds a request whose version has gone to another one, or raises `Rejected`.

    Attributes:
        wall_ahead_us: wall clock minus steady clock; kept up to date by the owner.
        ended: requests that ended while they waited.
        cancellations: records that cancel requests, for `cancel`; they do not wait.
        is_draining: no more requests arrive, so batches close at once.
    """

    def __init__(
        self,
        limits: Callable[[str, str], BatchLimits],
        prefix: str,
        rebind: Rebind = refuse_to_rebind,
        tuning: BatcherTuning = TUNING.batcher,
    ) -> None:
        self._tuning = tuning
        self._limits = limits
        self._rebind = rebind
        self._prefix = prefix
        self._numbers = count(1)
        self._queues: dict[ModelKey, ModelQueue] = {}
        self._deadlines = Deadlines(tuning.max_stale_deadlines)
        self.wall_ahead_us = 0
        self.ended: list[Request] = []
        self.cancellations: list[Request] = []
        self.is_draining = False

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return sum([queue.count for queue in self._queues.values()])

    def has_waiting(self, key: ModelKey) -> bool:
        """Return whether requests wait for a version."""
        queue = self._queues.get(key)
        return queue is not None and queue.count > 0

    # --- arrivals -----------------------------------------------------------------------------

    def add(self, request: Request, now_us: int | None = None) -> None:
        """Queue a request; end it instead if its model has gone or it would be late.

        Args:
            request: a request that can run.
            now_us: arrival time; by default the time when it was read.
        """
        request.arrived_us = request.ingested_us if now_us is None else now_us
        key = (request.model, request.version)
        queue = self._queues.get(key)
        if queue is None or not queue.count:
            queue = self._open_queue(key, queue, request)
            if queue is None:
                return
        deadline_ms = request.envelope.deadline_ms
        if deadline_ms:
            request.due_us = self._due_us(deadline_ms)
            if queue.rate.row_us and queue.count:
                failure = self._refusal(queue, request, request.arrived_us)
                if failure is not None:
                    request.fail(failure)
                    self.ended.append(request)
                    return
            # After the refusal: the deadline of a request that does not wait is no event.
            self._deadlines.add((request,))
        queue.add(request)

    def add_all(self, requests: Sequence[Request], now_us: int) -> None:
        """Add requests in order, runs of similar ones together; see `add`."""
        start = 0
        while start < len(requests):
            stop, has_deadline = _scan_similar(requests, start)
            first, more = requests[start], requests[start + 1 : stop]
            self.add(first, now_us)
            waits = first.failure is None
            if more and not (waits and self._add_similar(more, now_us, has_deadline=has_deadline)):
                for request in more:
                    self.add(request, now_us)
            start = stop

    def refusal(self, envelope: Envelope, now_us: int, stage: str, rows: int = 0) -> Failure | None:
        """Return why a request that names its model in its headers would be late, before its
        value is read; None if it may be in time.

        Args:
            envelope: the request's headers.
            now_us: epoch microseconds.
            stage: the calling stage.
            rows: rows ahead of it besides those that wait here.
        """
        found = [
            queue
            for (model, version), queue in self._queues.items()
            if model == envelope.model and envelope.version in ("", version)
        ]
        if len(found) != 1 or not envelope.deadline_ms or not found[0].rate.row_us:
            return None
        end_us = found[0].predict_end_us(envelope, None, now_us, rows)
        return late_refusal(self._due_us(envelope.deadline_ms), end_us, now_us, stage)

    def cancel(self) -> tuple[list[Request], int]:
        """End the waiting requests named by `cancellations`.

        Return the cancelling records and the number of requests ended. A request that no longer
        waits goes on.
        """
        cancelling, self.cancellations = self.cancellations, []
        waiting = (each for queue in self._queues.values() for each in queue.waiting())
        found = find_cancelled(cancelling, waiting)
        for request in found:
            self._end(request, cancelled_failure(Stage.BATCHER))
        return cancelling, len(found)

    def refuse(self, key: ModelKey, failure: Failure) -> None:
        """End all requests that wait for a version."""
        queue = self._queues.get(key)
        for request in [] if queue is None else queue.waiting():
            self._end(request, failure)

    def reassign(self, key: ModelKey) -> None:
        """Decide anew about all requests that wait for a version, since it has gone.

        They keep their age and their deadlines. One that no other version takes has ended
        afterwards.
        """
        queue = self._queues.pop(key, None)
        if queue is None:
            return
        waiting = sorted(queue.waiting(), key=lambda one: one.arrived_us)
        self._deadlines.remove(waiting)
        for request in waiting:
            self.add(request, request.arrived_us)

    def renew_limits(self, key: ModelKey) -> None:
        """Apply the limits of a version to the requests that wait for it, if they have changed:
        the files or the configuration of its number have been loaded anew.
        """
        queue = self._queues.get(key)
        if queue is None or not queue.count:
            return
        try:
            limits = self._limits(*key)
        except Rejected:
            return
        if limits is not queue.limits:
            self.reassign(key)

    # --- batches ------------------------------------------------------------------------------

    def next(self, key: ModelKey | None, now_us: int, demand: Demand = IDLE) -> Batch | None:
        """Close and return the next batch of a model (None: any model), or None if none is due.

        Args:
            key: the model's name and version.
            now_us: microseconds of the steady clock.
            demand: whether the instance is idle now, will be at a given time, or pulls for the last
                time, when no request may wait any longer.
        """
        # Expire first, so that no batch is formed around a request that is already late: it would
        # cut the batch to a size that is in time for it.
        self.expire(now_us)
        if self.is_draining:
            demand = demand._replace(is_last=True)
        while (each := self._next_ready(key, now_us, demand)) is not None:
            batch = self._close(*each, now_us, demand)
            if batch is not None:
                return batch
        return None

    def expire(self, now_us: int) -> None:
        """End every request whose deadline has passed."""
        for request in self._deadlines.pop_passed(now_us):
            late_ms = (now_us - request.due_us) / 1000
            deadline_ms = request.envelope.deadline_ms
            self._end(request, deadline_exceeded(deadline_ms, late_ms, Stage.BATCHER))

    def ensure_served(self, request: Request) -> bool:
        """Rebind a request whose version is not served any more; return False if it has ended,
        because no other version takes it.
        """
        return self._limits_of(request) is not None

    # --- queries ------------------------------------------------------------------------------

    def next_event_us(self, now_us: int) -> int | None:
        """Return when the next deadline or queue delay is due without new arrivals; None: never.

        A batch that is already due waits for a consumer and is no event. A deadline is one until
        `expire` has handled it.
        """
        next_us = self._deadlines.earliest_us()
        for queue in self._queues.values():
            if queue.count and (due_us := queue.due_us()) is not None and due_us > now_us:
                next_us = due_us if next_us is None else min(due_us, next_us)
        return next_us

    def earliest_deadline_us(self) -> int | None:
        """Return the earliest deadline of the waiting requests; None if none has one."""
        return self._deadlines.earliest_us()

    # --- inside -------------------------------------------------------------------------------

    def _due_us(self, deadline_ms: int) -> int:
        return deadline_ms * 1000 - self.wall_ahead_us or 1  # 0 would be none

    def _open_queue(
        self, key: ModelKey, known: ModelQueue | None, request: Request
    ) -> ModelQueue | None:
        """Return the queue for the first request of a model version, which may have changed.

        None if the request does not wait. The request may be rebound to another version.
        """
        if request.envelope.cancels is not None:
            self.cancellations.append(request)
            return None
        limits = self._limits_of(request)
        bound = (request.model, request.version)
        if limits is None or bound != key:
            self._queues.pop(key, None)
            if limits is None:
                return None
            key, known = bound, self._queues.get(bound)
        # A queue with requests keeps the limits that it has: a new one would lose them.
        if known is None or (known.limits is not limits and not known.count):
            known = self._queues[key] = ModelQueue(limits, self._tuning)
        return known

    def _limits_of(self, request: Request) -> BatchLimits | None:
        """Return the limits of its version, rebinding it if that has gone; None if it ended."""
        try:
            return self._limits(request.model, request.version)
        except Rejected as gone:
            try:
                self._rebind(request, gone)
                return self._limits(request.model, request.version)
            except Rejected as error:
                request.fail(rejection(error, Stage.BATCHER))
                self.ended.append(request)
                return None

    def _add_similar(self, requests: Sequence[Request], now_us: int, *, has_deadline: bool) -> bool:
        """Add requests similar to the waiting one added before, some of which have deadlines if
        `has_deadline`. Return False if each must be added and checked singly.
        """
        first = requests[0]
        queue = self._queues.get((first.model, first.version))
        if queue is None or not queue.count or first.envelope.cancels is not None:
            return False
        rows = 0
        for request in requests:
            request.arrived_us = now_us
            rows += request.rows
        with_deadline: list[Request] = []
        if has_deadline:
            for one in requests:
                if deadline_ms := one.envelope.deadline_ms:
                    one.due_us = self._due_us(deadline_ms)
                    with_deadline.append(one)
        if with_deadline:
            if queue.rate.row_us:
                # One check for all: if the most urgent one is in time behind all of them, none has
                # to be refused. Otherwise each is checked with the rows ahead of it alone.
                least_us = min([one.due_us for one in with_deadline]) - now_us
                if not queue.is_in_time(rows, least_us):
                    return False
            self._deadlines.add(with_deadline)
        queue.add_similar(requests, rows, with_deadline)
        return True

    def _refusal(self, queue: ModelQueue, request: Request, now_us: int) -> Failure | None:
        """Return why the rows ahead and its own run make a request late; None if they do not."""
        if queue.is_in_time(0, request.due_us - now_us):
            return None
        end_us = queue.predict_end_us(request.envelope, request, now_us)
        return late_refusal(request.due_us, end_us, now_us, Stage.BATCHER)

    def _next_ready(
        self, key: ModelKey | None, now_us: int, demand: Demand
    ) -> tuple[ModelQueue, ShapeGroup] | None:
        """Return the most urgent group that may close; None if there is none."""
        ready: list[tuple[ModelQueue, ShapeGroup]] = []
        for each in list(self._queues) if key is None else [key]:
            queue = self._queues.get(each)
            if queue is None:
                continue
            group = queue.next_ready(now_us, demand)
            if group is not None:
                ready.append((queue, group))
            elif demand.is_last:
                del self._queues[each]  # the last pull for this version
        if len(ready) > 1:
            return min(ready, key=lambda one: one[0].urgency_us())
        return ready[0] if ready else None

    def _end(self, request: Request, failure: Failure) -> None:
        request.fail(failure)
        self._deadlines.remove((request,))
        self._queues[request.model, request.version].end(request)
        self.ended.append(request)

    def _close(
        self, queue: ModelQueue, group: ShapeGroup, now_us: int, demand: Demand
    ) -> Batch | None:
        # First, because it depends on everything that waits, and on the backlog at the last close.
        size = choose_size(queue, group, now_us, demand)
        overtakes = demand.close_at_us > now_us and queue.overtakes(group)
        builder = BatchBuilder(queue, group, size, now_us, now_us + self.wall_ahead_us)
        built = builder.build(self._partial_reason(group, demand))
        self.ended += built.ended
        if self._deadlines.waiting:
            self._deadlines.remove(built.requests)
            self._deadlines.remove(built.ended)
        # All requests of the group may have been refused or revoked; `next` then tries another.
        if not built.requests:
            if not queue.count:
                queue.rate.stop_measuring()
            return None
        queue.has_overtaken = overtakes
        batch = Batch(
            f"{self._prefix}-{next(self._numbers)}", built.requests, built.reason, size.end_us
        )
        # Last, because the rate counts the rows that still wait after the batch has left.
        _record_close(queue, group, batch.rows, now_us)
        return batch

    def _partial_reason(self, group: ShapeGroup, demand: Demand) -> str:
        """Return why a batch that is not full closes."""
        if self.is_draining:
            return "drain"
        if demand.close_at_us:
            return "just_in_time"
        return "delay" if group.limits.max_queue_delay_ms else "idle"


def _record_close(queue: ModelQueue, group: ShapeGroup, rows: int, now_us: int) -> None:
    """Let the model's service rate learn from a batch that has just closed."""
    if not queue.rows and queue.rate.is_unknown:
        queue.rate.count_close()
        return
    latency, best = group.limits.latency, group.best_rows
    if latency is None:
        queue.rate.record_close(rows, rows, 1.0, queue.rows, now_us)
        return
    run_us = latency.predict_us(group.shape_class, rows)
    best_us = latency.predict_us(group.shape_class, best)
    if run_us is None or best_us is None:
        queue.rate.stop_measuring()  # rows and microseconds cannot be mixed
    else:
        queue.rate.record_close(rows, run_us, best_us / best, queue.rows, now_us)


class BatchSize(NamedTuple):
    """Size limit of a batch.

    Attributes:
        rows: most rows.
        end_us: predicted end of its run; 0 if unknown.
        min_due_us: requests with a deadline before this moment do not join.
        reason: why the batch closes when it reaches `rows`.
    """

    rows: int
    end_us: int
    min_due_us: int
    reason: str


class BuiltBatch(NamedTuple):
    """The requests of a batch, the requests that ended instead of joining, and why it closed."""

    requests: list[Request]
    ended: list[Request]
    reason: str


def choose_size(queue: ModelQueue, group: ShapeGroup, now_us: int, demand: Demand) -> BatchSize:
    """Return the size with the best throughput that the deadlines allow.

    If all waiting requests fit into one batch, but the most urgent one would be late in it, the
    batch is cut to be in time for that request. With a backlog, now or at the last close, it is
    not: small batches take longer per row and would make every request late, so the most urgent
    ones are given up.
    """
    group.update_best_rows()
    limits, rows = group.limits, group.best_rows
    latency = limits.latency
    if latency is None:
        return BatchSize(rows, 0, 0, "full")
    if group.rows > rows and queue.rate.explores_larger:
        rows = min(2 * rows, limits.max_batch_size)
    elif group.rows > rows and queue.rate.explores_smaller:
        rows = max(1, rows // 2)
    starts_us = max(now_us, demand.close_at_us)
    run_us = latency.predict_us(group.shape_class, min(rows, group.rows))
    if run_us is None:
        return BatchSize(rows, 0, 0, "full")
    # A backlog at the last close counts as well: under load more requests arrive during the run,
    # and a small batch would make them late.
    has_time = group.rows <= rows and not queue.rate.has_backlog
    tenant_queue = group.next_queue() if has_time else None
    due_us = 0 if tenant_queue is None else tenant_queue.earliest_due_us()
    slack_us = due_us - starts_us
    if due_us and slack_us < run_us:
        fitting = latency.best_rows(group.shape_class, group.rows, slack_us)
        fitting_us = latency.predict_us(group.shape_class, fitting) or 0
        if fitting_us <= slack_us:
            return BatchSize(fitting, starts_us + fitting_us, starts_us + fitting_us, "deadline")
    end_us = starts_us + run_us
    # While other requests wait for its place, a request must be in time by the margin as well.
    min_due_us = end_us + latency.margin_us if group.rows > rows else end_us
    return BatchSize(rows, end_us, min_due_us, "full")


class BatchBuilder:
    """Take requests out of a group until the batch is full or the group is empty.

    Args:
        queue, group: the model's queue and the group to take from.
        size: see `choose_size`.
        now_us: microseconds of a steady clock.
        formed_us: the same moment in epoch microseconds.
    """

    def __init__(
        self, queue: ModelQueue, group: ShapeGroup, size: BatchSize, now_us: int, formed_us: int
    ) -> None:
        self._queue = queue
        self._group = group
        self._size = size
        self._now_us = now_us
        self._summary = BatchSummary(formed_us)  # one for all requests of the batch
        self._rows = 0
        self._size_bytes = 0
        self._requests: list[Request] = []
        self._ended: list[Request] = []
        self._late: list[tuple[Request, Failure]] = []

    def build(self, partial_reason: str) -> BuiltBatch:
        """Build the batch.

        Args:
            partial_reason: why the batch closes if it does not reach its size limit.
        """
        reason = self._fill() or partial_reason
        if not self._requests and self._late:
            # Run one late request if there is no other: only a run can correct the prediction, and
            # a wrong one would otherwise refuse every request from now on.
            request, _ = self._late.pop()
            request.batch = self._summary
            self._requests.append(request)
        for request, failure in self._late:
            request.fail(failure)
            self._ended.append(request)
        return BuiltBatch(self._requests, self._ended, reason)

    def _fill(self) -> str:
        """Take requests in their order; return why the batch closes, or "" if it may still grow."""
        group = self._group
        reason = ""
        # The order may change with each request: tenants get equal numbers of rows, and an aged
        # request of low priority passes a new one of high priority. So one request is taken at a
        # time, unless there is only one queue to take from.
        while not reason and (tenant_queue := group.next_queue()) is not None:
            is_only = len(group.queues) == 1 and len(tenant_queue.fifos) == 1
            reason = self._take_from(
                tenant_queue, tenant_queue.next_fifo(), tenant_queue.count if is_only else 1
            )
        if reason:
            return reason
        return self._size.reason if self._rows >= self._size.rows else ""

    def _take_from(self, tenant_queue: TenantQueue, fifo: Fifo, most: int) -> str:
        """Take up to `most` requests; return why nothing more fits, or ""."""
        queue, requests, summary = self._queue, self._requests, self._summary
        max_rows, max_bytes = self._size.rows, self._group.limits.max_batch_bytes
        joined_rows, joined_bytes = self._rows, self._size_bytes
        count = rows = size_bytes = 0
        reason = ""
        waiting, deadlines = fifo.requests, fifo.deadlines
        while count < most and waiting:
            request = waiting[0]
            if request.failure is not None:
                fifo.first()  # it ended while it waited, and is no longer counted
                continue
            row_count, byte_count = request.rows, request.size_bytes
            # The first request always joins: one that alone exceeds the limits runs alone.
            if requests and joined_rows + row_count > max_rows:
                reason = self._size.reason
                break
            if requests and joined_bytes + byte_count > max_bytes:
                reason = "bytes"
                break
            # Before it is known whether it joins: if it has ended or would be late, it leaves too.
            waiting.popleft()
            if deadlines and deadlines[0] is request:
                deadlines.popleft()
            count += 1
            rows += row_count
            size_bytes += byte_count
            needs_check = request.due_us or request.ack_handle.assignment.revoked
            if not needs_check or self._accepts(request):
                request.batch = summary
                requests.append(request)
                joined_rows += row_count
                joined_bytes += byte_count
        # Before the removal: it may leave one tenant, for which no service is counted.
        if queue.has_several_tenants and joined_rows > self._rows:
            queue.fair_queue.record_served(tenant_queue.tenant, joined_rows - self._rows)
        self._rows, self._size_bytes = joined_rows, joined_bytes
        queue.count_removed(tenant_queue, fifo, count, rows, size_bytes)
        return reason

    def _accepts(self, request: Request) -> bool:
        """Return True if the request may join; otherwise it has ended, or would be late."""
        if request.ack_handle.revoked:
            request.fail(REVOKED)
            self._ended.append(request)
            return False
        due_us, end_us = request.due_us, self._size.min_due_us
        if not due_us or due_us >= end_us:
            return True
        failure = late_refusal(due_us, end_us, self._now_us, Stage.BATCHER)
        assert failure is not None
        self._late.append((request, failure))
        return False
