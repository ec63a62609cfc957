"""Answer the requests of each source partition one step at a time: in order, or exactly once.

An ended request waits for its predecessor, if an order is configured, and then for its partition's
next step. A step answers all queued requests: thousands at saturation, one when idle. For exactly
once a step is a transaction (see `transactional`); otherwise it is an `OrderedStep`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby, repeat
from operator import attrgetter
from typing import Literal

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.failures import drop_revoked
from headrace.delivery.inflight import AssignedPartition, InFlightAck
from headrace.delivery.offset_store import OffsetStore, PendingAnswer, by_offset
from headrace.delivery.ordering import AnswerOrder, BelowBase
from headrace.delivery.producing import deliver_in_order
from headrace.errors import Rejected
from headrace.log.errors import TopicForbidden, UnknownPartition
from headrace.log.port import Producer, TopicPartition
from headrace.primitives.auto_reset_event import AutoResetEvent
from headrace.primitives.byte_semaphore import ByteSemaphore
from headrace.primitives.stage_tasks import StageTasks
from headrace.protocol.messages import Request
from headrace.services.responder.at_least_once import write_dead_letters
from headrace.services.responder.encoder import AnswerEncoder, RequestsByTarget, output_bytes
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.span_attributes import Answering
from headrace.tuning import TUNING, DeliveryTuning, ResponderTuning

OrderBy = Literal["none", "key", "partition"]
AnswerStep = Callable[[int, list[PendingAnswer]], Awaitable[Sequence[PendingAnswer]]]
"""Answer requests of one source partition and acknowledge them; return those that must wait."""


class _PartitionAnswers:
    """Ended requests of one source partition, for one assignment.

    Attributes:
        assignment: that assignment, if the source topic is read here.
        queued: number of those that wait for the next step.
        stepping: number of those in the current one.
        waiting: those that a step could not answer.
    """

    def __init__(
        self,
        number: int,
        progress: AckedOffsets,
        assignment: AssignedPartition | None,
        order_by: OrderBy,
    ) -> None:
        self.number = number
        self.progress = progress
        self.assignment = assignment
        self.order: AnswerOrder[PendingAnswer] = AnswerOrder(
            BelowBase(progress) if order_by == "partition" else progress
        )
        self.queued = self.stepping = 0
        self.waiting: list[PendingAnswer] = []
        self.changed = AutoResetEvent()
        self.task: asyncio.Task[None] | None = None
        self._chunks: deque[tuple[list[PendingAnswer], int]] = deque()
        """Those that were queued together, and the size of their outputs at that time."""

    def add(self, pending: list[PendingAnswer], size_bytes: int) -> None:
        """Queue requests whose outputs have this size."""
        if pending:
            self._chunks.append((pending, size_bytes))
            self.queued += len(pending)

    def take(self, most: int) -> tuple[list[PendingAnswer], int]:
        """Remove and return the first requests of the queue, and the size of their outputs."""
        taken: list[PendingAnswer] = []
        taken_bytes = 0
        while self._chunks and len(taken) < most:
            pending, size_bytes = self._chunks.popleft()
            room = most - len(taken)
            if len(pending) > room:
                pending, rest = pending[:room], pending[room:]
                part_bytes = _size_bytes(pending)
                self._chunks.appendleft((rest, size_bytes - part_bytes))
                size_bytes = part_bytes
            taken += pending
            taken_bytes += size_bytes
        self.queued -= len(taken)
        return taken, taken_bytes

    def count(self, most: int) -> None:
        """Say in the assignment how many requests are in the current step, and in the next one,
        which takes `most`. Those behind it are too many: they would wait for several steps.
        """
        if self.assignment is not None:
            following = min(self.queued + len(self.waiting), most)
            self.assignment.answering = self.stepping + following


class PartitionSequencer:
    """Run one step at a time per source partition.

    Args:
        step: answers and acknowledges a list of requests.
        offset_store: offset store of answered requests.
        order_by: the scope in which answers keep their order.
        charges_held: True if held answers count against the read budget. They must not if an
            earlier request may still have to be read: the budget would then keep it out.
        tasks: group of the tasks that run the steps.
    """

    def __init__(
        self,
        step: AnswerStep,
        offset_store: OffsetStore,
        order_by: OrderBy,
        metrics: Metrics,
        tasks: StageTasks,
        *,
        charges_held: bool = True,
        tuning: ResponderTuning = TUNING.responder,
    ) -> None:
        self._step = step
        self._offset_store = offset_store
        self._order_by = order_by
        self._charges_held = charges_held
        self._metrics = metrics
        self._tuning = tuning
        self._queues: dict[int, _PartitionAnswers] = {}
        # Answers that wait for an earlier one are not counted: they could fill the limit, and the
        # earlier one would then never be queued.
        self._queued_bytes = ByteSemaphore(tuning.max_queued_answer_bytes)
        self._tasks = tasks

    def has_room(self) -> bool:
        """Return False while more than `max_queued_answer_bytes` are queued."""
        return self._queued_bytes.used_bytes <= self._tuning.max_queued_answer_bytes

    async def wait_for_room(self) -> None:
        """Wait until `has_room`."""
        await self._queued_bytes.wait_within_limit()

    def submit(self, addressed: RequestsByTarget) -> None:
        """Queue a chunk, and start the steps of its partitions."""
        queues: dict[int, _PartitionAnswers | None] = {}
        ready: dict[int, list[PendingAnswer]] = {}
        for target, requests in addressed.items():
            assigned = drop_revoked(requests, self._metrics)
            for number, of_partition in groupby(assigned, attrgetter("partition")):
                if number not in queues:
                    queues[number], ready[number] = self._queue_of(number), []
                queue = queues[number]
                if queue is None:
                    for request in of_partition:
                        self._drop(request)
                elif self._order_by == "none":
                    ready[number] += zip(of_partition, repeat(target))
                else:
                    for request in of_partition:
                        ready[number] += self._follow_order(queue, (request, target))
        for number, queue in queues.items():
            if queue is not None:
                self._enqueue(queue, ready[number])
                self._start(queue)

    def release_answered(self, number: int) -> None:
        """Queue the answers of a source partition that wait for one which was answered otherwise
        than by a step, or never will be: their predecessors would not release them.
        """
        queue = self._queues.get(number)
        if queue is not None:
            self._enqueue_released(queue)
            self._start(queue)

    def drop_revoked(self) -> None:
        """Drop answers of revoked partitions, so that their bytes are freed."""
        for number, queue in list(self._queues.items()):
            if queue.progress is not self._offset_store.progress(number):
                self._close(queue)

    # --- partitions --------------------------------------------------------------------------

    def _queue_of(self, number: int) -> _PartitionAnswers | None:
        """Return the queue of a source partition; None if this process no longer owns it."""
        progress = self._offset_store.progress(number)
        if progress is None:
            return None
        queue = self._queues.get(number)
        if queue is None or queue.progress is not progress:
            if queue is not None:
                self._close(queue)
            queue = self._queues[number] = _PartitionAnswers(
                number, progress, self._offset_store.assignment(number), self._order_by
            )
        return queue

    def _follow_order(
        self, queue: _PartitionAnswers, pending: PendingAnswer
    ) -> list[PendingAnswer]:
        """Return the answers that may be written now that this request has ended: none while its
        predecessor is unanswered, otherwise its own and all that waited for it.
        """
        request = pending[0]
        before: int | None = request.previous
        if self._order_by == "key":
            before = request.after if request.after >= 0 else None
        ready = queue.order.add(request.offset, before, pending)
        ack_handle = request.ack_handle
        if not ready and isinstance(ack_handle, InFlightAck):
            ack_handle.hold()
        _release(ready[1:])  # the first is this one, which was not held
        # The predecessor may still have to be read: bytes of the answers that wait for it would
        # fill the budget, and the reader would pause before it.
        if not (ready or self._charges_held) and isinstance(ack_handle, InFlightAck):
            ack_handle.resize(0)
        return ready

    def _enqueue(self, queue: _PartitionAnswers, pending: list[PendingAnswer]) -> None:
        size_bytes = _size_bytes(pending)
        queue.add(pending, size_bytes)
        queue.count(self._tuning.max_step_answers)
        self._queued_bytes.acquire(size_bytes)

    def _start(self, queue: _PartitionAnswers) -> None:
        queue.changed.set()
        if queue.queued and queue.task is None:
            queue.task = self._tasks.start(self._run_steps(queue), f"answer-{queue.number}")

    async def _run_steps(self, queue: _PartitionAnswers) -> None:
        """Run steps until no answer is left; retry waiting answers at an interval, or with the
        next answers.
        """
        try:
            while queue.queued or (queue.waiting and self._is_current(queue)):
                if not queue.queued:
                    await queue.changed.wait(self._tuning.waiting_answers_retry_s)
                await self._run_step(queue)
        finally:
            queue.task = None
        if not self._is_current(queue):
            self._close(queue)

    async def _run_step(self, queue: _PartitionAnswers) -> None:
        most = self._tuning.max_step_answers
        # Answers that an earlier step could not write go first, so that their order is kept.
        taken, size_bytes = queue.take(most)
        step, queue.waiting = queue.waiting + taken, []
        queue.stepping = len(step)
        try:
            queue.waiting += await self._step(queue.number, step)
        finally:
            queue.stepping = 0
            self._queued_bytes.release(size_bytes)
        # A recovery within the step may have found answers written by another owner.
        self._enqueue_released(queue)

    def _enqueue_released(self, queue: _PartitionAnswers) -> None:
        released = queue.order.release_answered()
        _release(released)
        self._enqueue(queue, released)

    def _is_current(self, queue: _PartitionAnswers) -> bool:
        return self._queues.get(queue.number) is queue

    def _close(self, queue: _PartitionAnswers) -> None:
        """End an assignment; a running step finds its own requests revoked by itself."""
        if self._is_current(queue):
            del self._queues[queue.number]
        queue.changed.set()
        left, size_bytes = queue.take(queue.queued)
        self._queued_bytes.release(size_bytes)
        # A running step may still add to the waiting answers: `_run_steps` closes again after it.
        if queue.task is None:
            left += queue.waiting
            queue.waiting = []
        held = queue.order.drop()
        _release(held)
        for request, _ in left + held:
            self._drop(request)

    def _drop(self, request: Request) -> None:
        self._metrics.revoked.inc()
        request.ack_handle.ack()


def _release(pending: Sequence[PendingAnswer]) -> None:
    for request, _ in pending:
        if isinstance(request.ack_handle, InFlightAck):
            request.ack_handle.release()


def _size_bytes(pending: Sequence[PendingAnswer]) -> int:
    return output_bytes([request for request, _ in pending])


class OrderedStep:
    """Answer requests of one source partition in order, at least once; see `AnswerStep`.

    All answers of a step are acknowledged together. If one were acknowledged before an earlier one
    on another topic, later answers would overtake the earlier one after a restart.

    Args:
        responses: the topic of default answers. It is written last in a step: answers that their
            reply topics refuse go there, each in its place.
    """

    def __init__(
        self,
        producer: Producer,
        encoder: AnswerEncoder,
        offset_store: OffsetStore,
        metrics: Metrics,
        responses: str,
        tuning: DeliveryTuning = TUNING.delivery,
    ) -> None:
        self._tuning = tuning
        self._producer = producer
        self._encoder = encoder
        self._offset_store = offset_store
        self._metrics = metrics
        self._responses = responses

    async def __call__(self, number: int, pending: list[PendingAnswer]) -> Sequence[PendingAnswer]:
        left = [each for each in pending if not (each[0].ack_handle.revoked or each[0].skipped)]
        while left:
            replies = [each for each in left if each[1].topic != self._responses]
            moved = await self._answer_all(replies or left)
            left = [each for each in left if each[1].topic == self._responses] if replies else []
            if moved:
                left = by_offset(left + moved)
        # Ack all at once, after every target is written: see the class's docstring.
        ended = [request for request, _ in pending]
        self._offset_store.ack(drop_revoked(ended, self._metrics))
        return ()

    async def _answer_all(self, pending: Sequence[PendingAnswer]) -> list[PendingAnswer]:
        """Answer requests; return those whose topics refuse their answers, with other targets."""
        addressed: RequestsByTarget = {}
        for request, target in pending:
            addressed.setdefault(target, []).append(request)
        # Answers for different targets have no order between them.
        async with asyncio.TaskGroup() as tasks:
            answering = [
                tasks.create_task(self._answer(target, requests), name=f"to-{target}")
                for target, requests in addressed.items()
            ]
        return [each for answered in answering for each in answered.result()]

    async def _answer(
        self, target: TopicPartition, requests: Sequence[Request]
    ) -> Sequence[PendingAnswer]:
        """Answer requests of one target; return those that go elsewhere."""
        encoder = self._encoder
        await encoder.compress_answers(requests)
        clock = encoder.anchored_clock()
        began_us = clock()
        records = encoder.encode_answers(requests, began_us)
        encoded_us = clock()
        start = 0
        moved: dict[Request, TopicPartition] = {}
        ack_handle = requests[0].ack_handle  # all are of one assignment

        def is_assigned() -> bool:
            return not ack_handle.revoked

        while start < len(records):
            refused = await deliver_in_order(
                self._producer,
                target,
                records[start:],
                self._metrics,
                is_assigned,
                tuning=self._tuning,
            )
            if refused is None:
                break
            index, error = refused
            start += index
            # Some errors are those of all records, so that no other need be tried.
            is_of_all = isinstance(error, UnknownPartition | TopicForbidden)
            stop = len(records) if is_of_all else start + 1
            for request in requests[start:stop]:
                elsewhere = await self._answer_refused(request, target, error)
                if elsewhere is not None:
                    moved[request] = elsewhere
            start = stop
        if not is_assigned():
            return ()
        acknowledged_us = clock()
        if moved:
            requests = [request for request in requests if request not in moved]
        await write_dead_letters(self._producer, encoder, requests, self._metrics, self._tuning)
        times = Answering(began_us, encoded_us, acknowledged_us, clock())
        encoder.record_answered({target: requests}, times)
        return list(moved.items())

    async def _answer_refused(
        self, request: Request, target: TopicPartition, error: Rejected
    ) -> TopicPartition | None:
        """Replace a refused answer by fallbacks until one is accepted or given up.

        Returns:
            Another target, if there is one for the next fallback.
        """
        encoder, minimal = self._encoder, False
        while fallback := encoder.choose_fallback(request, target, error, minimal=minimal):
            elsewhere, minimal = fallback
            if elsewhere != target:
                return elsewhere
            records = encoder.encode_answers([request], encoder.clock(), minimal=minimal)
            refused = await deliver_in_order(
                self._producer,
                target,
                records,
                self._metrics,
                lambda: not request.ack_handle.revoked,
                tuning=self._tuning,
            )
            if refused is None:
                return None
            error = refused[1]
        return None
