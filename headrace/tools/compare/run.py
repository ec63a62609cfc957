"""Comparison run: sends every recorded request to all sides, and compares the answers at once.

A side is a pipeline in this process, or recorded answers. A few requests are in flight at a time.
Each is sent to the sides one after the other, in an order that rotates from request to request, so
that other load on the machine affects all sides equally.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from sys import getsizeof
from typing import NamedTuple, Protocol

from headrace.client.rpc import RpcClient, last_header
from headrace.errors import Code, ConfigurationError
from headrace.log.port import NewRecord, Record, TopicPartition
from headrace.protocol.headers import HeaderName
from headrace.tools.compare.differences import MISSING, TimedAnswer, compare_answers, measured
from headrace.tools.compare.tally import Latencies, PairTally, WorstCase, WorstCases
from headrace.tools.compare.verdict import Sides
from headrace.tools.replay.jobs import Advanced
from headrace.tools.replay.recording import (
    Recording,
    identity,
    memory_bytes,
    model_of,
    record_bytes,
)
from headrace.tools.replay.sinks import Unanswered

# --- sides ---------------------------------------------------------------------------------------


ANSWER_TIMEOUT_S = 60.0
MAX_RECORDED_BYTES = 1024 * 1024 * 1024
"""Limit of recorded answers, which are held in memory until they are used."""

_LEFT_OUT = frozenset(
    {
        HeaderName.CORRELATION_ID,
        HeaderName.REPLY_TOPIC,
        HeaderName.REPLY_PARTITION,
        HeaderName.DEADLINE_MS,
        HeaderName.TIMEOUT_MS,
    }
)


class AnsweredRequest(NamedTuple):
    """One request and its three answers; `second` is None without a second run."""

    request: Record
    reference: TimedAnswer
    second: TimedAnswer | None
    candidate: TimedAnswer


class AnswerSource(Protocol):
    """One side, which answers requests."""

    async def answer(self, request: Record) -> TimedAnswer:
        """Return the answer to a recorded request."""
        ...


class PipelineAnswers:
    """A pipeline behind this request/reply client. Requests are sent without their deadlines, which
    would make the outcome depend on timing.
    """

    def __init__(self, rpc: RpcClient) -> None:
        self._rpc = rpc

    async def answer(self, request: Record) -> TimedAnswer:
        """See `AnswerSource`. Raises `Unanswered`."""
        headers = [header for header in request.headers if header[0] not in _LEFT_OUT]
        started = time.perf_counter_ns()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await self._rpc.call(NewRecord(request.key, request.value, headers))
        except TimeoutError:
            raise Unanswered(
                f"{identity(request)}: no answer within {ANSWER_TIMEOUT_S:g} s"
            ) from None
        return measured(answer, (time.perf_counter_ns() - started) // 1000)


class RecordedAnswers:
    """Answers by the identity of their request; see `load_answers`. For a copy made by a replay
    (`x-replay-of`) the answer to its original may be used.
    """

    def __init__(self, answers: Mapping[str, Record]) -> None:
        self._answers = answers

    async def answer(self, request: Record) -> TimedAnswer:
        """See `AnswerSource`; `missing` if no answer was recorded."""
        named = (self._answers.get(each) for each in _asked_by(request))
        record = next((each for each in named if each is not None), None)
        if record is None:
            return TimedAnswer(MISSING, "no answer to this request was recorded")
        return measured(record)


async def load_answers(recording: Recording, requests: Recording) -> dict[str, Record]:
    """Return the recorded answers to these requests, and to the originals of copies among them, by
    their request (`x-request`); later duplicates are ignored.

    Raises:
        ConfigurationError: they are more than `MAX_RECORDED_BYTES`, with the names of requests.
    """
    wanted: set[str] = set()
    answers: dict[str, Record] = {}
    size = 0
    async for request in requests:
        new = set(_asked_by(request)) - wanted
        wanted |= new
        size += sum(map(getsizeof, new))
        _require_room(recording, size)
    async with aclosing(recording.chunks()) as chunks:
        async for chunk in chunks:
            for record in chunk:
                given = last_header(record.headers, HeaderName.REQUEST) or b""
                request_id = given.decode(errors="replace")
                if request_id in wanted and request_id not in answers:
                    answers[request_id] = record
                    size += memory_bytes(record)
            _require_room(recording, size)
    return answers


def _require_room(recording: Recording, size_bytes: int) -> None:
    if size_bytes > MAX_RECORDED_BYTES:
        raise ConfigurationError(
            f"{recording.name}: expected at most {MAX_RECORDED_BYTES} bytes of recorded answers, "
            "got more; select fewer requests"
        )


def _asked_by(request: Record) -> Iterator[str]:
    """Yield by what recorded answers may name a request: its identity, and its original's."""
    yield identity(request)
    copied_from = last_header(request.headers, HeaderName.REPLAY_OF)
    if copied_from is not None:
        yield copied_from.decode(errors="replace")


# --- the run -------------------------------------------------------------------------------------


DEFAULT_CONCURRENCY = 8
DEFAULT_TOP_K = 5


