"""Workers that make inputs of payloads, with a time limit, so that none blocks the event loop.

A worker is a thread, or a child process (`headrace.services.ingest.transform_process`). User code
may take long or never return. On a thread, a transform that exceeds its model's `max_execution_s`
is interrupted by an exception, which ends any Python code. Native code does not notice the
exception; then the process ends after a grace period, and the record is found like any other that
ends its process. A child process is killed instead, and replaced.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from headrace.errors import Code, Fatal, Rejected, describe_error
from headrace.models.user_code import Interrupted, interrupt
from headrace.models.version import ModelVersion
from headrace.primitives.worker_thread import WorkerThread
from headrace.protocol.messages import InputTensor, Request
from headrace.tuning import TUNING, IngestTuning


class PendingTransform:
    """A payload that waits for its transform, and the result.

    Attributes:
        inputs: the transformed inputs; None if the transform failed.
        error: why the transform failed.
        took_s: how long a worker was busy with it.
    """

    __slots__ = (
        "content_type",
        "error",
        "inputs",
        "is_done",
        "is_interrupted",
        "request",
        "took_s",
        "value",
        "version",
    )

    def __init__(
        self, request: Request, version: ModelVersion, value: bytes, content_type: str
    ) -> None:
        self.request = request
        self.version = version
        self.value = value
        self.content_type = content_type
        self.inputs: list[InputTensor] | None = None
        self.error: Rejected | None = None
        self.took_s = 0.0
        self.is_done = False
        self.is_interrupted = False

    @property
    def made_bytes(self) -> int:
        """Size of the inputs."""
        return sum(len(given.data) for given in self.inputs or ())


class PayloadRound:
    """Payloads that several workers take, in order, until their inputs have some size.

    Workers call it on their threads.

    Attributes:
        taken: number of payloads that were taken, or passed over because they had failed before.
    """

    def __init__(self, payloads: Sequence[PendingTransform], limit_bytes: int) -> None:
        self._payloads = payloads
        self._limit_bytes = limit_bytes
        self._made_bytes = 0
        self._lock = threading.Lock()
        self.taken = 0

    def take(self) -> PendingTransform | None:
        """Return the next payload to transform; None if this worker has nothing left to do."""
        with self._lock:
            while self.taken < len(self._payloads) and self._made_bytes < self._limit_bytes:
                payload = self._payloads[self.taken]
                self.taken += 1
                if payload.error is None and payload.request.failure is None:
                    return payload
        return None

    def note_made(self, payload: PendingTransform) -> None:
        """Count the inputs that a payload became."""
        with self._lock:
            self._made_bytes += payload.made_bytes


class TransformWorker(Protocol):
    """A thread or a child process that transforms one payload at a time."""

    async def run(self, payloads: PayloadRound) -> None:
        """Take payloads and transform them until there is none. Raises `Fatal`."""
        ...

    def close(self) -> None:
        """End the worker after the payloads that it has taken."""
        ...


class TransformPool:
    """Workers that share the payloads of a chunk.

    Args:
        workers: at least one.
    """

    def __init__(
        self, workers: Sequence[TransformWorker], tuning: IngestTuning = TUNING.ingest
    ) -> None:
        self._workers = workers
        self._tuning = tuning

    async def run(self, payloads: Sequence[PendingTransform]) -> int:
        """Transform payloads until their inputs have `transformed_bytes`; return how many of them,
        from the first on, have ended. Those that failed before are passed over.

        Each worker may exceed the size by the inputs of one payload.

        Raises:
            Fatal: a transform on a thread did not end when it was interrupted.
        """
        round_ = PayloadRound(payloads, self._tuning.transformed_bytes)
        if len(self._workers) == 1 or len(payloads) == 1:
            await self._workers[0].run(round_)
            return round_.taken
        async with asyncio.TaskGroup() as tasks:
            for number, worker in enumerate(self._workers[: len(payloads)]):
                tasks.create_task(worker.run(round_), name=f"transforms-{number}")
        return round_.taken

    def close(self) -> None:
        """End the workers after the payloads that they have taken."""
        for worker in self._workers:
            worker.close()


class TransformThread:
    """A worker that is a thread, started with its first payload."""

    def __init__(self, tuning: IngestTuning = TUNING.ingest) -> None:
        self._tuning = tuning
        self._worker = WorkerThread("transforms")
        self._payload_lock = threading.Lock()
        self._current: PendingTransform | None = None
        self._since_s = 0.0

    async def run(self, payloads: PayloadRound) -> None:
        """See `TransformWorker`.

        Raises:
            Fatal: a transform did not end when it was interrupted.
        """
        if not self._worker.is_started:
            self._worker.start()
        done = self._worker.call(lambda: self._transform_all(payloads)).done
        while not (await asyncio.wait([done], timeout=max(0.001, self._left_s())))[0]:
            payload = self._current
            if payload is None or self._left_s() > 0 or payload.is_done:
                continue
            if payload.is_interrupted:
                grace_s = self._tuning.interrupt_grace_s
                raise Fatal(
                    f"transform of {payload.version!r}: did not end {grace_s:g} s after it was "
                    "interrupted"
                )
            self._interrupt(payload)
        done.result()

    def close(self) -> None:
        """End the thread after the payloads it was given."""
        self._worker.close()

    def _left_s(self) -> float:
        """Return the time until the current payload must be interrupted or the process ended."""
        payload, now_s = self._current, time.monotonic()
        if payload is None:
            return self._tuning.transform_check_s
        limit_s = payload.version.config.max_execution_s
        if payload.is_interrupted:
            limit_s += self._tuning.interrupt_grace_s
        return self._since_s + limit_s - now_s

    def _interrupt(self, payload: PendingTransform) -> None:
        with self._payload_lock:
            if payload.is_done:
                return
            payload.is_interrupted = True
            interrupt(self._worker.thread)

    # --- on the thread ---------------------------------------------------------------------------

    def _transform_all(self, payloads: PayloadRound) -> None:
        while (payload := payloads.take()) is not None:
            self._transform(payload)
            payload.took_s = time.monotonic() - self._since_s
            payloads.note_made(payload)

    def _transform(self, payload: PendingTransform) -> None:
        self._since_s = time.monotonic()
        self._current = payload
        try:
            apply_transform(payload)
            with self._payload_lock:
                payload.is_done = True
            if payload.is_interrupted:
                # A pending interruption must arrive now and not hit the next payload. A bare
                # `except` in the transform may have swallowed it already.
                time.sleep(self._tuning.interrupt_arrival_s)
                raise Interrupted
        except Interrupted:
            payload.error = endless_transform(payload.version)
        payload.is_done = True
        self._current = None


def endless_transform(version: ModelVersion) -> Rejected:
    """Return the error of a payload whose transform took too long."""
    limit_s = version.config.max_execution_s
    return Rejected(
        Code.MODEL_FAILED,
        f"transform: expected it to end within max_execution_s = {limit_s:g} s",
    )


def apply_transform(payload: PendingTransform) -> None:
    """Transform a payload on this thread, and set its inputs or its error."""
    try:
        payload.inputs = payload.version.transform(payload.value, payload.content_type)
    except Rejected as error:
        payload.error = error
    except Interrupted:
        raise
    except BaseException as error:  # noqa: BLE001 - a user's code must not end the thread
        payload.error = Rejected(Code.INVALID_REQUEST, f"transform: {describe_error(error)}")
