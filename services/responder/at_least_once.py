"""Write answers at least once and in no order: chunks overlap.

While one chunk waits for its acknowledgements, the next ones are encoded and sent, up to a limit.
A target that does not acknowledge for a while, such as a partition without a leader, is *stalled*:
its answers wait separately and do not delay other targets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from headrace.delivery.failures import drop_revoked
from headrace.delivery.offset_store import OffsetStore
from headrace.delivery.producing import deliver, refused_for_size
from headrace.errors import Rejected
from headrace.log.port import NewRecord, Producer, TopicPartition
from headrace.primitives.stage_tasks import StageTasks
from headrace.protocol.messages import Request
from headrace.services.responder.encoder import AnswerEncoder, RequestsByTarget, output_bytes
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.span_attributes import Answering
from headrace.tuning import TUNING, DeliveryTuning, ResponderTuning

log = structlog.get_logger(__name__)

RefusedAnswer = tuple[Request, TopicPartition, Rejected, bool]
"""A request, the target that refused its answer, the error, and whether the answer was minimal."""


class _Unacknowledged:
    """Chunks that are being answered, and the bytes of their outputs."""

    def __init__(self) -> None:
        self.chunks = self.size_bytes = 0
        self.released = asyncio.Event()


class _ChunkPermit:
    """A chunk's part of the limits, released once: when it is answered or when it stalls."""

    def __init__(self, unacknowledged: _Unacknowledged, size_bytes: int) -> None:
        self._unacknowledged = unacknowledged
        self._size_bytes = size_bytes
        self._is_released = False
        unacknowledged.chunks += 1
        unacknowledged.size_bytes += size_bytes

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._unacknowledged.chunks -= 1
            self._unacknowledged.size_bytes -= self._size_bytes
            self._unacknowledged.released.set()


