"""Answers that are put into a store, because they are too large for a record.

Each is encoded on a thread and put in a task of its own, before it goes to the answers that are
written: a slow store delays no other answer, until the outputs that wait for it have
`max_stored_answer_bytes`; then all wait, for `claims.timeout_ms` at most. The answer has the
reference, and the object is in the store before the answer is written. A repeated put changes
nothing; an answer that is made again after a crash has other timings in it, and so another place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from headrace.claims.putter import ClaimPutter
from headrace.claims.stores import ClaimUnavailable
from headrace.clock import Clock
from headrace.config import AnswerSettings
from headrace.delivery.failures import deadline_exceeded
from headrace.delivery.inflight import InFlightAck
from headrace.errors import Code
from headrace.primitives.byte_semaphore import ByteSemaphore
from headrace.primitives.stage_tasks import StageTasks
from headrace.primitives.worker_thread import WorkerThread
from headrace.protocol.claims import Claim, write_claim
from headrace.protocol.codec import encode_response
from headrace.protocol.compression import compress
from headrace.protocol.messages import Failure, Request, StoredAnswer
from headrace.services.responder.encoder import output_bytes
from headrace.telemetry.metrics import Metrics
from headrace.topics import Stage
from headrace.tuning import TUNING, ResponderTuning


class AnswerClaims:
    """Puts large answers.

    Args:
        putter: an open one, with `answers.claim_store`.
        settings: the size from which answers are put, and their time.
        requests: topic of the requests, which is in the names of objects.
        finish: writes the answer of a request whose object was put, or that failed.
        clock: wall clock.
    """

    def __init__(
        self,
        putter: ClaimPutter,
        settings: AnswerSettings,
        requests: str,
        finish: Callable[[Request], Awaitable[None]],
        tasks: StageTasks,
        metrics: Metrics,
        clock: Clock,
        tuning: ResponderTuning = TUNING.responder,
    ) -> None:
        self._putter = putter
        self._settings = settings
        self._requests = requests
        self._finish = finish
        self._tasks = tasks
        self._metrics = metrics
        self._clock = clock
        self._worker = WorkerThread("answer claims")
        self._max_bytes = tuning.max_stored_answer_bytes
        self._outputs = ByteSemaphore(self._max_bytes)

    def has_room(self) -> bool:
        """Return False while the outputs that are put exceed their limit."""
        return self._outputs.used_bytes <= self._max_bytes

    async def wait_for_room(self) -> None:
        """Wait until `has_room`."""
        await self._outputs.wait_within_limit()

    def take(self, requests: Sequence[Request]) -> list[Request]:
        """Start to put the answers that are too large; return the other requests."""
        above_bytes = self._settings.claim_above_bytes
        left: list[Request] = []
        for request in requests:
            size_bytes = output_bytes([request]) if request.failure is None else 0
            if size_bytes > above_bytes:
                self._outputs.acquire(size_bytes)
                self._metrics.claim_waiting_answer_bytes.inc(size_bytes)
                work = self._put(request, size_bytes)
                self._tasks.start(work, f"put-answer-{request.partition}")
            else:
                left.append(request)
        return left

    def close(self) -> None:
        """End the thread."""
        self._worker.close()

    async def _put(self, request: Request, size_bytes: int) -> None:
        if not self._worker.is_started:
            self._worker.start()
        deadline_ms = request.envelope.deadline_ms
        left_s = deadline_ms / 1000 - self._clock() / 1e6
        try:
            async with asyncio.timeout(left_s if deadline_ms else None):
                await self._encode_and_put(request)
        except TimeoutError:
            late_ms = max(0.0, self._clock() / 1000 - deadline_ms)
            request.fail(deadline_exceeded(deadline_ms, late_ms, Stage.RESPONDER))
        except ClaimUnavailable as error:
            request.fail(Failure(Code.INTERNAL, str(error), Stage.RESPONDER))
        finally:
            self._outputs.release(size_bytes)
            self._metrics.claim_waiting_answer_bytes.dec(size_bytes)
        if request.failure is not None:
            request.outputs = None
        await self._finish(request)

    async def _encode_and_put(self, request: Request) -> None:
        now_us = self._clock()
        name = f"{self._requests}/{request.partition}/{request.offset}"
        coding = request.envelope.answer_encoding

        def encode() -> tuple[bytes, Claim]:
            value = encode_response(request, now_us)
            content = compress(value, coding) if coding else value
            return content, self._putter.describe(name, content)

        content, claim = await self._worker.call(encode).done
        ack_handle = request.ack_handle
        if isinstance(ack_handle, InFlightAck):
            ack_handle.resize(ack_handle.size_bytes + len(content))
        expires_ms = now_us // 1000 + int(self._settings.claim_expiry_s * 1000)
        await self._putter.put(claim, content, "application/octet-stream", expires_ms)
        request.stored = StoredAnswer(write_claim(claim), expires_ms, coding)
        request.output_data = ()
