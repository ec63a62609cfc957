"""At-least-once answers in no order: chunks overlap.

While one chunk waits for its acknowledgements, the next ones are encoded and sent, up to a limit.
A target that does not acknowledge for a while, such as a partition without a leader, is *stalled*:
its answers are held separately and do not delay other targets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import structlog

from headrace.delivery.failures import any_void
from headrace.delivery.offset_store import OffsetStore
from headrace.delivery.producing import deliver, too_large
from headrace.errors import Rejected
from headrace.log.port import NewRecord, Producer, TopicPartition
from headrace.primitives.byte_semaphore import Room
from headrace.protocol.messages import Request
from headrace.services.responder.encoder import Addressed, AnswerEncoder, answer_bytes
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.span_attributes import Answering

log = structlog.get_logger(__name__)

UNACKNOWLEDGED_CHUNKS = 16
UNACKNOWLEDGED_BYTES = 64 * 1024 * 1024
STALLED_S = 1.0


Refusal = tuple[Request, TopicPartition, Rejected, bool]
"""A request, the target that refused its answer, the error, and whether the answer was bare."""


class _Pass:
    """A chunk's permit and bytes, released once: when it is answered or when it stalls."""

    def __init__(self, permits: asyncio.Semaphore, room: Room, size_bytes: int) -> None:
        self._permits = permits
        self._room = room
        self._size_bytes = size_bytes
        self._held = True

    def give_back(self) -> None:
        if self._held:
            self._held = False
            self._permits.release()
            self._room.leave(self._size_bytes)


class AtLeastOnce:
    """Answer chunk by chunk; the context exits when everything is acknowledged."""

    def __init__(
        self, producer: Producer, composer: AnswerEncoder, books: OffsetStore, metrics: Metrics
    ) -> None:
        self._producer = producer
        self._composer = composer
        self._books = books
        self._metrics = metrics
        self._permits = asyncio.Semaphore(UNACKNOWLEDGED_CHUNKS)
        self._room = Room(UNACKNOWLEDGED_BYTES)
        self._tasks = asyncio.TaskGroup()
        self._stalled: dict[TopicPartition, list[Request]] = {}
        self._writing: dict[int, Sequence[Request]] = {}

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
        """Start to answer a chunk once a permit and bytes are free."""
        for target in addressed.keys() & self._stalled.keys():
            self._stalled[target] += addressed.pop(target)
        if not addressed:
            return
        size_bytes = sum(map(answer_bytes, addressed.values()))
        await self._room.enter(size_bytes)
        await self._permits.acquire()
        permit = _Pass(self._permits, self._room, size_bytes)
        self._tasks.create_task(self._answer(addressed, permit), name="responder-answer")

    def revoked(self) -> None:
        """Drop stalled requests whose ack handles have been revoked."""
        for target, waiting in self._stalled.items():
            self._stalled[target] = self._still_ours(waiting)

    def _still_ours(self, requests: list[Request]) -> list[Request]:
        if not any_void(requests):
            return requests
        ours: list[Request] = []
        for request in requests:
            if request.ack_handle.revoked:
                self._metrics.revoked.inc()
                request.ack_handle.ack()
            else:
                ours.append(request)
        return ours

    async def _answer(self, addressed: Addressed, permit: _Pass) -> None:
        """Write a chunk's answers, wait for the brokers, and acknowledge the requests."""
        left = set(addressed)

        def stall() -> None:
            for target in left:
                log.warning(Event.ANSWERS_STALLED, topic=str(target))
                self._stalled.setdefault(target, [])
            permit.give_back()

        timer = asyncio.get_running_loop().call_later(STALLED_S, stall)
        try:
            # All partitions are written concurrently. The first needs no task of its own, and
            # often there is only one.
            (here, these), *others = addressed.items()
            async with asyncio.TaskGroup() as tasks:
                for target, requests in others:
                    answering = self._answer_target(target, requests, left)
                    tasks.create_task(answering, name=f"to-{target}")
                await self._answer_target(here, these, left)
        finally:
            timer.cancel()
            permit.give_back()

    async def _answer_target(
        self, target: TopicPartition, requests: list[Request], left: set[TopicPartition]
    ) -> None:
        await self._write(target, requests)
        left.discard(target)
        while waiting := self._stalled.pop(target, None):
            await self._write(target, waiting)

    async def _write(self, target: TopicPartition, requests: list[Request]) -> None:
        self._writing[id(requests)] = requests
        try:
            await self._answer_partition(target, requests)
        finally:
            del self._writing[id(requests)]

    async def _answer_partition(self, target: TopicPartition, requests: list[Request]) -> None:
        composer = self._composer
        clock = composer.anchored()
        began_us = clock()
        records = composer.answers(requests, began_us)
        encoded_us = clock()
        refused = await deliver(
            self._producer,
            target,
            records,
            self._metrics,
            lambda index: not requests[index].ack_handle.revoked,
        )
        if refused:
            await self._answer_refused(
                [
                    (requests[index], target, error, False)
                    for index, error in refused.items()
                    if not requests[index].ack_handle.revoked
                ]
            )
        acknowledged_us = clock()
        # Dead letters are written before the ack: an acknowledged request is not read again.
        requests = self._still_ours(requests)
        failed = [request for request in requests if request.failure is not None]
        if failed:
            await self._keep(composer.letters(failed))
        times = Answering(began_us, encoded_us, acknowledged_us, clock())
        composer.answered({target: requests}, times)
        # Ack last: a crash before this line repeats answers, but loses none.
        self._books.ack(requests)

    async def _answer_refused(self, refused: Sequence[Refusal]) -> None:
        """Replace refused answers by fallbacks until each is accepted or given up."""
        while refused:
            ways: dict[tuple[TopicPartition, bool], list[Request]] = {}
            for request, target, error, bare in refused:
                way = self._composer.give_way(request, target, error, bare=bare)
                if way is not None:
                    ways.setdefault(way, []).append(request)
            again: list[Refusal] = []
            for (target, bare), requests in ways.items():
                now_us = self._composer.clock()
                records = self._composer.answers(requests, now_us, bare=bare)
                still = await deliver(self._producer, target, records, self._metrics)
                again += [(requests[index], target, still[index], bare) for index in still]
            refused = again

    async def _keep(self, letters: Mapping[TopicPartition, Sequence[NewRecord]]) -> None:
        for target, records in letters.items():
            refused = await deliver(self._producer, target, records, self._metrics)
            if unkept := too_large(target, refused):
                self._composer.unkept(target, len(unkept))