class AtLeastOnce:
    """Answer chunk by chunk.

    Args:
        tasks: group of the tasks that write the answers.
        delivery_tuning: of writes that fail.
    """

    def __init__(
        self,
        producer: Producer,
        encoder: AnswerEncoder,
        offset_store: OffsetStore,
        metrics: Metrics,
        tasks: StageTasks,
        tuning: ResponderTuning = TUNING.responder,
        delivery_tuning: DeliveryTuning = TUNING.delivery,
    ) -> None:
        self._delivery_tuning = delivery_tuning
        self._producer = producer
        self._encoder = encoder
        self._offset_store = offset_store
        self._metrics = metrics
        self._stalled_after_s = tuning.target_stalled_after_s
        self._max_chunks = tuning.max_unacknowledged_chunks
        self._max_bytes = tuning.max_unacknowledged_bytes
        self._max_answers = tuning.max_step_answers
        self._unacknowledged = _Unacknowledged()
        self._tasks = tasks
        self._stalled: dict[TopicPartition, list[Request]] = {}

    def has_room(self) -> bool:
        """Return True if another chunk may be submitted."""
        used = self._unacknowledged
        return used.chunks < self._max_chunks and used.size_bytes < self._max_bytes

    async def wait_for_room(self) -> None:
        """Wait until `has_room`."""
        while not self.has_room():
            self._unacknowledged.released.clear()
            await self._unacknowledged.released.wait()

    def submit(self, addressed: RequestsByTarget) -> None:
        """Start to answer a chunk; call it only while there is room."""
        for target in addressed.keys() & self._stalled.keys():
            self._stalled[target] += addressed.pop(target)
        if not addressed:
            return
        permit = _ChunkPermit(self._unacknowledged, sum(map(output_bytes, addressed.values())))
        self._tasks.start(self._answer(addressed, permit), "responder-answer")

    def drop_revoked(self) -> None:
        """Drop stalled requests whose ack handles have been revoked."""
        for target, waiting in self._stalled.items():
            self._stalled[target] = list(drop_revoked(waiting, self._metrics))

    async def _answer(self, addressed: RequestsByTarget, permit: _ChunkPermit) -> None:
        """Write a chunk's answers, wait for the brokers, and acknowledge the requests."""
        unwritten = set(addressed)

        def stall() -> None:
            # From here on `submit` adds answers for these targets to their lists, and
            # `_answer_target` writes them once a target accepts answers again. The chunk gives its
            # room back, so that answers for other targets go on.
            for target in unwritten - self._stalled.keys():
                log.warning(Event.ANSWERS_STALLED, topic=str(target))
                self._stalled[target] = []
            permit.release()

        timer = asyncio.get_running_loop().call_later(self._stalled_after_s, stall)
        try:
            # All partitions are written concurrently. The first needs no task of its own, and
            # often there is only one.
            (first_target, first_requests), *others = addressed.items()
            if not others:
                await self._answer_target(first_target, first_requests, unwritten)
                return
            async with asyncio.TaskGroup() as tasks:
                for target, requests in others:
                    answering = self._answer_target(target, requests, unwritten)
                    tasks.create_task(answering, name=f"to-{target}")
                await self._answer_target(first_target, first_requests, unwritten)
        finally:
            timer.cancel()
            permit.release()

    async def _answer_target(
        self, target: TopicPartition, requests: list[Request], unwritten: set[TopicPartition]
    ) -> None:
        await self._answer_in_parts(target, requests)
        unwritten.discard(target)
        # Answers that came while the target was stalled; its entry goes when there are no more.
        while waiting := self._stalled.pop(target, None):
            await self._answer_in_parts(target, waiting)

    async def _answer_in_parts(self, target: TopicPartition, requests: list[Request]) -> None:
        """Answer requests, and remove them from the list: many may have waited for a target that
        was stalled or looked up, and encoding them all would block the event loop.
        """
        while requests:
            part = requests[: self._max_answers]
            del requests[: self._max_answers]
            if assigned := drop_revoked(part, self._metrics):
                await self._answer_partition(target, assigned)
            if requests:
                await asyncio.sleep(0)  # the embedded log acknowledges without waiting

    async def _answer_partition(self, target: TopicPartition, requests: Sequence[Request]) -> None:
        encoder = self._encoder
        await encoder.compress_answers(requests)
        clock = encoder.anchored_clock()
        began_us = clock()
        records = encoder.encode_answers(requests, began_us)
        encoded_us = clock()
        refused = await self._deliver(target, requests, records)
        if refused:
            await self._answer_refused(
                [
                    (requests[index], target, error, False)
                    for index, error in refused.items()
                    if not requests[index].ack_handle.revoked
                ]
            )
        acknowledged_us = dead_letters_us = clock()
        # Dead letters are written before the ack: an acknowledged request is not read again.
        assigned = drop_revoked(requests, self._metrics)
        failed = [request for request in assigned if request.failure is not None]
        if failed:
            await write_dead_letters(
                self._producer, encoder, failed, self._metrics, self._delivery_tuning
            )
            dead_letters_us = clock()
            assigned = drop_revoked(assigned, self._metrics)  # while their values were read
        times = Answering(began_us, encoded_us, acknowledged_us, dead_letters_us)
        encoder.record_answered({target: assigned}, times)
        # Ack last: a crash before this line repeats answers, but loses none.
        self._offset_store.ack(assigned)

    async def _deliver(
        self, target: TopicPartition, requests: Sequence[Request], records: Sequence[NewRecord]
    ) -> dict[int, Rejected]:
        """Write answers, and return the errors of refused ones; see `deliver`. Those of revoked
        requests are not retried.
        """
        return await deliver(
            self._producer,
            target,
            records,
            self._metrics,
            lambda index: not requests[index].ack_handle.revoked,
            tuning=self._delivery_tuning,
        )

    async def _answer_refused(self, refused: Sequence[RefusedAnswer]) -> None:
        """Replace refused answers by fallbacks until each is accepted or given up."""
        while refused:
            fallbacks: dict[tuple[TopicPartition, bool], list[Request]] = {}
            for request, target, error, minimal in refused:
                fallback = self._encoder.choose_fallback(request, target, error, minimal=minimal)
                if fallback is not None:
                    fallbacks.setdefault(fallback, []).append(request)
            refused_again: list[RefusedAnswer] = []
            for (target, minimal), requests in fallbacks.items():
                now_us = self._encoder.clock()
                records = self._encoder.encode_answers(requests, now_us, minimal=minimal)
                errors = await self._deliver(target, requests, records)
                refused_again += [
                    (requests[index], target, error, minimal) for index, error in errors.items()
                ]
            refused = refused_again


async def write_dead_letters(
    producer: Producer,
    encoder: AnswerEncoder,
    failed: Sequence[Request],
    metrics: Metrics,
    tuning: DeliveryTuning,
) -> None:
    """Write the dead letters of failed requests, and count those that are too large."""
    async for dead_letters in encoder.dead_letters(failed):
        for target, records in dead_letters.items():
            refused = await deliver(producer, target, records, metrics, tuning=tuning)
            if dropped := refused_for_size(refused):
                encoder.record_dropped_dead_letters(target, len(dropped))
