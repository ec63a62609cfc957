"""The responder's path: a request with its outcome → where its answer goes → acknowledged,
acknowledged.

Every request of the process, however it ended, comes through here. How answers are given follows
from what is promised of them: chunks overlap (`overlapping`), unless answers are sealed with the
commit or go in order; then each source partition takes its turns (`turns`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from headrace.delivery.inflight import InFlightAck
from headrace.delivery.offset_store import OffsetStore
from headrace.delivery.source_offsets import SourceOffsets
from headrace.delivery.transactions import PartitionTransactions
from headrace.log.errors import TopicForbidden
from headrace.log.port import Producer
from headrace.protocol.messages import Head, Request
from headrace.services.responder.composing import Addressed, AnswerEncoder, answer_bytes
from headrace.services.responder.directory import TopicDirectory
from headrace.services.responder.in_order import OrderedStep
from headrace.services.responder.overlapping import AtLeastOnce
from headrace.services.responder.routing import Routes, choose_partition
from headrace.services.responder.sealed import TransactionalStep
from headrace.services.responder.step_size import StepSizing
from headrace.services.responder.turns import OrderBy, Turns
from headrace.telemetry.instruments import Instruments
from headrace.transport.channels import Inlet

CHARGED_FROM_BYTES = 1024
"""Outputs of less than this are within what each request is charged beside its value."""

_Wish: TypeAlias = tuple[str | None, int | None, int]
"""A reply topic and a partition of it, as far as they were named, and the source partition."""


class Delivery(NamedTuple):
    """What is promised of answers, and what that takes.

    Attributes:
        books: of what is answered.
        origins: where the source topic is not read in this process; None where it is.
        sealing: for exactly once.
        order_by: within what the order of answers is kept.
        step_sizing: how large a transaction may be, for exactly once.
    """

    books: OffsetStore
    origins: SourceOffsets | None = None
    sealing: PartitionTransactions | None = None
    order_by: OrderBy = "none"
    step_sizing: StepSizing = StepSizing()


class ResponderService:
    """Answers each request once, and keeps dead letters.

    Args:
        inlet: requests that have ended, with outputs or a failure.
    """

    def __init__(
        self,
        inlet: Inlet[list[Request]],
        producer: Producer,
        routes: Routes,
        delivery: Delivery,
        instruments: Instruments,
    ) -> None:
        self._inlet = inlet
        self._routes = routes
        self._books = delivery.books
        self._origins = delivery.origins
        self._metrics = instruments.metrics
        self._composer = AnswerEncoder(routes, instruments)
        self._directory = TopicDirectory(producer, self._resolved)
        self._turns: Turns | None = None
        self._answers = self._make_answers(producer, delivery)

    def _make_answers(self, producer: Producer, delivery: Delivery) -> AtLeastOnce | Turns:
        books, sealing, metrics = delivery.books, delivery.sealing, self._metrics
        if sealing is not None:
            step: TransactionalStep | OrderedStep = TransactionalStep(
                sealing,
                self._composer,
                metrics,
                self._routes.responses,
                in_order=delivery.order_by != "none",
                sizing=delivery.step_sizing,
            )
        elif delivery.order_by != "none":
            step = OrderedStep(producer, self._composer, books, metrics)
        else:
            return AtLeastOnce(producer, self._composer, books, metrics)
        fused = delivery.origins is None
        self._turns = Turns(step, books, delivery.order_by, metrics, charges_held=fused)
        return self._turns

    async def run(self) -> None:
        """Until the inlet ends and everything is acknowledged."""
        async with self._answers, asyncio.TaskGroup() as lookups:
            while (chunk := await self._inlet.receive()) is not None:
                addressed = self._address(await self._ours(chunk), lookups)
                if addressed:
                    await self._answers.take(addressed)

    def revoked(self) -> None:
        """Ack handles have become revoked: let go of what waits for them."""
        self._answers.revoked()

    async def _ours(self, chunk: list[Request]) -> list[Request]:
        """Without those that are another owner's now, or answered already."""
        ours, repeated = self._sort_out(chunk)
        if repeated and self._origins is not None and await self._origins.has_other_records():
            others, repeated = self._sort_out(repeated)
            ours += others
        for request in repeated:
            self._metrics.duplicates.inc()
            request.ack_handle.ack()
        return ours

    def _sort_out(self, chunk: list[Request]) -> tuple[list[Request], list[Request]]:
        """Those that are to be answered, and those that seem to be answered already."""
        ours: list[Request] = []
        repeated: list[Request] = []
        heads: tuple[Head, ...] | None = None
        size_bytes = 0
        for request in chunk:
            ack_handle = request.ack_handle
            if ack_handle.assignment.revoked:
                self._metrics.revoked.inc()
                ack_handle.ack()
            elif request.contents is None and request.skipped and self._turns is None:
                self._books.ack([request])
            elif self._origins is None:
                ours.append(request)
                if request.heads is not heads:
                    heads, size_bytes = request.heads, answer_bytes([request])
                if size_bytes > CHARGED_FROM_BYTES and isinstance(ack_handle, InFlightAck):
                    ack_handle.resize(ack_handle.size_bytes + size_bytes)
            elif self._origins.claim(request.partition, request.offset):
                ours.append(request)
            elif request.skipped:  # its end is answered, and what lies before it may not be
                self._books.ack([request])
            else:
                repeated.append(request)
        return ours, repeated

    def _address(self, requests: Iterable[Request], lookups: asyncio.TaskGroup) -> Addressed:
        """Where each answer goes; those whose reply topic is not known yet are left out."""
        addressed: Addressed = {}
        alike: dict[_Wish, list[Request]] = {}
        last: list[Request] = []
        topic: str | None = None
        number: int | None = None
        partition = -1
        for request in requests:
            envelope = request.envelope
            if (
                request.partition != partition
                or envelope.reply_topic != topic
                or envelope.reply_partition != number
            ):
                partition = request.partition
                topic, number = envelope.reply_topic, envelope.reply_partition
                last = alike.setdefault((topic, number, partition), [])
            last.append(request)
        for (topic, number, _), some in alike.items():
            if topic is None and number is None:
                addressed.setdefault(self._routes.default(some[0]), []).extend(some)
            else:
                self._address_wish(addressed, topic or self._routes.responses, some, lookups)
        return addressed

    def _address_wish(
        self, addressed: Addressed, topic: str, alike: list[Request], lookups: asyncio.TaskGroup
    ) -> None:
        """Address requests that all want the same of their reply topic."""
        refusal = self._routes.refusal(topic)
        if refusal is not None:
            for request in alike:
                target = self._composer.misroute(request, refusal)
                addressed.setdefault(target, []).append(request)
            return
        partitions = (
            self._routes.responses_partitions
            if topic == self._routes.responses
            else self._directory.known(topic)
        )
        for request in alike:
            if partitions is None:
                self._directory.wait_for(topic, request, lookups)
            else:
                self._add(addressed, request, partitions)

    def _add(
        self, addressed: Addressed, request: Request, partitions: int | TopicForbidden | None
    ) -> None:
        """Address a request whose topic was found to have so many partitions, or not to be."""
        topic = request.envelope.reply_topic or self._routes.responses
        target = choose_partition(request.envelope, request.partition, topic, partitions)
        if isinstance(target, str):
            target = self._composer.misroute(request, target)
        addressed.setdefault(target, []).append(request)

    async def _resolved(
        self, requests: list[Request], partitions: int | TopicForbidden | None
    ) -> None:
        addressed: Addressed = {}
        for request in requests:
            if request.ack_handle.revoked:  # since it was asked for
                self._metrics.revoked.inc()
                request.ack_handle.ack()
            else:
                self._add(addressed, request, partitions)
        await self._answers.take(addressed)
