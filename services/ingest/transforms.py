"""Run Python transforms on a thread, with a time limit, so that none blocks the event loop.

User code may take long or never return. A transform that exceeds its model's `max_execution_s` is
interrupted by an exception in its thread, which ends any Python code. Native code does not notice
the exception; then the process ends after a grace period, and the record is found like any other
that ends its process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

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
    """

    __slots__ = (
        "content_type",
        "error",
        "inputs",
        "is_done",
        "is_interrupted",
        "request",
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
        self.is_done = False
        self.is_interrupted = False


class TransformThread:
    """A thread for transforms, started with the first one."""

    def __init__(self, tuning: IngestTuning = TUNING.ingest) -> None:
        self._tuning = tuning
        self._worker = WorkerThread("transforms")
        self._payload_lock = threading.Lock()
        self._current: PendingTransform | None = None
        self._since_s = 0.0

    async def run(self, payloads: Sequence[PendingTransform]) -> int:
        """Transform payloads, one after the other, until their inputs have `transformed_bytes`;
        return how many of them have ended. Those that failed before are passed over.

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
        count: int = done.result()
        return count

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

    def _transform_all(self, payloads: Sequence[PendingTransform]) -> int:
        done = made_bytes = 0
        for payload in payloads:
            if payload.error is None and payload.request.failure is None:
                self._transform(payload)
            made_bytes += sum(len(given.data) for given in payload.inputs or ())
            done += 1
            if made_bytes >= self._tuning.transformed_bytes:
                break
        return done

    def _transform(self, payload: PendingTransform) -> None:
        self._since_s = time.monotonic()
        self._current = payload
        try:
            _apply(payload)
            with self._payload_lock:
                payload.is_done = True
            if payload.is_interrupted:
                # A pending interruption must arrive now and not hit the next payload. A bare
                # `except` in the transform may have swallowed it already.
                time.sleep(self._tuning.interrupt_arrival_s)
                raise Interrupted
        except Interrupted:
            limit_s = payload.version.config.max_execution_s
            payload.error = Rejected(
                Code.MODEL_FAILED,
                f"transform: expected it to end within max_execution_s = {limit_s:g} s",
            )
        payload.is_done = True
        self._current = None


def _apply(payload: PendingTransform) -> None:
    try:
        payload.inputs = payload.version.transform(payload.value, payload.content_type)
    except Rejected as error:
        payload.error = error
    except Interrupted:
        raise
    except BaseException as error:  # noqa: BLE001 - a user's code must not end the thread
        payload.error = Rejected(Code.INVALID_REQUEST, f"transform: {describe_error(error)}")
