"""Partition sequencer: one answering step at a time for each source partition.

Used for exactly once and for ordered answers. An ended request waits for its predecessor, if an
order is configured, and then for its partition's next step. A step takes all queued answers:
thousands at saturation, one when idle. For exactly once a step is a transaction (see `sealed`);
otherwise it writes and waits for acknowledgements (see `in_order`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Literal, Self

from headrace.delivery.acked_offsets import Progress
from headrace.delivery.inflight import InFlightAck
from headrace.delivery.offset_store import OffsetStore, Outgoing
from headrace.delivery.ordering import Order
from headrace.primitives.auto_reset_event import AutoResetEvent
from headrace.primitives.byte_semaphore import Room
from headrace.protocol.messages import Request
from headrace.services.responder.encoder import Addressed, answer_bytes
from headrace.telemetry.metrics import Metrics

QUEUED_BYTES = 64 * 1024 * 1024
"""Limit on queued outputs; those that wait for an earlier answer are not counted."""

STEP_ANSWERS = 2048
"""Most answers in one step: they are encoded without yielding, which blocks the event loop."""

WAITING_S = 1.0
"""Answers that had to wait are retried after this time, or with the next answers."""

OrderBy = Literal["none", "key", "partition"]
Step = Callable[[int, list[Outgoing]], Awaitable[Sequence[Outgoing]]]
"""Answer requests of one source partition and acknowledge them; return those that must wait."""


class _Lane:
    """Queue of one source partition, for one assignment."""

    def __init__(self, number: int, progress: Progress) -> None:
        self.number = number
        self.progress = progress
        self.order: Order[Outgoing] = Order(progress)
        self.queue: list[Outgoing] = []
        self.waiting: list[Outgoing] = []
        self.more = AutoResetEvent()
        self.task: asyncio.Task[None] | None = None


class Turns:
    """Run one step at a time per source partition; the context exits when all is acknowledged.

    Args:
        step: answers and acknowledges a list of requests.
        books: offset store of answered requests.
        order_by: the scope in which answers keep their order.
        charges_held: whether held answers count against the read budget. They must not if an
            earlier request may still have to be read: the budget would then keep it out.
    """

    def __init__(
        self,
        step: Step,
        books: OffsetStore,
        order_by: OrderBy,
        metrics: Metrics,
        *,
        charges_held: bool = True,
    ) -> None:
        self._step = step
        self._books = books
        self._order_by = order_by
        self._charges_held = charges_held
        self._metrics = metrics
        self._lanes: dict[int, _Lane] = {}
        self._room = Room(QUEUED_BYTES)
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)

    async def take(self, addressed: Addressed) -> None:
        """Queue a chunk; wait while more than `QUEUED_BYTES` are queued."""
        lanes: dict[int, _Lane | None] = {}
        free: dict[int, list[Outgoing]] = {}
        for target, requests in addressed.items():
            for request in requests:
                number = request.partition
                if number not in lanes:
                    lanes[number], free[number] = self._lane(number), []
                lane = lanes[number]
                if lane is None or request.ack_handle.revoked:
                    self._revoked(request)
                elif self._order_by == "none":
                    free[number].append((request, target))
                else:
                    free[number] += self._in_order(lane, (request, target))
        for number, lane in lanes.items():
            if lane is not None:
                self._queue(lane, free[number])
                self._start(lane)
        await self._room.enough()

    def revoked(self) -> None:
        """Drop answers of revoked partitions, so that their bytes are freed."""
        for number, lane in list(self._lanes.items()):
            if lane.progress is not self._books.progress(number):
                self._end(lane)

    # --- partitions --------------------------------------------------------------------------

    def _lane(self, number: int) -> _Lane | None:
        """Return the queue of a source partition; None if this process no longer owns it."""
        progress = self._books.progress(number)
        if progress is None:
            return None
        lane = self._lanes.get(number)
        if lane is None or lane.progress is not progress:
            if lane is not None:
                self._end(lane)
            lane = self._lanes[number] = _Lane(number, progress)
        return lane

    def _in_order(self, lane: _Lane, outgoing: Outgoing) -> list[Outgoing]:
        request = outgoing[0]
        before: int | None = request.previous
        if self._order_by == "key":
            before = request.after if request.after >= 0 else None
        free = lane.order.ended(request.offset, before, outgoing)
        ack_handle = request.ack_handle
        if not (free or self._charges_held) and isinstance(ack_handle, InFlightAck):
            ack_handle.resize(0)
        return free

    def _queue(self, lane: _Lane, outgoing: list[Outgoing]) -> None:
        lane.queue += outgoing
        self._room.take(_size(outgoing))

    def _start(self, lane: _Lane) -> None:
        lane.more.give()
        if lane.queue and lane.task is None:
            lane.task = self._tasks.create_task(self._turn(lane), name=f"answer-{lane.number}")

    async def _turn(self, lane: _Lane) -> None:
        """Run steps until no answer is left; retry waiting answers every `WAITING_S`."""
        try:
            while lane.queue or (lane.waiting and self._is_current(lane)):
                if not lane.queue:
                    await lane.more.wait(WAITING_S)
                await self._take_turn(lane)
        finally:
            lane.task = None
        if not self._is_current(lane):
            self._end(lane)

    async def _take_turn(self, lane: _Lane) -> None:
        taken, lane.queue = lane.queue[:STEP_ANSWERS], lane.queue[STEP_ANSWERS:]
        in_hand, lane.waiting = lane.waiting + taken, []
        size_bytes = _size(taken)
        try:
            lane.waiting += await self._step(lane.number, in_hand)
        finally:
            self._room.leave(size_bytes)
        # A recovery within the step may have found answers written by another owner.
        self._queue(lane, lane.order.look_again())

    def _is_current(self, lane: _Lane) -> bool:
        return self._lanes.get(lane.number) is lane

    def _end(self, lane: _Lane) -> None:
        """End an assignment; a running step finds its own requests revoked by itself."""
        if self._is_current(lane):
            del self._lanes[lane.number]
        lane.more.give()
        left, lane.queue = lane.queue, []
        self._room.leave(_size(left))
        if lane.task is None:
            left += lane.waiting
            lane.waiting = []
        for request, _ in left + lane.order.drop():
            self._revoked(request)

    def _revoked(self, request: Request) -> None:
        self._metrics.revoked.inc()
        request.ack_handle.ack()


def _size(outgoing: Sequence[Outgoing]) -> int:
    return answer_bytes([request for request, _ in outgoing])
