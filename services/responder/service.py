"""The responder's path: a request with its outcome → its answer → where it goes → acknowledged.

Every request of the process, however it ended, comes through here. Chunks overlap: while one
waits for its acknowledgement the next ones are encoded and sent, up to a bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog

from headrace.codec import encode_error, encode_response
from headrace.envelope import answer_headers, dead_letter_headers
from headrace.errors import Code
from headrace.flow.channel import Inlet
from headrace.flow.endings import deadline_passed
from headrace.flow.origins import Origins
from headrace.flow.pool import TaskPool
from headrace.flow.sending import deliver, too_large
from headrace.log.errors import RecordTooLarge, TopicForbidden
from headrace.log.port import NewRecord, Producer, TopicPartition
from headrace.messages import Failure, Request
from headrace.services.responder.directory import TopicDirectory
from headrace.services.responder.routing import Routes, choose_partition, misrouted
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import Event
from headrace.telemetry.request_log import log_answered
from headrace.telemetry.span_attributes import Answering
from headrace.topics import Stage

log = structlog.get_logger(__name__)

UNACKNOWLEDGED_CHUNKS = 16
BARE_HEADERS = 3
"""The headers that are ours come first: content-type, x-status, x-request."""

Addressed = dict[TopicPartition, list[Request]]


class ResponderService:
    """Answers each request once, and keeps dead letters.

    Args:
        inlet: requests that have ended, with outputs or a failure.
        origins: where the source topic is not read in this process; None where it is.
    """

    def __init__(
        self,
        inlet: Inlet[list[Request]],
        producer: Producer,
        routes: Routes,
        origins: Origins | None,
        instruments: Instruments,
    ) -> None:
        self._inlet = inlet
        self._producer = producer
        self._routes = routes
        self._origins = origins
        self._metrics, self._tracing, self._clock = instruments
        self._directory = TopicDirectory(producer, self._resolved)

    async def run(self) -> None:
        """Until the inlet ends and everything is acknowledged."""
        async with (
            asyncio.TaskGroup() as lookups,
            TaskPool(UNACKNOWLEDGED_CHUNKS, "responder-answer") as answers,
        ):
            while (chunk := await self._inlet.receive()) is not None:
                addressed = self._address(self._ours(chunk), lookups)
                if addressed:
                    await answers.start(self._answer(addressed))

    def _ours(self, chunk: list[Request]) -> list[Request]:
        """Without those that are another owner's now, or answered already."""
        ours: list[Request] = []
        for request in chunk:
            if request.receipt.void:
                self._metrics.void.inc()
                request.receipt.settle()
            elif self._origins is None or self._origins.claim(request.partition, request.offset):
                ours.append(request)
            else:
                self._metrics.duplicates.inc()
                request.receipt.settle()
        return ours

    def _address(self, requests: Iterable[Request], lookups: asyncio.TaskGroup) -> Addressed:
        """Where each answer goes; those whose reply topic is not known yet are left out."""
        addressed: Addressed = {}
        for request in requests:
            envelope = request.envelope
            topic = envelope.reply_topic
            if topic is None and envelope.reply_partition is None:
                addressed.setdefault(self._routes.default(request), []).append(request)
                continue
            topic = topic or self._routes.responses
            refusal = self._routes.refusal(topic)
            partitions = (
                self._routes.responses_partitions
                if topic == self._routes.responses
                else self._directory.known(topic)
            )
            if refusal is None and partitions is None:
                self._directory.wait_for(topic, request, lookups)
                continue
            target = refusal or choose_partition(envelope, request.partition, topic, partitions)
            self._add(addressed, request, target)
        return addressed

    def _add(self, addressed: Addressed, request: Request, target: TopicPartition | str) -> None:
        """With a reason in the place of a target the request fails, and says so on `responses`."""
        if isinstance(target, str):
            request.outputs = None
            request.fail(misrouted(target))
            target = self._routes.default(request)
        addressed.setdefault(target, []).append(request)

    async def _resolved(
        self, requests: list[Request], partitions: int | TopicForbidden | None
    ) -> None:
        addressed: Addressed = {}
        for request in requests:
            topic = request.envelope.reply_topic
            assert topic is not None
            self._add(
                addressed,
                request,
                choose_partition(request.envelope, request.partition, topic, partitions),
            )
        await self._answer(addressed)

    async def _answer(self, addressed: Addressed) -> None:
        """Send, wait for the acknowledgements, settle."""
        # The partitions' answers are handed over at once, and then all waited for.
        async with asyncio.TaskGroup() as tasks:
            for target, requests in addressed.items():
                tasks.create_task(self._answer_partition(target, requests), name=f"to-{target}")

    async def _answer_partition(self, target: TopicPartition, requests: list[Request]) -> None:
        began_us = self._clock()
        encoded_us = await self._send(target, requests)
        acknowledged_us = self._clock()
        failed = [request for request in requests if request.failure is not None]
        if failed:
            await self._keep(failed)
        self._settle(requests, began_us)
        if self._tracing is not None:
            times = Answering(began_us, encoded_us, acknowledged_us, self._clock())
            self._tracing.answered(requests, target, times)

    async def _send(self, target: TopicPartition, requests: list[Request]) -> int:
        """Until all are acknowledged: what does not fit is answered with the error that says so;
        where that does not fit with the caller's key and headers on it, it goes without them.
        """
        now_us = self._clock()
        records = [self._encode(request, now_us) for request in requests]
        encoded_us = self._clock()
        left = await self._send_records(target, requests, records)
        if not left:
            return encoded_us
        for request in left:
            if request.failure is None:
                request.outputs = None
                request.fail(_unfitting(target))
        records = [self._encode(request, now_us) for request in left]
        left = await self._send_records(target, left, records)
        records = [self._encode(request, now_us) for request in left]
        bare = [NewRecord(None, record.value, record.headers[:BARE_HEADERS]) for record in records]
        left = await self._send_records(target, left, bare)
        if left:
            self._metrics.unanswered.inc(len(left))
            log.error(Event.ANSWER_TOO_LARGE, topic=str(target), count=len(left))
        return encoded_us

    async def _send_records(
        self, target: TopicPartition, requests: list[Request], records: list[NewRecord]
    ) -> list[Request]:
        """Returns those that are too large. Those that their reply topic refuses for another
        reason are answered on `responses`: it was deleted, we may not write to it, or it is
        compacted and wants a key.
        """
        refused = await deliver(self._producer, target, records, self._metrics) if records else {}
        if target.topic == self._routes.responses:
            return [requests[index] for index in too_large(target, refused)]
        astray: Addressed = {}
        left: list[Request] = []
        for index, error in refused.items():
            if isinstance(error, RecordTooLarge):
                left.append(requests[index])
            else:
                self._add(astray, requests[index], f"kafka_replyTopic: {error.message}")
        for default, strays in astray.items():
            await self._send(default, strays)
        return left

    def _encode(self, request: Request, now_us: int) -> NewRecord:
        if request.failure is None:
            late = deadline_passed(request, now_us, Stage.RESPONDER)
            if late is None:
                return NewRecord(
                    request.key,
                    encode_response(request, now_us),
                    answer_headers(request, "ok", self._routes.requests),
                )
            request.fail(late)
        failure = request.failure
        assert failure is not None
        if self._tracing is not None:
            self._tracing.keep(request, now_us)
        return NewRecord(
            request.key,
            encode_error(request, failure),
            answer_headers(request, failure.code, self._routes.requests),
        )

    async def _keep(self, failed: list[Request]) -> None:
        """Write dead letters of those that can never succeed as they are."""
        per_partition: dict[TopicPartition, list[NewRecord]] = {}
        for request in failed:
            failure = request.failure
            if failure is not None and Code(failure.code).is_dead_letter:
                self._metrics.dead_letter(failure.code)
                per_partition.setdefault(self._routes.dead_letter(request), []).append(
                    NewRecord(
                        request.key,
                        None if request.value is None else bytes(request.value),
                        dead_letter_headers(request, failure, self._routes.requests),
                    )
                )
        for target, records in per_partition.items():
            unkept = too_large(
                target, await deliver(self._producer, target, records, self._metrics)
            )
            if unkept:
                self._metrics.unkept.inc(len(unkept))
                log.error(Event.DEAD_LETTER_TOO_LARGE, topic=str(target), count=len(unkept))

    def _settle(self, requests: list[Request], began_us: int) -> None:
        now_us = self._clock()
        self._metrics.answered(requests, began_us, now_us)
        log_answered(requests, now_us)
        for request in requests:
            if self._origins is not None:
                self._origins.answered(request.partition, request.previous, request.offset)
            request.receipt.settle()


def _unfitting(target: TopicPartition) -> Failure:
    return Failure(
        Code.TOO_LARGE,
        f"answer: expected one that fits a record of {target.topic}, got a larger one",
        Stage.RESPONDER,
    )