@dataclass(slots=True)
class Comparison:
    """Results of a run.

    Attributes:
        top_k: the k of the top-k agreement.
        noise: the second run of the current model against the reference; None without one.
        reference, second, other: latencies of the reference, of the second run, and of the
            candidate.
        reference_is_recorded: it was not run here, and its timings are another machine's.
        missing: requests without a recorded answer; they are excluded from everything else.
    """

    top_k: int = DEFAULT_TOP_K
    reference_is_recorded: bool = False
    missing: int = 0
    candidate: PairTally = field(default_factory=PairTally)
    noise: PairTally | None = None
    reference: Latencies = field(default_factory=Latencies)
    second: Latencies = field(default_factory=Latencies)
    other: Latencies = field(default_factory=Latencies)
    worst: WorstCases = field(default_factory=WorstCases)

    def add(self, answered: AnsweredRequest) -> None:
        """Compare the answers to one request.

        Raises:
            ConfigurationError: a side that runs here lacks the model, or it has failed there.
        """
        require_model(answered, reference_is_recorded=self.reference_is_recorded)
        if answered.reference.code == MISSING:
            self.missing += 1
            return
        self.reference.add(answered.reference)
        self.other.add(answered.candidate)
        if answered.second is not None:
            self.second.add(answered.second)
            self.noise = self.noise or PairTally()
            difference = compare_answers(answered.reference, answered.second, self.top_k)
            self.noise.add(difference, answered.reference)
        difference = compare_answers(answered.reference, answered.candidate, self.top_k)
        self.candidate.add(difference, answered.reference)
        request = answered.request
        self.worst.add(
            WorstCase(
                request.topic,
                request.partition,
                request.offset,
                model_of(request)[0],
                difference,
                answered.reference,
                answered.candidate,
            )
        )

    def sides(self) -> Sides:
        """Return the data to judge. Latencies are compared only if the reference ran here."""
        second = None if self.noise is None else self.second
        if not self.reference_is_recorded:
            return Sides(self.candidate, self.noise, self.other, self.reference, second)
        return Sides(
            self.candidate, self.noise, self.other, second, missing=self.missing, recorded=True
        )


def require_model(answered: AnsweredRequest, *, reference_is_recorded: bool) -> None:
    """Check that all sides serve the request's model, or none does.

    A model that has failed, or that only one side lacks, says nothing about the candidate. If all
    sides lack it, that is the caller's mistake, which stays in the comparison as an equal refusal.

    Raises:
        ConfigurationError: with the side, and its answer.
    """
    answers = {
        "the current model's side": answered.reference,
        "the candidate's side": answered.candidate,
    }
    if reference_is_recorded:
        answers = {"the candidate's side": answered.candidate}
        if answered.second is not None:
            answers["the current model's side"] = answered.second
    known = {each.code for each in (answered.reference, answered.candidate)} - {MISSING}
    for side, answer in answers.items():
        lacking = answer.code == Code.UNKNOWN_MODEL and known != {Code.UNKNOWN_MODEL}
        if lacking or answer.code == Code.MODEL_NOT_READY:
            # Without the request, so that concurrent failures produce a single line.
            raise ConfigurationError(
                f"expected a model that {side} serves, got {answer.code}: {answer.message}"
            )


async def compare(
    recording: Recording,
    subjects: tuple[AnswerSource, AnswerSource | None, AnswerSource],
    comparison: Comparison,
    *,
    concurrency: int = DEFAULT_CONCURRENCY,
    advanced: Advanced = lambda *_: None,
) -> None:
    """Send the recorded requests to the reference, the second run and the candidate.

    The results are added to `comparison`; `concurrency` is the number of requests in flight, and
    `advanced` is called for each answered request.

    Raises:
        ExceptionGroup: with the cause of the end, such as `Unanswered` or `ConfigurationError` (see
            `require_model`).
        ConfigurationError: no side had a model for any request.
    """
    async with aclosing(_numbered(recording)) as requests:
        taking = asyncio.Lock()

        async def work() -> None:
            while True:
                async with taking:
                    numbered = await anext(requests, None)
                if numbered is None:
                    return
                comparison.add(await _ask(subjects, *numbered))
                request = numbered[1]
                place = TopicPartition(request.topic, request.partition)
                advanced(1, record_bytes(request), {place: request.offset + 1})

        async with asyncio.TaskGroup() as tasks:
            for number in range(concurrency):
                tasks.create_task(work(), name=f"compare-{number}")
    unknown = comparison.candidate.codes[Code.UNKNOWN_MODEL, Code.UNKNOWN_MODEL]
    if unknown and unknown == comparison.candidate.count:
        raise ConfigurationError(
            f"{recording.name}: expected requests of models that are served, got {unknown} of "
            "models that neither side has"
        )


async def _numbered(recording: Recording) -> AsyncGenerator[tuple[int, Record], None]:
    number = 0
    async with aclosing(recording.chunks()) as chunks:
        async for chunk in chunks:
            for record in chunk:
                yield number, record
                number += 1


async def _ask(
    subjects: tuple[AnswerSource, AnswerSource | None, AnswerSource], number: int, request: Record
) -> AnsweredRequest:
    answers: dict[int, TimedAnswer] = {}
    for turn in range(len(subjects)):
        place = (number + turn) % len(subjects)
        subject = subjects[place]
        if subject is not None:
            answers[place] = await subject.answer(request)
    return AnsweredRequest(request, answers[0], answers.get(1), answers[2])
