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
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple, Protocol

from headrace.errors import Rejected
from headrace.flow.endings import VOID, deadline_passed, rejection
from headrace.messages import Batch, Failure, Request
from headrace.topics import Stage

ModelKey = tuple[str, str]
"""A model's name and version."""


class BatchLimits(Protocol):
    """What a model allows; a `headrace.models.registry.ModelVersion` has these."""

    @property
    def max_batch_size(self) -> int: ...
    @property
    def max_batch_bytes(self) -> int: ...
    @property
    def max_queue_delay_ms(self) -> float: ...


class _Deadline(NamedTuple):
    """An entry of the heap of deadlines; `order` keeps requests from being compared."""

    deadline_us: int
    order: int
    request: Request


class _Group:
    """Waiting requests that may share a batch."""

    __slots__ = ("limits", "requests", "rows", "size_bytes")

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.requests: deque[Request] = deque()
        self.rows = 0
        self.size_bytes = 0

    def remove(self, request: Request) -> None:
        """Take out of the counts; the request itself leaves when it comes to the head."""
        self.rows -= request.rows
        self.size_bytes -= request.size_bytes

    def drop_ended(self) -> None:
        """Let go of requests at the head that have ended meanwhile."""
        while self.requests and self.requests[0].failure is not None:
            self.requests.popleft()

    def due_us(self) -> int:
        """When the next batch may close, without being full."""
        return self.requests[0].ingested_us + int(self.limits.max_queue_delay_ms * 1000)

    @property
    def is_full(self) -> bool:
        return (
            self.rows >= self.limits.max_batch_size
            or self.size_bytes >= self.limits.max_batch_bytes
        )


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
        self._groups: dict[ModelKey, dict[tuple[int, ...], _Group]] = {}
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
        classes = self._groups.get(key)
        if classes is None:
            classes = self._groups[key] = {}
        group = classes.get(request.shape_class)
        if group is None:
            try:
                group = classes[request.shape_class] = _Group(self._limits(*key))
            except Rejected as error:
                request.fail(rejection(error, Stage.BATCHER))
                self.ended.append(request)
                return
        group.requests.append(request)
        group.rows += request.rows
        group.size_bytes += request.size_bytes
        self._waiting += 1
        deadline_ms = request.envelope.deadline_ms
        if deadline_ms:
            heapq.heappush(
                self._deadlines, _Deadline(deadline_ms * 1000, next(self._order), request)
            )

    def next(self, key: ModelKey | None, now_us: int) -> Batch | None:
        """The next batch of a model (None: of any), or None while there is none to be closed."""
        self.expire(now_us)
        while (group := self._ripest(key, now_us)) is not None:
            batch = self._close(group, now_us)
            if batch is not None:
                return batch
        return None

    def expire(self, now_us: int) -> None:
        """End every request whose deadline has passed."""
        while self._deadlines and self._deadlines[0].deadline_us <= now_us:
            request = heapq.heappop(self._deadlines).request
            # One that has left for a batch, or has ended, has no more business here.
            if request.formed_us or request.failure is not None:
                continue
            failure = deadline_passed(request, now_us, Stage.BATCHER)
            if failure is not None:
                self._end(request, failure)

    def next_event_us(self) -> int | None:
        """When something may be due without anything new coming in; None: never."""
        times = [
            group.due_us() for group in self._candidates(None) if group.limits.max_queue_delay_ms
        ]
        if self._deadlines:
            times.append(self._deadlines[0].deadline_us)
        return min(times, default=None)

    def _candidates(self, key: ModelKey | None) -> Iterator[_Group]:
        """Groups with somebody waiting; empty ones are forgotten, since shapes come and go."""
        for classes in [self._groups.get(key, {})] if key else list(self._groups.values()):
            for shape_class, group in list(classes.items()):
                group.drop_ended()
                if group.requests:
                    yield group
                else:
                    del classes[shape_class]

    def _ripest(self, key: ModelKey | None, now_us: int) -> _Group | None:
        """Of the groups that may close, the one whose first request has waited longest."""
        ripe = (
            group
            for group in self._candidates(key)
            if self.draining or group.is_full or group.due_us() <= now_us
        )
        return min(ripe, key=lambda group: group.requests[0].ingested_us, default=None)

    def _end(self, request: Request, failure: Failure) -> None:
        group = self._groups[request.model, request.version][request.shape_class]
        group.remove(request)
        self._waiting -= 1
        request.fail(failure)
        self.ended.append(request)

    def _close(self, group: _Group, now_us: int) -> Batch | None:
        limits = group.limits
        requests: list[Request] = []
        rows = size_bytes = 0
        reason = "drain" if self.draining else "idle"
        if limits.max_queue_delay_ms and not self.draining:
            reason = "delay"
        while group.requests:
            request = group.requests[0]
            if request.failure is not None:
                group.requests.popleft()
                continue
            if requests and rows + request.rows > limits.max_batch_size:
                reason = "full"
                break
            if requests and size_bytes + request.size_bytes > limits.max_batch_bytes:
                reason = "bytes"
                break
            group.requests.popleft()
            group.remove(request)
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
