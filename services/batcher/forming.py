"""The dynamic batcher: pure rules without I/O; callers pass the time.

A free executor instance pulls the next batch of its model and gets the rows that wait; a busy one
says when it will be free, and its batch closes just in time. Batches do not wait to fill unless
the model has a `max_queue_delay_ms`. Limits count rows, not requests. A request's rows stay
together, and a request that alone exceeds the limits runs alone.

Requests that are expired, would be late, were cancelled, or belong to a revoked partition end
instead of joining a batch; the caller collects them from `ended`. The order of requests is in
`headrace.services.batcher.groups`, batch sizes are in `headrace.services.batcher.closing`, and
refusals in `headrace.services.batcher.admission`.

All times here are of a steady clock that is never set: `came_us` and `due_us` of a request,
`now_us` of a call. A deadline arrives as wall-clock time and is converted when its request
arrives; if the wall clock is set later, waiting requests keep the time they had left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeAlias

from headrace.delivery.failures import expiry, rejection
from headrace.errors import Code, Rejected
from headrace.protocol.headers import BY_CORRELATION
from headrace.protocol.messages import Batch, Envelope, Failure, Request
from headrace.services.batcher.admission import too_late
from headrace.services.batcher.closing import Closing, size_of
from headrace.services.batcher.groups import ModelQueue
from headrace.services.batcher.lanes import BatchLimits, Group
from headrace.topics import Stage
from headrace.transport.channels import IDLE, Ask
from headrace.transport.rebinding import Rebind, refuse_to_rebind
from headrace.tuning import TUNING, BatcherTuning

ModelKey = tuple[str, str]
"""A model's name and version."""


_Deadline: TypeAlias = tuple[int, int, Request]
"""Heap entry: deadline in microseconds, a sequence number so that requests are never compared, and
the request."""


def _has_left(entry: _Deadline) -> bool:
    """True if the request has joined a batch or has ended."""
    request = entry[2]
    return bool(request.formed_us) or request.failure is not None


def _end_us(
    queue: ModelQueue, envelope: Envelope, request: Request | None, now_us: int, rows: int = 0
) -> int:
    """Return when a request that arrives now would be done; `now_us` if no rows are ahead of it.

    With two full batches or more ahead, the learned margin is added. With fewer it is not: it
    would leave batches half empty and make everything later, since an instance takes one of them
    ahead. Without a `request`, its own run is left out.
    """
    ahead = queue.rows_ahead(envelope.tenant, envelope.priority) + rows
    if not ahead:
        return now_us
    end_us = now_us + queue.pace.wait_us(ahead, now_us)
    latency, full = queue.limits.latency, queue.limits.max_batch_size
    if latency is None:
        return end_us
    if request is not None:
        end_us += latency.predict_us(request.shape_class, request.rows) or 0
        full = latency.best_rows(request.shape_class, full)
    return end_us + latency.margin_us if ahead >= 2 * full else end_us


def _is_sure(queue: ModelQueue, rows: int, left_us: int) -> bool:
    """True if `left_us` suffices for all waiting rows, `rows` more, and two full batches."""
    limits = queue.limits
    behind_all_us = (queue.rows + rows + 2 * limits.max_batch_size) * queue.pace.row_us
    if limits.latency is not None:
        behind_all_us += limits.latency.margin_us
    return behind_all_us < left_us


