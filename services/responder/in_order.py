"""The answering step for ordered at-least-once: write and wait before the next step.

All answers of a step are acknowledged together. If one were acknowledged before an earlier one on
another topic, later answers would overtake the earlier one after a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.delivery.offset_store import OffsetStore, Outgoing
from headrace.delivery.producing import deliver, deliver_in_order, too_large
from headrace.errors import Rejected
from headrace.log.port import Producer, TopicPartition
from headrace.protocol.messages import Request
from headrace.services.responder.encoder import Addressed, AnswerEncoder
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.span_attributes import Answering


class OrderedStep:
    """Answer requests of one source partition in order; see `turns.Step`."""

    def __init__(
        self, producer: Producer, composer: AnswerEncoder, books: OffsetStore, metrics: Metrics
    ) -> None:
        self._producer = producer
        self._composer = composer
        self._books = books
        self._metrics = metrics

    async def __call__(self, number: int, outgoing: list[Outgoing]) -> Sequence[Outgoing]:
        addressed: Addressed = {}
        for request, target in outgoing:
            if not (request.ack_handle.revoked or request.skipped):
                addressed.setdefault(target, []).append(request)
        # Answers for different targets have no order between them.
        async with asyncio.TaskGroup() as tasks:
            for target, requests in addressed.items():
                tasks.create_task(self._answer(target, requests), name=f"to-{target}")
        # Ack all at once, after every target is written: see the module's docstring.
        ours: list[Request] = []
        for request, _ in outgoing:
            if request.ack_handle.revoked:
                self._metrics.revoked.inc()
                request.ack_handle.ack()
            else:
                ours.append(request)
        self._books.ack(ours)
        return ()

    async def _answer(self, target: TopicPartition, requests: list[Request]) -> None:
        composer = self._composer
        clock = composer.anchored()
        began_us = clock()
        records = composer.answers(requests, began_us)
        encoded_us = clock()
        start = 0

        def is_ours() -> bool:
            return not requests[0].ack_handle.revoked  # all are of one assignment

        while start < len(records):
            refused = await deliver_in_order(
                self._producer, target, records[start:], self._metrics, is_ours
            )
            if refused is None:
                break
            index, error = refused
            await self._answer_refused(requests[start + index], target, error)
            start += index + 1
        if not is_ours():
            return
        acknowledged_us = clock()
        for where, letters in composer.letters(requests).items():
            refused_letters = await deliver(self._producer, where, letters, self._metrics)
            if unkept := too_large(where, refused_letters):
                composer.unkept(where, len(unkept))
        times = Answering(began_us, encoded_us, acknowledged_us, clock())
        composer.answered({target: requests}, times)

    async def _answer_refused(
        self, request: Request, target: TopicPartition, error: Rejected
    ) -> None:
        bare = False
        while (way := self._composer.give_way(request, target, error, bare=bare)) is not None:
            target, bare = way
            records = self._composer.answers([request], self._composer.clock(), bare=bare)
            refused = await deliver_in_order(self._producer, target, records, self._metrics)
            if refused is None:
                return
            error = refused[1]
