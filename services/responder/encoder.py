"""Encode answers and dead letters as records, and choose fallbacks for refused answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from itertools import chain, groupby
from operator import itemgetter

import structlog

from headrace.delivery.failures import deadline_passed
from headrace.delivery.offset_store import PendingAnswer, requests_of
from headrace.delivery.producing import refused_for_size
from headrace.delivery.transactions import AnswersToEncode, Records
from headrace.errors import Code, Rejected
from headrace.log.errors import LogRefused, RecordsRefused, RecordTooLarge, UnknownPartition
from headrace.log.port import NewRecord, TopicPartition
from headrace.protocol.codec import encode_error, encode_response, encode_responses
from headrace.protocol.compression import compress
from headrace.protocol.headers import (
    OWN_ANSWER_HEADERS,
    answer_headers,
    answers_headers,
    dead_letter_headers,
)
from headrace.protocol.messages import Failure, Request, TensorMetadata
from headrace.services.responder.routing import Routes, wrong_reply_topic
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import Event
from headrace.telemetry.request_log import log_answered
from headrace.telemetry.span_attributes import Answering
from headrace.topics import Stage
from headrace.tuning import TUNING, ResponderTuning

log = structlog.get_logger(__name__)

ReadValues = Callable[[Sequence[Request]], Awaitable[None]]
"""Sets the values of requests to those of their source records; see
`headrace.transport.source_values.SourceValues.read`."""

RequestsByTarget = dict[TopicPartition, list[Request]]
"""Ended requests by the partition that their answers are written to."""


class AnswerEncoder:
    """Encode the records of ended requests, and report what was answered.

    Args:
        read_values: reads the values of requests for their dead letters; None reads none.

    Attributes:
        most_values: most values to read at a time.
    """

    def __init__(
        self,
        routes: Routes,
        instruments: Instruments,
        tuning: ResponderTuning = TUNING.responder,
        read_values: ReadValues | None = None,
    ) -> None:
        self._tuning = tuning
        self._read_values = read_values
        self.most_values = tuning.dead_letter_values
        self._routes = routes
        self._metrics, self._tracing = instruments.metrics, instruments.tracing
        self.clock, self.anchored_clock = instruments.clock, instruments.anchored_clock

    async def compress_answers(self, requests: Iterable[Request]) -> None:
        """Compress the answers of requests whose callers want that, before they are encoded.

        Small answers, and those that do not shrink, stay as they are. Many bytes are compressed
        on a thread.
        """
        chosen = [
            request
            for request in requests
            if request.envelope.answer_encoding
            and request.output_data is not None
            and request.compressed is None
            and request.stored is None
        ]
        if not chosen:
            return
        from_bytes = TUNING.protocol.compressed_from_bytes
        values = encode_responses(chosen, self.clock())

        def compress_all() -> list[bytes]:
            return [
                compress(value, request.envelope.answer_encoding)
                if len(value) >= from_bytes
                else value
                for request, value in zip(chosen, values, strict=True)
            ]

        if sum(map(len, values)) <= self._tuning.inline_compressed_bytes:
            made = compress_all()
        else:
            made = await asyncio.to_thread(compress_all)
        for request, value, compressed in zip(chosen, values, made, strict=True):
            request.compressed = compressed if len(compressed) < len(value) else b""

    def encode_answers(
        self, requests: Sequence[Request], now_us: int, *, minimal: bool = False
    ) -> list[NewRecord]:
        """Return an answer for each request, in order; requests that are late by now fail first.

        Args:
            requests: ended requests.
            now_us: epoch microseconds.
            minimal: encode errors without the caller's key and headers.
        """
        for request in [each for each in requests if each.envelope.deadline_ms]:
            late = deadline_passed(request, now_us, Stage.RESPONDER)
            if late is not None and request.failure is None:
                request.fail(late)
        fine = [request for request in requests if request.failure is None]
        # A list: unlike the steps of a generator, its steps are not calls.
        values: Sequence[bytes | None]
        if [request for request in fine if request.compressed or request.stored]:
            values = [
                None
                if request.stored is not None
                else request.compressed or encode_response(request, now_us)
                for request in fine
            ]
        else:
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
            next(answered)
            if request.failure is None
            else self._encode_error(request, now_us, minimal=minimal)
            for request in requests
        ]

    def _encode_error(self, request: Request, now_us: int, *, minimal: bool) -> NewRecord:
        failure = request.failure
        assert failure is not None
        if self._tracing is not None:
            self._tracing.keep(request, now_us)
        headers = answer_headers(request, failure.code, self._routes.requests)
        value = encode_error(request, failure)
        if minimal:
            return NewRecord(None, value, headers[:OWN_ANSWER_HEADERS])
        return NewRecord(request.key, value, headers)

    def encode_dead_letters(
        self, requests: Iterable[Request]
    ) -> dict[TopicPartition, list[NewRecord]]:
        """Return the dead letters, by target, of requests that can never succeed as they are."""
        found: dict[TopicPartition, list[NewRecord]] = {}
        for request in requests:
            if (target := self.dead_letter_target(request)) is not None:
                found.setdefault(target, []).append(self.encode_dead_letter(request))
        return found

    async def dead_letters(
        self, requests: Sequence[Request]
    ) -> AsyncIterator[dict[TopicPartition, list[NewRecord]]]:
        """Yield the dead letters of requests; those whose values are read first, some at a time."""
        lacking = self.lacking_values(requests)
        if not lacking:
            yield self.encode_dead_letters(requests)
            return
        others = set(requests).difference(lacking)
        yield self.encode_dead_letters([each for each in requests if each in others])
        most = self.most_values
        for start in range(0, len(lacking), most):
            part = lacking[start : start + most]
            await self.read_values(part)
            yield self.encode_dead_letters([each for each in part if not each.ack_handle.revoked])
            for request in part:
                request.value = None

    def lacking_values(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that failed here, and whose values are not here: they were late, or
        have run in another process.
        """
        if self._read_values is None:
            return []
        return [
            each
            for each in requests
            if each.value is None
            and each.failure is not None
            and each.failure.stage == Stage.RESPONDER
            and each.keeps_value
        ]

    async def read_values(self, requests: Sequence[Request]) -> None:
        """Read the values of requests for their dead letters. Those that are gone stay None."""
        assert self._read_values is not None  # `lacking_values` has found them
        failures = [request.failure for request in requests]
        await self._read_values(requests)
        for request, failure in zip(requests, failures, strict=True):
            request.failure = failure  # that of the answer, whatever happened to the value

    def dead_letter_target(self, request: Request) -> TopicPartition | None:
        """Return the partition of a request's dead letter; None if it has none."""
        failure = request.failure
        if failure is None or not Code(failure.code).is_dead_letter:
            return None
        return self._routes.dead_letter_target(request)

    def encode_dead_letter(self, request: Request) -> NewRecord:
        """Return the dead letter of a request that has one."""
        failure, value = request.failure, request.value
        assert failure is not None
        if request.envelope.claim is not None:
            value = None  # the record had the reference, and its headers still do
        return NewRecord(
            request.key,
            None if value is None else bytes(value),
            dead_letter_headers(request, failure, self._routes.requests),
        )

    def redirect_to_responses(self, request: Request, reason: str) -> TopicPartition:
        """Fail a request whose reply topic is refused; return its target on `responses`."""
        request.outputs = None
        request.fail(wrong_reply_topic(reason))
        return self._routes.default_target(request)

    def choose_fallback(
        self, request: Request, target: TopicPartition, error: Rejected, *, minimal: bool
    ) -> tuple[TopicPartition, bool] | None:
        """Choose the fallback for an answer that the log refused.

        An answer that is too large becomes a `TOO_LARGE` error, then a minimal one. An answer that
        its reply topic refuses for another reason (topic deleted, no write permission, or
        compacted and without a key) goes to `responses` as an error. Unless the request names a
        partition, an answer goes to another one of a reply topic made anew with fewer of them.

        Returns:
            The target, and whether the answer is minimal; None if there is no fallback left.

        Raises:
            LogRefused: `responses` refused the answer for another reason than its size.
        """
        if not isinstance(error, RecordTooLarge):
            if target.topic == self._routes.responses:
                raise LogRefused(error.message) from error  # it has the name of the topic
            if (
                isinstance(error, UnknownPartition)
                and error.partitions
                and request.envelope.reply_partition is None
            ):
                number = request.partition % error.partitions
                return TopicPartition(target.topic, number), minimal
            return self.redirect_to_responses(request, f"kafka_replyTopic: {error.message}"), False
        if request.failure is None:
            request.outputs = None
            request.fail(_answer_too_large(target))
            return target, False
        if not minimal:
            return target, True
        self._metrics.unanswered.inc()
        log.error(Event.ANSWER_TOO_LARGE, topic=str(target), count=1)
        return None

    def record_dropped_dead_letters(self, target: TopicPartition, count: int) -> None:
        """Count and log dead letters that were dropped because they are too large."""
        self._metrics.dead_letters_dropped.inc(count)
        log.error(Event.DEAD_LETTER_TOO_LARGE, topic=str(target), count=count)

    def record_answered(
        self, answered: Mapping[TopicPartition, Sequence[Request]], times: Answering
    ) -> None:
        """Record in metrics, logs and traces that these answers and dead letters are written."""
        now_us = times.dead_letters_us
        for target, requests in answered.items():
            self._metrics.answered(requests, times.began_us, now_us)
            log_answered(requests, now_us)
            for failure in [one for each in requests if (one := each.failure) is not None]:
                if Code(failure.code).is_dead_letter:
                    self._metrics.dead_letter(failure.code)
            if self._tracing is not None:
                self._tracing.answered(requests, target, times)


