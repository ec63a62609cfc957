"""Forming batches: pure rules that take the time and know no I/O.

Requests wait in groups of one model, version and shape class. A free executor instance asks for
the next batch of its model and gets what is there, oldest group first: nothing waits for a batch
to fill unless the model has a `max_queue_delay_ms`. Rows are counted, not requests, and a
request's rows stay together; one that alone exceeds the limits runs alone.

A request whose deadline has passed, or whose partition is gone, leaves instead of joining; the
caller collects those from `ended`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from headrace.errors import Rejected
from headrace.flow.channel import IDLE, Ask
from headrace.flow.endings import VOID, deadline_passed, rejection
from headrace.messages import Batch, Failure, Request
from headrace.services.batcher.groups import BatchLimits, Group, ModelQueue
from headrace.topics import Stage

ModelKey = tuple[str, str]
"""A model's name and version."""

_TOLERATED = 64
"""So many deadlines of requests that have left may be kept, before they are cleared away."""


class _Deadline(NamedTuple):
    """An entry of the heap of deadlines; `order` keeps requests from being compared."""

    deadline_us: int
    order: int
    request: Request

    @property
    def has_left(self) -> bool:
        """The request has gone into a batch, or has ended."""
        return bool(self.request.formed_us) or self.request.failure is not None


class Forming:
    """Everything that waits for an executor.

    Args:
        limits: of a model's version; raises `Rejected` where that does not run.
        prefix: what batch ids begin with; differs between processes.
    """

    def __init__(self, limits: Callable[[str, str], BatchLimits], prefix: str) -> None:
        self._limits = limits
        self._prefix = prefix
        self._numbers = count(1)
        self._order = count()
        self._queues: dict[ModelKey, ModelQueue] = {}
        self._deadlines: list[_Deadline] = []
        self._waiting = 0
        self.ended: list[Request] = []
        self.draining = False

    def __len__(self) -> int:
        """How many requests wait."""
        return self._waiting

    def add(self, request: Request) -> None:
        """A request begins to wait, or ends if its model has gone meanwhile."""
        key = (request.model, request.version)
        queue = self._queues.get(key)
        if queue is None:
            try:
                queue = self._queues[key] = ModelQueue(self._limits(*key))
            except Rejected as error:
                request.fail(rejection(error, Stage.BATCHER))
                self.ended.append(request)
                return
        queue.add(request)
        self._waiting += 1
        deadline_ms = request.envelope.deadline_ms
        if deadline_ms:
            self._note_deadline(_Deadline(deadline_ms * 1000, next(self._order), request))

    def next(self, key: ModelKey | None, now_us: int, ask: Ask = IDLE) -> Batch | None:
        """The next batch of a model (None: of any), or None while there is none to be closed.

        Args:
            key: the model's name and version.
            now_us: epoch microseconds.
            ask: of an instance that is idle, or will be at a certain time, or asks for the last
                time, when nothing may wait any longer.
        """
        self.expire(now_us)
        while (group := self._ripest(key, now_us, ask)) is not None:
            batch = self._close(group, now_us, ask)
            if batch is not None:
                return batch
        return None

    def expire(self, now_us: int) -> None:
        """End every request whose deadline has passed."""
        while self._deadlines and self._deadlines[0].deadline_us <= now_us:
            entry = heapq.heappop(self._deadlines)
            if not entry.has_left:
                failure = deadline_passed(entry.request, now_us, Stage.BATCHER)
                assert failure is not None
                self._end(entry.request, failure)

    def next_event_us(self, now_us: int) -> int | None:
        """When something will be due without anything new coming in; None: never.

        A batch that is due already waits for somebody to pull it, and is no event. A deadline is
        one until it is noticed, by `expire`.
        """
        dues = [due_us for queue in self._queues.values() if (due_us := queue.due_us())]
        times = [due_us for due_us in dues if due_us > now_us]
        deadline_us = self.earliest_deadline_us()
        if deadline_us is not None:
            times.append(deadline_us)
        return min(times, default=None)

    def earliest_deadline_us(self) -> int | None:
        """Of those that wait; None where none of them has one."""
        while self._deadlines and self._deadlines[0].has_left:
            heapq.heappop(self._deadlines)
        return self._deadlines[0].deadline_us if self._deadlines else None

    def _note_deadline(self, entry: _Deadline) -> None:
        if len(self._deadlines) > 2 * self._waiting + _TOLERATED:
            # Requests that have left are not kept until their deadlines, which may be hours off.
            self._deadlines = [one for one in self._deadlines if not one.has_left]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, entry)

    def _ripest(self, key: ModelKey | None, now_us: int, ask: Ask) -> Group | None:
        """Of the groups that may close, the one whose first request has waited longest."""
        at_once = ask.at_once or self.draining
        keys = list(self._queues) if key is None else [key]
        ripe: list[Group] = []
        for each in keys:
            queue = self._queues.get(each)
            if queue is None:
                continue
            group = queue.ripest(now_us, at_once=at_once, full_only=ask.close_at_us > now_us)
            if group is not None:
                ripe.append(group)
            elif queue.due_us() is None:
                del self._queues[each]  # a version that comes back may have other limits
        return min(ripe, key=lambda group: group.requests[0].ingested_us, default=None)

    def _end(self, request: Request, failure: Failure) -> None:
        request.fail(failure)
        self._queues[request.model, request.version].end(request)
        self._waiting -= 1
        self.ended.append(request)

    def _close(self, group: Group, now_us: int, ask: Ask) -> Batch | None:
        limits = group.limits
        requests: list[Request] = []
        rows = size_bytes = 0
        reason = "drain" if self.draining else "idle"
        if limits.max_queue_delay_ms and not self.draining:
            reason = "delay"
        if ask.close_at_us and not self.draining:
            reason = "just_in_time"
        while (request := group.first()) is not None:
            if requests and rows + request.rows > limits.max_batch_size:
                reason = "full"
                break
            if requests and size_bytes + request.size_bytes > limits.max_batch_bytes:
                reason = "bytes"
                break
            group.take_first()
            self._waiting -= 1
            if request.receipt.void:
                request.fail(VOID)
                self.ended.append(request)
                continue
            request.formed_us = now_us
            requests.append(request)
            rows += request.rows
            size_bytes += request.size_bytes
        if not requests:
            return None
        if rows >= limits.max_batch_size:
            reason = "full"
        return Batch(f"{self._prefix}-{next(self._numbers)}", requests, reason)
