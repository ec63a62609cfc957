"""Comparison run: sends every recorded request to all sides, and compares the answers at once.

A few requests are in flight at a time. Each is sent to the sides one after the other, in an order
that rotates from request to request, so that other load on the machine affects all sides equally.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from headrace.errors import Code, ConfigurationError
from headrace.log.port import Record, TopicPartition
from headrace.tools.replay.compare.answers import MISSING, Measured, compare_answers
from headrace.tools.replay.compare.asking import Asked, Subject
from headrace.tools.replay.compare.latency import Latencies
from headrace.tools.replay.compare.tally import PairTally, WorstCase, WorstCases
from headrace.tools.replay.compare.verdict import Sides
from headrace.tools.replay.jobs import Advanced
from headrace.tools.replay.recording import Recording, record_bytes
from headrace.tools.replay.selection import model_of

DEFAULT_CONCURRENCY = 8
DEFAULT_TOP_K = 5


@dataclass(slots=True)
class Comparison:
    """Results of a run.

    Attributes:
        top_k: the k of the top-k agreement.
        noise: the second run of the current model against the reference; None without one.
        reference, again, other: latencies of the reference, of the second run, and of the
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
    again: Latencies = field(default_factory=Latencies)
    other: Latencies = field(default_factory=Latencies)
    worst: WorstCases = field(default_factory=WorstCases)

    def add(self, asked: Asked) -> None:
        """Compare the answers to one request.

        Raises:
            ConfigurationError: a side that runs here lacks the model, or it has failed there.
        """
        require_model(asked, reference_is_recorded=self.reference_is_recorded)
        if asked.reference.code == MISSING:
            self.missing += 1
            return
        self.reference.add(asked.reference)
        self.other.add(asked.candidate)
        if asked.again is not None:
            self.again.add(asked.again)
            self.noise = self.noise or PairTally()
            difference = compare_answers(asked.reference, asked.again, self.top_k)
            self.noise.add(difference, asked.reference)
        difference = compare_answers(asked.reference, asked.candidate, self.top_k)
        self.candidate.add(difference, asked.reference)
        request = asked.request
        self.worst.add(
            WorstCase(
                request.topic,
                request.partition,
                request.offset,
                model_of(request)[0],
                difference,
                asked.reference,
                asked.candidate,
            )
        )

    def sides(self) -> Sides:
        """Return the data to judge. Latencies are compared only if the reference ran here."""
        again = None if self.noise is None else self.again
        if not self.reference_is_recorded:
            return Sides(self.candidate, self.noise, self.other, self.reference, again)
        return Sides(
            self.candidate, self.noise, self.other, again, missing=self.missing, recorded=True
        )


def require_model(asked: Asked, *, reference_is_recorded: bool = False) -> None:
    """Check that all sides serve the request's model, or none does.

    A model that has failed, or that only one side lacks, says nothing about the candidate. If all
    sides lack it, that is the caller's mistake, which stays in the comparison as an equal refusal.

    Raises:
        ConfigurationError: with the side, and its answer.
    """
    answers = {"the current model's side": asked.reference, "the candidate's side": asked.candidate}
    if reference_is_recorded:
        answers = {"the candidate's side": asked.candidate}
        if asked.again is not None:
            answers["the current model's side"] = asked.again
    known = {each.code for each in (asked.reference, asked.candidate)} - {MISSING}
    for side, answer in answers.items():
        lacking = answer.code == Code.UNKNOWN_MODEL and known != {Code.UNKNOWN_MODEL}
        if lacking or answer.code == Code.MODEL_NOT_READY:
            # Without the request, so that concurrent failures produce a single line.
            raise ConfigurationError(
                f"expected a model that {side} serves, got {answer.code}: {answer.message}"
            )


async def compare(
    recording: Recording,
    subjects: tuple[Subject, Subject | None, Subject],
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
    subjects: tuple[Subject, Subject | None, Subject], number: int, request: Record
) -> Asked:
    answers: dict[int, Measured] = {}
    for turn in range(len(subjects)):
        place = (number + turn) % len(subjects)
        subject = subjects[place]
        if subject is not None:
            answers[place] = await subject.answer(request)
    return Asked(request, answers[0], answers.get(1), answers[2])