class TransactionRecords:
    """The records of one partition's transactions, for exactly once.

    An answer that its topic refuses before the transaction begins is replaced by a fallback. It
    keeps its fallback from one transaction to the next: it may be minimal or omitted, and its dead
    letter may be omitted.

    Attributes:
        is_cut: True if `read_values` has left answers to the next transaction; reset by the caller.
    """

    def __init__(self, encoder: AnswerEncoder) -> None:
        self._encoder = encoder
        self._minimal: set[Request] = set()
        self._omitted: set[Request] = set()
        self._without_dead_letter: set[Request] = set()
        self._read: set[Request] = set()
        self.is_cut = False
        self._answered: RequestsByTarget = {}
        self._answers: RequestsByTarget = {}
        self._dead_letters: RequestsByTarget = {}
        self._clock = encoder.anchored_clock()
        self._began_us = 0
        self._encoded_us = 0

    async def read_values(self, pending: list[PendingAnswer]) -> list[PendingAnswer]:
        """Read the values that dead letters lack, as many as one transaction may hold. Remove from
        `pending` and return the answers that must wait for the next one.
        """
        encoder, read = self._encoder, self._read
        failed = [request for request, _ in pending if request.failure is not None]
        lacking = [each for each in encoder.lacking_values(failed) if each not in read]
        if not lacking:
            return []
        most = max(1, encoder.most_values - len(read))
        rest: list[PendingAnswer] = []
        if len(lacking) > most:
            # All behind it, too: answers must not overtake.
            place = [request for request, _ in pending].index(lacking[most])
            rest, self.is_cut = pending[place:], True
            del pending[place:]
        await encoder.read_values(lacking[:most])
        read.update(lacking[:most])
        return rest

    def encode(self, pending: Sequence[PendingAnswer]) -> Records:
        """Return the answers and dead letters of one transaction; see
        `headrace.delivery.transactions`.
        """
        encoder = self._encoder
        self._clock = encoder.anchored_clock()
        self._began_us = self._encoded_us = self._clock()
        self._answered, self._dead_letters = {}, {}
        answered = pending
        if any(request.skipped for request, _ in pending if request.output_data is None):
            answered = [each for each in pending if not each[0].skipped]
        for target, consecutive in groupby(answered, itemgetter(1)):
            self._answered.setdefault(target, []).extend(requests_of(consecutive))
        self._answers = self._answered
        if self._omitted:
            self._answers = {
                target: [each for each in requests if each not in self._omitted]
                for target, requests in self._answered.items()
            }
        encode = partial(self._encode_answers, began_us=self._began_us)
        # Those that are late fail as they are encoded, which makes no dead letters.
        records: dict[TopicPartition, Sequence[NewRecord]] = {
            target: AnswersToEncode(requests, encode, output_bytes(requests))
            for target, requests in self._answers.items()
        }
        for request in [each for each, _ in pending if each.failure is not None]:
            where = encoder.dead_letter_target(request)
            if where is not None and request not in self._without_dead_letter:
                self._dead_letters.setdefault(where, []).append(request)
        for where, requests in self._dead_letters.items():
            records[where] = list(map(encoder.encode_dead_letter, requests))
        return records

    def _encode_answers(self, requests: Sequence[Request], *, began_us: int) -> list[NewRecord]:
        encode, minimal = self._encoder.encode_answers, self._minimal
        if not minimal:
            records = encode(requests, began_us)
        else:
            records = []
            for is_minimal, part in groupby(requests, minimal.__contains__):
                records += encode(list(part), began_us, minimal=is_minimal)
        self._encoded_us = self._clock()
        return records

    def replace_refused(
        self, pending: Sequence[PendingAnswer], error: RecordsRefused
    ) -> list[PendingAnswer]:
        """Choose fallbacks for refused records; return all answers with the targets to try next.

        Raises:
            LogRefused: one of Headrace's topics refused a record for a reason other than size.
        """
        targets: dict[Request, TopicPartition] = {}
        for where, refused in error.refused.items():
            if where in self._dead_letters:
                refused_for_size(refused)
                self._without_dead_letter.update(
                    self._dead_letters[where][index] for index in refused
                )
                continue
            for index, refusal in refused.items():
                request = self._answers[where][index]
                targets[request] = self.choose_fallback(request, where, refusal)
        return [(request, targets.get(request, target)) for request, target in pending]

    def choose_fallback(
        self, request: Request, target: TopicPartition, refusal: Rejected
    ) -> TopicPartition:
        """Choose an answer's fallback, return its target; see `AnswerEncoder.choose_fallback`."""
        fallback = self._encoder.choose_fallback(
            request, target, refusal, minimal=request in self._minimal
        )
        if fallback is None:
            self._omitted.add(request)
            return target
        target, minimal = fallback
        (self._minimal.add if minimal else self._minimal.discard)(request)
        return target

    def omit_dead_letter(self, request: Request) -> bool:
        """Omit a dead letter; return False if there is none, or it is omitted already."""
        if request in self._without_dead_letter:
            return False
        if self._encoder.dead_letter_target(request) is None:
            return False
        self._without_dead_letter.add(request)
        return True

    def restore_dead_letter(self, request: Request) -> None:
        """Undo `omit_dead_letter`."""
        self._without_dead_letter.discard(request)

    def record_committed(self) -> None:
        """Count and log what the last transaction has committed."""
        if not self._answered:
            return
        if self._without_dead_letter:
            self._record_omitted_dead_letters()
        now_us = self._clock()
        times = Answering(self._began_us, self._encoded_us, now_us, now_us)
        self._encoder.record_answered(self._answered, times)

    def _record_omitted_dead_letters(self) -> None:
        counts = Counter[TopicPartition]()
        for request in chain.from_iterable(self._answered.values()):
            where = self._encoder.dead_letter_target(request)
            if where is not None and request in self._without_dead_letter:
                counts[where] += 1
        for where, count in counts.items():
            self._encoder.record_dropped_dead_letters(where, count)

    def release(self) -> None:
        """Free the values that were read for a transaction, after it."""
        for request in self._read:
            request.value = None
        self._read.clear()
        self._answered, self._answers, self._dead_letters = {}, {}, {}


def _answer_too_large(target: TopicPartition) -> Failure:
    return Failure(
        Code.TOO_LARGE,
        f"answer: expected one that fits a record of {target.topic}, got a larger one",
        Stage.RESPONDER,
    )


def output_bytes(requests: Iterable[Request]) -> int:
    """Return the size in bytes of the requests' outputs; shared outputs count for each request."""
    total = size_bytes = 0
    metadata: tuple[TensorMetadata, ...] = ()
    for request in requests:
        data = request.output_data
        if data:
            if request.output_metadata is not metadata:
                metadata, size_bytes = request.output_metadata, sum(map(len, data))
            total += size_bytes
    return total


def record_sizes(pending: Iterable[PendingAnswer], overhead_bytes: int) -> Iterator[int]:
    """Yield the approximate bytes of each answer, its dead letter included.

    Args:
        pending: ended requests.
        overhead_bytes: bytes of an answer besides its outputs and its key.
    """
    for request, _ in pending:
        size_bytes = overhead_bytes + len(request.key or b"")
        size_bytes += sum(map(len, request.output_data or ()))
        if request.failure is not None:
            size_bytes += len(request.value or b"")
        yield size_bytes
