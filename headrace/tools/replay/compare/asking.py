"""Sides of a comparison: a pipeline in this process, or recorded answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import NamedTuple, Protocol

from headrace.client.rpc import RpcClient, last_header
from headrace.errors import ConfigurationError, Retriable
from headrace.log.port import NewRecord, Record
from headrace.tools.replay.compare.answers import MISSING, Measured, measured
from headrace.tools.replay.recording import Recording, identity, record_bytes

ANSWER_TIMEOUT_S = 60.0
MAX_RECORDED_BYTES = 1024 * 1024 * 1024
"""Limit of recorded answers, which are held in memory until they are used."""

RECORD_OVERHEAD_BYTES = 500

_LEFT_OUT = frozenset(
    {
        "kafka_correlationId",
        "kafka_replyTopic",
        "kafka_replyPartition",
        "x-deadline-ms",
        "x-timeout-ms",
    }
)


class Asked(NamedTuple):
    """One request and its three answers; `again` is None without a second run."""

    request: Record
    reference: Measured
    again: Measured | None
    candidate: Measured


class Subject(Protocol):
    """One side, which answers requests."""

    async def answer(self, request: Record) -> Measured:
        """Return the answer to a recorded request."""
        ...


class Unanswered(Retriable):
    """The pipeline has not answered for a minute."""


class PipelineSubject:
    """A pipeline behind this request/reply client. Requests are sent without their deadlines, which
    would make the outcome depend on timing.
    """

    def __init__(self, rpc: RpcClient) -> None:
        self._rpc = rpc

    async def answer(self, request: Record) -> Measured:
        """See `Subject`. Raises `Unanswered`."""
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


class RecordedSubject:
    """Answers by the identity of their request; see `load_answers`. For a copy made by a replay
    (`x-replay-of`) the answer to its original may be used.
    """

    def __init__(self, answers: Mapping[str, Record]) -> None:
        self._answers = answers

    async def answer(self, request: Record) -> Measured:
        """See `Subject`; `missing` if no answer was recorded."""
        record = self._answers.get(identity(request))
        if record is None:
            copied_from = last_header(request.headers, "x-replay-of")
            record = self._answers.get((copied_from or b"").decode(errors="replace"))
        if record is None:
            return Measured(MISSING, "no answer to this request was recorded")
        return measured(record)


async def load_answers(
    recording: Recording, max_bytes: int = MAX_RECORDED_BYTES
) -> dict[str, Record]:
    """Return recorded answers by their request (`x-request`); later duplicates are ignored.

    Raises:
        ConfigurationError: they are more than `max_bytes`.
    """
    answers: dict[str, Record] = {}
    size = 0
    async with aclosing(recording.chunks()) as chunks:
        async for chunk in chunks:
            for record in chunk:
                size += record_bytes(record) + RECORD_OVERHEAD_BYTES
                request = last_header(record.headers, "x-request")
                if request is not None:
                    answers.setdefault(request.decode(errors="replace"), record)
            if size > max_bytes:
                raise ConfigurationError(
                    f"{recording.name}: expected at most {max_bytes} bytes of recorded answers, "
                    "got more; select fewer"
                )
    return answers