def _alike(requests: Sequence[Request], start: int) -> tuple[int, bool]:
    """Return the end of the run of requests like the first, and whether any has a deadline."""
    first = requests[start]
    model, version, shape_class = first.model, first.version, first.shape_class
    envelope = first.envelope
    tenant, priority = envelope.tenant, envelope.priority
    dated = bool(envelope.deadline_ms)
    for place in range(start + 1, len(requests)):
        request = requests[place]
        if request.envelope is not envelope:
            envelope = request.envelope
            if envelope.tenant != tenant or envelope.priority != priority:
                return place, dated
            dated = dated or envelope.deadline_ms > 0
        if (
            request.model != model
            or request.version != version
            or request.shape_class != shape_class
        ):
            return place, dated
    return len(requests), dated


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
        draining: no more requests arrive, so batches close at once.
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
        self._order = count()
        self._queues: dict[ModelKey, ModelQueue] = {}
        self._deadlines: list[_Deadline] = []
        self._keep_deadlines = tuning.max_stale_deadlines
        self.wall_ahead_us = 0
        self.ended: list[Request] = []
        self.cancellations: list[Request] = []
        self.draining = False

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return sum([queue.count for queue in self._queues.values()])

    # --- arrivals -----------------------------------------------------------------------------

    def add(self, request: Request, now_us: int | None = None) -> None:
        """Queue a request; end it instead if its model has gone or it would be late.

        Args:
            request: a request that can run.
            now_us: arrival time; by default the time when it was read.
        """
        request.came_us = request.ingested_us if now_us is None else now_us
        key = (request.model, request.version)
        queue = self._queues.get(key)
        if queue is None or not queue.count:
            queue = self._opened(key, queue, request)
            if queue is None:
                return
        deadline_ms = request.envelope.deadline_ms
        if deadline_ms:
            request.due_us = self._due_us(deadline_ms)
            if queue.pace.row_us and queue.count:
                failure = self._refusal(queue, request, request.came_us)
                if failure is not None:
                    request.fail(failure)
                    self.ended.append(request)
                    return
            self._note_deadline((request.due_us, next(self._order), request))
        queue.add(request)

    def add_all(self, requests: Sequence[Request], now_us: int) -> None:
        """Add requests in order, runs of similar ones together; see `add`."""
        start = 0
        while start < len(requests):
            stop, dated = _alike(requests, start)
            first, more = requests[start], requests[start + 1 : stop]
            self.add(first, now_us)
            waits = first.failure is None
            if more and not (waits and self._add_alike(more, now_us, dated=dated)):
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
        if len(found) != 1 or not envelope.deadline_ms or not found[0].pace.row_us:
            return None
        end_us = _end_us(found[0], envelope, None, now_us, rows)
        return too_late(self._due_us(envelope.deadline_ms), end_us, now_us, stage)

    def cancel(self) -> tuple[list[Request], int]:
        """End the waiting requests named by `cancellations`.

        Return the cancelling records and the number of requests ended. A request that no longer
        waits goes on.
        """
        cancelling, self.cancellations = self.cancellations, []
        names = {
            (each.partition, each.envelope.correlation_id)
            for each in cancelling
            if each.envelope.cancels == BY_CORRELATION
        }
        places = {
            (cancels[1], cancels[2]) for each in cancelling if (cancels := each.envelope.cancels)
        }
        found = [
            request
            for queue in self._queues.values()
            for request in queue.waiting()
            if (request.partition, request.offset) in places
            or (request.partition, request.envelope.correlation_id) in names
        ]
        for request in found:
            self._end(request, Failure(Code.CANCELLED, "the caller cancelled it", Stage.BATCHER))
        return cancelling, len(found)

    # --- batches ------------------------------------------------------------------------------

    def next(self, key: ModelKey | None, now_us: int, ask: Ask = IDLE) -> Batch | None:
        """Close and return the next batch of a model (None: any model), or None if none is due.

        Args:
            key: the model's name and version.
            now_us: microseconds of the steady clock.
            ask: whether the instance is idle now, will be at a given time, or pulls for the last
                time, when no request may wait any longer.
        """
        # Expire first, so that no batch is formed around a request that is already late.
        self.expire(now_us)
        if self.draining:
            ask = ask._replace(at_once=True)
        while (each := self._ripest(key, now_us, ask)) is not None:
            batch = self._close(*each, now_us, ask)
            if batch is not None:
                return batch
        return None

    def expire(self, now_us: int) -> None:
        """End every request whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now_us:
            entry = heapq.heappop(self._deadlines)
            if not _has_left(entry):
                due_us, _, request = entry
                late_ms = (now_us - due_us) / 1000
                self._end(request, expiry(request.envelope.deadline_ms, late_ms, Stage.BATCHER))

    # --- queries ------------------------------------------------------------------------------

    def next_event_us(self, now_us: int) -> int | None:
        """Return when the next deadline or queue delay is due without new arrivals; None: never.

        A batch that is already due waits for a consumer and is no event. A deadline is one until
        `expire` has handled it.
        """
        dues = [due_us for queue in self._queues.values() if (due_us := queue.due_us())]
        times = [due_us for due_us in dues if due_us > now_us]
        deadline_us = self.earliest_deadline_us()
        if deadline_us is not None:
            times.append(deadline_us)
        return min(times, default=None)

    def earliest_deadline_us(self) -> int | None:
        """Return the earliest deadline of the waiting requests; None if none has one."""
        while self._deadlines and _has_left(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # --- inside -------------------------------------------------------------------------------

    def _due_us(self, deadline_ms: int) -> int:
        return deadline_ms * 1000 - self.wall_ahead_us or 1  # 0 would be none

    def is_served(self, request: Request) -> bool:
        """Return True if the request's version is served, or it was rebound to one that is.

        Otherwise the request has ended.
        """
        return self._limits_of(request) is not None

    def _opened(
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
        if known is None or known.limits is not limits:
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

    def _add_alike(self, requests: Sequence[Request], now_us: int, *, dated: bool) -> bool:
        """Add requests similar to the waiting one added before; `dated`: some have deadlines.

        Return False if each must be added and checked singly.
        """
        first = requests[0]
        queue = self._queues.get((first.model, first.version))
        if queue is None or not queue.count or first.envelope.cancels is not None:
            return False
        rows = 0
        for request in requests:
            request.came_us = now_us
            rows += request.rows
        entries: list[_Deadline] = []
        if dated:
            order = self._order
            for one in requests:
                if deadline_ms := one.envelope.deadline_ms:
                    due_us = one.due_us = self._due_us(deadline_ms)
                    entries.append((due_us, next(order), one))
        if entries:
            if queue.pace.row_us and not _is_sure(queue, rows, min(entries)[0] - now_us):
                return False
            self._clear_deadlines()
            for entry in entries:
                heapq.heappush(self._deadlines, entry)
        queue.add_alike(requests, rows, [entry[2] for entry in entries])
        return True

    def _refusal(self, queue: ModelQueue, request: Request, now_us: int) -> Failure | None:
        """Return why the rows ahead and its own run make a request late; None if they do not."""
        if _is_sure(queue, 0, request.due_us - now_us):
            return None
        end_us = _end_us(queue, request.envelope, request, now_us)
        return too_late(request.due_us, end_us, now_us, Stage.BATCHER)

    def _note_deadline(self, entry: _Deadline) -> None:
        self._clear_deadlines()
        heapq.heappush(self._deadlines, entry)

    def _clear_deadlines(self) -> None:
        if len(self._deadlines) > self._keep_deadlines:
            # Drop entries of requests that have left: their deadlines may be hours away.
            self._deadlines = [one for one in self._deadlines if not _has_left(one)]
            heapq.heapify(self._deadlines)
            self._keep_deadlines = 2 * len(self._deadlines) + self._tuning.max_stale_deadlines

    def _ripest(
        self, key: ModelKey | None, now_us: int, ask: Ask
    ) -> tuple[ModelQueue, Group] | None:
        """Return the most urgent group that may close; None if there is none."""
        ripe: list[tuple[ModelQueue, Group]] = []
        for each in list(self._queues) if key is None else [key]:
            queue = self._queues.get(each)
            if queue is None:
                continue
            group = queue.ripest(now_us, ask)
            if group is not None:
                ripe.append((queue, group))
            elif ask.at_once:
                del self._queues[each]  # the last pull for this version
        if len(ripe) > 1:
            return min(ripe, key=lambda one: one[0].urgency_us())
        return ripe[0] if ripe else None

    def _end(self, request: Request, failure: Failure) -> None:
        request.fail(failure)
        self._queues[request.model, request.version].end(request)
        self.ended.append(request)

    def _close(self, queue: ModelQueue, group: Group, now_us: int, ask: Ask) -> Batch | None:
        size = size_of(queue, group, now_us, ask)
        closed = Closing(queue, group, size, now_us, now_us + self.wall_ahead_us).run(
            self._otherwise(group, ask)
        )
        self.ended += closed.ended
        if not closed.requests:
            return None
        batch = Batch(
            f"{self._prefix}-{next(self._numbers)}", closed.requests, closed.reason, size.end_us
        )
        latency, best = group.limits.latency, group.best_rows
        run_us = best_us = None
        if latency is not None:
            run_us = latency.predict_us(group.shape_class, batch.rows)
            best_us = latency.predict_us(group.shape_class, best)
        if latency is None:
            run_us, best_us = batch.rows, best
        if run_us is None or best_us is None:
            queue.pace.idle()  # rows and microseconds cannot be mixed
        else:
            queue.pace.closed(run_us, best_us / best, queue.rows, now_us)
        return batch

    def _otherwise(self, group: Group, ask: Ask) -> str:
        """Return why a batch that is not full closes."""
        if self.draining:
            return "drain"
        if ask.close_at_us:
            return "just_in_time"
        return "delay" if group.limits.max_queue_delay_ms else "idle"
