"""What goes into a batch at the moment when it closes."""

from __future__ import annotations

from typing import NamedTuple

from headrace.flow.channel import Ask
from headrace.flow.endings import VOID
from headrace.messages import Failure, Request
from headrace.services.batcher.admission import Pace, too_late
from headrace.services.batcher.groups import Group, ModelQueue
from headrace.topics import Stage


class Size(NamedTuple):
    """How large a batch gets.

    Attributes:
        rows: the most.
        end_us: when its run will be done; 0 where that is not known.
        reason: why it closes when it gets so large.
    """

    rows: int
    end_us: int
    reason: str


class Closed(NamedTuple):
    """The requests of a batch, and those that ended instead of joining it."""

    requests: list[Request]
    ended: list[Request]
    reason: str


def size_of(group: Group, pace: Pace, now_us: int, ask: Ask) -> Size:
    """The size with the best throughput that the deadlines allow.

    Where all that waits fits into one batch, and the most urgent request would be late in it,
    the batch is made small enough for that request. With more waiting it is not: small batches
    would make everybody late, so it is the most urgent ones that cannot be helped.
    """
    group.learn()
    limits = group.limits
    rows = group.best_rows
    if rows < limits.max_batch_size and group.rows > rows and pace.explores:
        rows = min(2 * rows, limits.max_batch_size)
    latency = limits.latency
    if latency is None:
        return Size(rows, 0, "full")
    starts_us = max(now_us, ask.close_at_us)
    if group.rows <= rows:
        lane = group.first_lane()
        deadline_us = None if lane is None else lane.earliest_deadline_us()
        if deadline_us is not None:
            slack_us = deadline_us - starts_us
            fitting = latency.best_rows(group.shape_class, group.rows, slack_us)
            run_us = latency.predict_us(group.shape_class, fitting) or 0
            if fitting < group.rows and run_us <= slack_us:
                return Size(fitting, starts_us + run_us, "deadline")
    run_us = latency.predict_us(group.shape_class, min(rows, group.rows)) or 0
    return Size(rows, starts_us + run_us if run_us else 0, "full")


class Closing:
    """Takes requests out of a group until the batch is full or nothing is left.

    Args:
        queue, group: what the requests wait in.
        size: see `size_of`.
        now_us: epoch microseconds.
    """

    def __init__(self, queue: ModelQueue, group: Group, size: Size, now_us: int) -> None:
        self._queue = queue
        self._group = group
        self._size = size
        self._now_us = now_us
        self._rows = 0
        self._size_bytes = 0
        self._requests: list[Request] = []
        self._ended: list[Request] = []
        self._late: list[tuple[Request, Failure]] = []

    def run(self, otherwise: str) -> Closed:
        """Take them out.

        Args:
            otherwise: why the batch closes if it does not get as large as it may.
        """
        reason = self._fill() or otherwise
        if not self._requests and self._late:
            # Without a run nothing would show that the prediction was wrong.
            request, _ = self._late.pop()
            self._join(request)
        for request, failure in self._late:
            request.fail(failure)
            self._ended.append(request)
        return Closed(self._requests, self._ended, reason)

    def _fill(self) -> str:
        queue, group, end_us = self._queue, self._group, self._size.end_us
        lane = group.first_lane()
        while lane is not None:
            request = lane.first()
            assert request is not None
            if self._requests and (reason := self._has_no_room_for(request)):
                return reason
            queue.take_first(lane)
            if request.receipt.void:
                request.fail(VOID)
                self._ended.append(request)
            elif end_us and request.envelope.deadline_ms and (failure := self._late_by(request)):
                self._late.append((request, failure))
            else:
                self._join(request)
                if queue.is_contested:
                    queue.shares.served(lane.tenant, request.rows)
            if not lane.count or queue.is_contested:
                lane = group.first_lane()
        return self._size.reason if self._rows >= self._size.rows else ""

    def _has_no_room_for(self, request: Request) -> str:
        if self._rows + request.rows > self._size.rows:
            return self._size.reason
        if self._size_bytes + request.size_bytes > self._group.limits.max_batch_bytes:
            return "bytes"
        return ""

    def _join(self, request: Request) -> None:
        request.formed_us = self._now_us
        self._requests.append(request)
        self._rows += request.rows
        self._size_bytes += request.size_bytes

    def _late_by(self, request: Request) -> Failure | None:
        return too_late(
            request.envelope.deadline_ms, self._size.end_us, self._now_us, Stage.BATCHER
        )
