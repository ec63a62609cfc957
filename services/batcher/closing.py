"""Batch builder: choose the size of a batch and its requests at the moment it closes."""

from __future__ import annotations

from typing import NamedTuple

from headrace.delivery.failures import VOID
from headrace.protocol.messages import Failure, Request
from headrace.services.batcher.admission import too_late
from headrace.services.batcher.groups import ModelQueue
from headrace.services.batcher.lanes import Fifo, Group, Lane
from headrace.topics import Stage
from headrace.transport.channels import Ask


class Size(NamedTuple):
    """Size limit of a batch.

    Attributes:
        rows: most rows.
        end_us: predicted end of its run; 0 if unknown.
        sure_us: requests with a deadline before this moment do not join.
        reason: why the batch closes when it reaches `rows`.
    """

    rows: int
    end_us: int
    sure_us: int
    reason: str


class Closed(NamedTuple):
    """The requests of a batch, the requests that ended instead of joining, and why it closed."""

    requests: list[Request]
    ended: list[Request]
    reason: str


def size_of(queue: ModelQueue, group: Group, now_us: int, ask: Ask) -> Size:
    """Return the size with the best throughput that the deadlines allow.

    If all waiting requests fit into one batch, but the most urgent one would be late in it, the
    batch is cut to be in time for that request. With a backlog, now or at the last close, it is
    not: small batches take longer per row and would make every request late, so the most urgent
    ones are given up.
    """
    group.learn()
    limits, rows = group.limits, group.best_rows
    latency = limits.latency
    if latency is None:
        return Size(rows, 0, 0, "full")
    if group.rows > rows and queue.pace.tries_more:
        rows = min(2 * rows, limits.max_batch_size)
    elif group.rows > rows and queue.pace.tries_less:
        rows = max(1, rows // 2)
    starts_us = max(now_us, ask.close_at_us)
    run_us = latency.predict_us(group.shape_class, min(rows, group.rows))
    if run_us is None:
        return Size(rows, 0, 0, "full")
    has_time = group.rows <= rows and not queue.pace.has_backlog
    lane = group.first_lane() if has_time else None
    due_us = 0 if lane is None else lane.earliest_due_us()
    slack_us = due_us - starts_us
    if due_us and slack_us < run_us:
        fitting = latency.best_rows(group.shape_class, group.rows, slack_us)
        fitting_us = latency.predict_us(group.shape_class, fitting) or 0
        if fitting_us <= slack_us:
            return Size(fitting, starts_us + fitting_us, starts_us + fitting_us, "deadline")
    end_us = starts_us + run_us
    # While other requests wait for its place, a request must be in time by the margin as well.
    sure_us = end_us + latency.margin_us if group.rows > rows else end_us
    return Size(rows, end_us, sure_us, "full")


class Closing:
    """Take requests out of a group until the batch is full or the group is empty.

    Args:
        queue, group: the model's queue and the group to take from.
        size: see `size_of`.
        now_us: microseconds of a steady clock.
        formed_us: the same moment in epoch microseconds.
    """

    def __init__(
        self, queue: ModelQueue, group: Group, size: Size, now_us: int, formed_us: int
    ) -> None:
        self._queue = queue
        self._group = group
        self._size = size
        self._now_us = now_us
        self._formed_us = formed_us
        self._rows = 0
        self._size_bytes = 0
        self._requests: list[Request] = []
        self._ended: list[Request] = []
        self._late: list[tuple[Request, Failure]] = []

    def run(self, otherwise: str) -> Closed:
        """Build the batch.

        Args:
            otherwise: why the batch closes if it does not reach its size limit.
        """
        reason = self._fill() or otherwise
        if not self._requests and self._late:
            # Run one late request if there is no other: only a run can correct the prediction.
            request, _ = self._late.pop()
            request.formed_us = self._formed_us
            self._requests.append(request)
        for request, failure in self._late:
            request.fail(failure)
            self._ended.append(request)
        return Closed(self._requests, self._ended, reason)

    def _fill(self) -> str:
        group = self._group
        reason = ""
        while not reason and (lane := group.first_lane()) is not None:
            is_only = len(group.lanes) == 1 and len(lane.fifos) == 1
            reason = self._take(lane, lane.first_fifo(), lane.count if is_only else 1)
        if reason:
            return reason
        return self._size.reason if self._rows >= self._size.rows else ""

    def _take(self, lane: Lane, fifo: Fifo, most: int) -> str:
        """Take up to `most` requests; return why nothing more fits, or ""."""
        queue, requests, formed_us = self._queue, self._requests, self._formed_us
        max_rows, max_bytes = self._size.rows, self._group.limits.max_batch_bytes
        joined_rows, joined_bytes = self._rows, self._size_bytes
        count = rows = size_bytes = 0
        reason = ""
        waiting, deadlines = fifo.requests, fifo.deadlines
        while count < most and waiting:
            request = waiting[0]
            if request.failure is not None:
                fifo.first()
                continue
            row_count, byte_count = request.rows, request.size_bytes
            if requests and joined_rows + row_count > max_rows:
                reason = self._size.reason
                break
            if requests and joined_bytes + byte_count > max_bytes:
                reason = "bytes"
                break
            waiting.popleft()
            if deadlines and deadlines[0] is request:
                deadlines.popleft()
            count += 1
            rows += row_count
            size_bytes += byte_count
            judged = request.due_us or request.ack_handle.assignment.revoked
            if not judged or self._joins(request):
                request.formed_us = formed_us
                requests.append(request)
                joined_rows += row_count
                joined_bytes += byte_count
        if queue.is_contested and joined_rows > self._rows:
            queue.shares.served(lane.tenant, joined_rows - self._rows)
        self._rows, self._size_bytes = joined_rows, joined_bytes
        queue.left(lane, fifo, count, rows, size_bytes)
        return reason

    def _joins(self, request: Request) -> bool:
        if request.ack_handle.revoked:
            request.fail(VOID)
            self._ended.append(request)
            return False
        due_us, end_us = request.due_us, self._size.sure_us
        if not due_us or due_us >= end_us:
            return True
        failure = too_late(due_us, end_us, self._now_us, Stage.BATCHER)
        assert failure is not None
        self._late.append((request, failure))
        return False
