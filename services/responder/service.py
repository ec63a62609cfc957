"""The responder stage: ended requests → reply partitions → answers written → acknowledged.

Every request of the process comes through here, however it ended. The path of a chunk: `_select`
drops requests of revoked partitions, `_address` finds each answer's partition, and `_answer` starts
to write the answers, which are acknowledged in the background. Chunks overlap (`at_least_once`)
unless answers are committed in transactions or kept in order; then each source partition runs one
step at a time (`ordered`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from headrace.claims.putter import ClaimPutter
from headrace.config import AnswerSettings
from headrace.delivery.failures import drop_revoked
from headrace.delivery.inflight import InFlightAck
from headrace.delivery.offset_store import OffsetStore
from headrace.delivery.source_offsets import SourceOffsets
from headrace.delivery.transactions import PartitionTransactions
from headrace.log.errors import TopicForbidden
from headrace.log.port import Producer
from headrace.primitives.stage_tasks import StageTasks
from headrace.protocol.messages import Request, TensorMetadata
from headrace.services.responder.at_least_once import AtLeastOnce
from headrace.services.responder.claims import AnswerClaims
from headrace.services.responder.encoder import (
    AnswerEncoder,
    ReadValues,
    RequestsByTarget,
    output_bytes,
)
from headrace.services.responder.ordered import OrderBy, OrderedStep, PartitionSequencer
from headrace.services.responder.routing import ReplyTopics, Routes, choose_partition
from headrace.services.responder.transactional import TransactionalStep
from headrace.telemetry.instruments import Instruments
from headrace.transport.channels import Writer, Writers
from headrace.tuning import TUNING, DeliveryTuning, ResponderTuning

_ReplyTo: TypeAlias = tuple[str | None, int | None, int]
"""The requested reply topic and partition (None if not given), and the source partition."""


class Delivery(NamedTuple):
    """The delivery guarantee of answers, and the objects that implement it.

    Attributes:
        offset_store: offset store of answered requests.
        source_offsets: source offsets if another process reads the source topic; None otherwise.
        transactions: partition transactions, for exactly once.
        order_by: the scope in which answers keep their order.
        transaction_timeout_s: timeout of a transaction, for exactly once.
        putter: puts large answers into a store; None if all are in their records.
        answers: settings of which answers these are.
        tuning: of writes that fail.
        read_values: reads the values of requests from their source records; None reads none.
    """

    offset_store: OffsetStore
    source_offsets: SourceOffsets | None = None
    transactions: PartitionTransactions | None = None
    order_by: OrderBy = "none"
    transaction_timeout_s: float = TUNING.responder.transaction_timeout_s
    putter: ClaimPutter | None = None
    answers: AnswerSettings = AnswerSettings()
    tuning: DeliveryTuning = TUNING.delivery
    read_values: ReadValues | None = None


class ResponderService:
    """Answer each request once, and write dead letters.

    Its writers send it requests that have ended, with outputs or a failure.
    """

    def __init__(
        self,
        producer: Producer,
        routes: Routes,
        delivery: Delivery,
        instruments: Instruments,
        tuning: ResponderTuning = TUNING.responder,
    ) -> None:
        self._tuning = tuning
        self._writers: Writers[list[Request]] = Writers(self)
        self._tasks = StageTasks()  # lookups of topics, and writes of answers
        self._routes = routes
        self._offset_store = delivery.offset_store
        self._source_offsets = delivery.source_offsets
        self._metrics = instruments.metrics
        self._encoder = AnswerEncoder(routes, instruments, tuning, delivery.read_values)
        self._reply_topics = ReplyTopics(producer, self._on_looked_up, tuning)
        self._sequencer: PartitionSequencer | None = None
        self._answers = self._make_answers(producer, delivery)
        self._claims: AnswerClaims | None = None
        if delivery.putter is not None:
            self._claims = AnswerClaims(
                delivery.putter,
                delivery.answers,
                routes.requests,
                self._on_stored,
                self._tasks,
                instruments.metrics,
                instruments.clock,
                tuning,
            )

    def _make_answers(
        self, producer: Producer, delivery: Delivery
    ) -> AtLeastOnce | PartitionSequencer:
        offset_store, transactions, metrics = (
            delivery.offset_store,
            delivery.transactions,
            self._metrics,
        )
        if transactions is not None:
            step: TransactionalStep | OrderedStep = TransactionalStep(
                transactions,
                self._encoder,
                metrics,
                self._routes.responses,
                in_order=delivery.order_by != "none",
                timeout_s=delivery.transaction_timeout_s,
                tuning=self._tuning,
            )
        elif delivery.order_by != "none":
            step = OrderedStep(
                producer,
                self._encoder,
                offset_store,
                metrics,
                self._routes.responses,
                delivery.tuning,
            )
        else:
            return AtLeastOnce(
                producer,
                self._encoder,
                offset_store,
                metrics,
                self._tasks,
                self._tuning,
                delivery.tuning,
            )
        self._sequencer = PartitionSequencer(
            step,
            offset_store,
            delivery.order_by,
            metrics,
            self._tasks,
            # A responder apart from the other stages reads `results`, where the answer that the
            # held ones wait for may still have to be read.
            charges_held=delivery.source_offsets is None,
            tuning=self._tuning,
        )
        return self._sequencer

    # --- input -------------------------------------------------------------------------------

    def writer(self) -> Writer[list[Request]]:
        """Return a new writer of ended requests."""
        return self._writers.writer()

    def is_full(self) -> bool:
        """Return True while too many answers are not acknowledged, or not in their store."""
        claims = self._claims
        return not self._answers.has_room() or (claims is not None and not claims.has_room())

    def send_nowait(self, chunk: list[Request]) -> None:
        """See `headrace.transport.channels.SendStream`."""
        self._answer(*self._select(chunk))

    async def send(self, chunk: list[Request]) -> None:
        """See `headrace.transport.channels.SendStream`."""
        while self.is_full():
            await self._answers.wait_for_room()
            if self._claims is not None:
                await self._claims.wait_for_room()
        unanswered, repeated = self._select(chunk)
        if (
            repeated
            and self._source_offsets is not None
            # The source topic may have been recreated: its offsets then stand for other records.
            and await self._source_offsets.has_other_records()
        ):
            others, repeated = self._select(repeated)
            unanswered += others
        self._answer(unanswered, repeated)

    async def run(self) -> None:
        """Run until all writers are closed and every request is acknowledged."""
        async with self._tasks:
            await self._writers.closed()
        if self._claims is not None:
            self._claims.close()

    def drop_revoked(self) -> None:
        """Drop waiting requests whose ack handles have been revoked."""
        self._answers.drop_revoked()

    # --- a chunk -----------------------------------------------------------------------------

    def _select(self, chunk: list[Request]) -> tuple[list[Request], list[Request]]:
        """Split into (to be answered, apparently answered already); drop revoked requests."""
        unanswered: list[Request] = []
        repeated: list[Request] = []
        metadata: tuple[TensorMetadata, ...] | None = None
        size_bytes = 0
        charged_from_bytes = self._tuning.charged_from_bytes
        for request in chunk:
            ack_handle = request.ack_handle
            if ack_handle.assignment.revoked:
                self._metrics.revoked.inc()
                ack_handle.ack()
            elif request.output_data is None and request.skipped and self._sequencer is None:
                self._offset_store.ack([request])
            elif self._source_offsets is None:
                unanswered.append(request)
                if request.output_metadata is not metadata:
                    metadata, size_bytes = request.output_metadata, output_bytes([request])
                if size_bytes > charged_from_bytes and isinstance(ack_handle, InFlightAck):
                    ack_handle.resize(ack_handle.size_bytes + size_bytes)
            elif self._source_offsets.take(request.partition, request.offset):
                unanswered.append(request)
            elif request.skipped:  # its last offset is answered; those before it may not be
                self._offset_store.ack([request])
                if self._sequencer is not None:
                    self._sequencer.release_answered(request.partition)
            else:
                repeated.append(request)
        return unanswered, repeated

    def _answer(self, unanswered: list[Request], repeated: list[Request]) -> None:
        """Start to write the answers, and ack the requests that were answered already."""
        if self._claims is not None:
            unanswered = self._claims.take(unanswered)
        if addressed := self._address(unanswered):
            self._answers.submit(addressed)
        for request in repeated:
            self._metrics.duplicates.inc()
            request.ack_handle.ack()

    async def _on_stored(self, request: Request) -> None:
        """Write the answer of a request whose value is in a store, or that failed."""
        await self._answers.wait_for_room()
        if addressed := self._address(drop_revoked([request], self._metrics)):
            self._answers.submit(addressed)

    def _address(self, requests: Iterable[Request]) -> RequestsByTarget:
        """Group requests by target partition; leave out those whose topic is being looked up."""
        addressed: RequestsByTarget = {}
        by_reply_to: dict[_ReplyTo, list[Request]] = {}
        group: list[Request] = []  # of the request before, which most requests share
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
                group = by_reply_to.setdefault((topic, number, partition), [])
            group.append(request)
        for (topic, number, _), group in by_reply_to.items():
            if topic is None and number is None:
                addressed.setdefault(self._routes.default_target(group[0]), []).extend(group)
            else:
                self._address_named(addressed, topic or self._routes.responses, group)
        return addressed

    def _address_named(
        self,
        addressed: RequestsByTarget,
        topic: str,
        requests: list[Request],
    ) -> None:
        """Address requests that name the same reply topic and partition."""
        refusal = self._routes.refusal(topic)
        if refusal is not None:
            for request in requests:
                target = self._encoder.redirect_to_responses(request, refusal)
                addressed.setdefault(target, []).append(request)
            return
        known, number = self._routes.responses_partitions, requests[0].envelope.reply_partition
        partitions: int | None = known
        # `responses` may have got more partitions since the start.
        if topic != self._routes.responses or (number is not None and number >= known):
            partitions = self._reply_topics.cached_partitions(topic)
        for request in requests:
            if partitions is None:
                self._reply_topics.look_up(topic, request, self._tasks)
            else:
                self._address_one(addressed, request, partitions)

    def _address_one(
        self, addressed: RequestsByTarget, request: Request, partitions: int | TopicForbidden | None
    ) -> None:
        """Address a request after its topic's partitions were looked up (None: no such topic)."""
        topic = request.envelope.reply_topic or self._routes.responses
        target = choose_partition(request.envelope, request.partition, topic, partitions)
        if isinstance(target, str):
            target = self._encoder.redirect_to_responses(request, target)
        addressed.setdefault(target, []).append(request)

    async def _on_looked_up(
        self, requests: list[Request], partitions: int | TopicForbidden | None
    ) -> None:
        await self._answers.wait_for_room()
        addressed: RequestsByTarget = {}
        for request in drop_revoked(requests, self._metrics):  # revoked during the lookup
            self._address_one(addressed, request, partitions)
        if addressed:
            self._answers.submit(addressed)
