"""Encode answers and dead letters as records, and choose fallbacks for refused answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import structlog

from headrace.delivery.failures import deadline_passed
from headrace.errors import Code, Rejected
from headrace.log.errors import LogRefused, RecordTooLarge
from headrace.log.port import NewRecord, TopicPartition
from headrace.protocol.codec import encode_error, encode_responses
from headrace.protocol.headers import answer_headers, answers_headers, dead_letter_headers
from headrace.protocol.messages import Failure, Head, Request
from headrace.services.responder.routing import Routes, misrouted
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import Event
from headrace.telemetry.request_log import log_answered
from headrace.telemetry.span_attributes import Answering
from headrace.topics import Stage

log = structlog.get_logger(__name__)

BARE_HEADERS = 3
"""Number of Headrace's own headers, which come first: content-type, x-status, x-request."""

Addressed = dict[TopicPartition, list[Request]]


class AnswerEncoder:
    """Encode the records of ended requests, and report what was answered."""

    def __init__(self, routes: Routes, instruments: Instruments) -> None:
        self._routes = routes
        self._metrics, self._tracing = instruments.metrics, instruments.tracing
        self.clock, self.anchored = instruments.clock, instruments.anchored

    def answers(
        self, requests: Sequence[Request], now_us: int, *, bare: bool = False
    ) -> list[NewRecord]:
        """Return an answer for each request, in order; requests that are late by now fail first.

        Args:
            requests: ended requests.
            now_us: epoch microseconds.
            bare: encode errors without the caller's key and headers.
        """
        for request in [each for each in requests if each.envelope.deadline_ms]:
            late = deadline_passed(request, now_us, Stage.RESPONDER)
            if late is not None and request.failure is None:
                request.fail(late)
        fine = [request for request in requests if request.failure is None]
        values = encode_responses(fine, now_us)
        headers = answers_headers(fine, "ok", self._routes.requests)
        new = tuple.__new__  # half the cost of calling a NamedTuple's class
        records: list[NewRecord] = [
            new(NewRecord, (request.key, value, own, None))
            for request, value, own in zip(fine, values, headers, strict=True)
        ]
        if len(fine) == len(requests):
            return records
        answered = iter(records)
        return [
            next(answered) if request.failure is None else self._error(request, now_us, bare=bare)
            for request in requests
        ]

    def _error(self, request: Request, now_us: int, *, bare: bool) -> NewRecord:
        failure = request.failure
        assert failure is not None
        if self._tracing is not None:
            self._tracing.keep(request, now_us)
        headers = answer_headers(request, failure.code, self._routes.requests)
        value = encode_error(request, failure)
        if bare:
            return NewRecord(None, value, headers[:BARE_HEADERS])
        return NewRecord(request.key, value, headers)

    def letters(self, requests: Iterable[Request]) -> dict[TopicPartition, list[NewRecord]]:
        """Return the dead letters, by target, of requests that can never succeed as they are."""
        found: dict[TopicPartition, list[NewRecord]] = {}
        for request in requests:
            if (target := self.letter_target(request)) is not None:
                found.setdefault(target, []).append(self.letter(request))
        return found

    def letter_target(self, request: Request) -> TopicPartition | None:
        """Return where a request's dead letter is kept; None if it has none."""
        failure = request.failure
        if failure is None or not Code(failure.code).is_dead_letter:
            return None
        return self._routes.dead_letter(request)

    def letter(self, request: Request) -> NewRecord:
        """Return the dead letter of a request that has one."""
        failure = request.failure
        assert failure is not None
        return NewRecord(
            request.key,
            None if request.value is None else bytes(request.value),
            dead_letter_headers(request, failure, self._routes.requests),
        )

    def misroute(self, request: Request, reason: str) -> TopicPartition:
        """Fail a request whose reply topic is refused; return its target on `responses`."""
        request.outputs = None
        request.fail(misrouted(reason))
        return self._routes.default(request)

    def give_way(
        self, request: Request, target: TopicPartition, error: Rejected, *, bare: bool
    ) -> tuple[TopicPartition, bool] | None:
        """Choose the fallback for an answer that the log refused.

        An answer that is too large becomes a `TOO_LARGE` error, then a bare one. An answer that
        its reply topic refuses for another reason (topic deleted, no write permission, or
        compacted and without a key) goes to `responses` as an error.

        Returns:
            The target, and whether the answer is bare; None if there is no fallback left.

        Raises:
            LogRefused: `responses` refused the answer for another reason than its size.
        """
        if not isinstance(error, RecordTooLarge):
            if target.topic == self._routes.responses:
                raise LogRefused(f"{target}: {error.message}") from error
            return self.misroute(request, f"kafka_replyTopic: {error.message}"), False
        if request.failure is None:
            request.outputs = None
            request.fail(_unfitting(target))
            return target, False
        if not bare:
            return target, True
        self._metrics.unanswered.inc()
        log.error(Event.ANSWER_TOO_LARGE, topic=str(target), count=1)
        return None

    def unkept(self, target: TopicPartition, count: int) -> None:
        """Count and log dead letters that were dropped because they are too large."""
        self._metrics.unkept.inc(count)
        log.error(Event.DEAD_LETTER_TOO_LARGE, topic=str(target), count=count)

    def answered(
        self, addressed: Mapping[TopicPartition, Sequence[Request]], times: Answering
    ) -> None:
        """Record in metrics, logs and traces that these answers and dead letters are written."""
        now_us = times.kept_us
        for target, requests in addressed.items():
            self._metrics.answered(requests, times.began_us, now_us)
            log_answered(requests, now_us)
            for failure in [one for each in requests if (one := each.failure) is not None]:
                if Code(failure.code).is_dead_letter:
                    self._metrics.dead_letter(failure.code)
            if self._tracing is not None:
                self._tracing.answered(requests, target, times)


def _unfitting(target: TopicPartition) -> Failure:
    return Failure(
        Code.TOO_LARGE,
        f"answer: expected one that fits a record of {target.topic}, got a larger one",
        Stage.RESPONDER,
    )


def answer_bytes(requests: Iterable[Request]) -> int:
    """Return the size in bytes of the requests' outputs; shared outputs count for each request."""
    total = size_bytes = 0
    heads: tuple[Head, ...] = ()
    for request in requests:
        contents = request.contents
        if contents:
            if request.heads is not heads:
                heads, size_bytes = request.heads, sum(map(len, contents))
            total += size_bytes
    return total
