"""Transform worker that is a child process: what crashes or hangs there ends the child alone.

A thread for each child writes payloads to it and waits for the inputs. The thread also starts the
child, because the child is killed when the thread that started it ends, and not only when the
process does. A child is a fresh interpreter: it inherits no socket, no lock and no thread.

A child that ends is replaced, after a pause that grows. It has one payload at a time, so it can
only be that payload or something outside, such as the kernel's OOM killer: the payload is
transformed again, and refused when its child has ended `max_attempts` times. A child that takes
longer than `max_execution_s` is killed, and its payload refused at once.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import sys
import threading
import time
import weakref
from itertools import count
from typing import TypeAlias

import msgspec
import structlog

from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.version import ModelVersion
from headrace.primitives.backoff import Pauses
from headrace.primitives.child_process import describe_exit, start_child
from headrace.primitives.worker_thread import WorkerThread
from headrace.protocol.messages import InferenceRequest, InputTensor
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.transforms.child import (
    CALL_HEAD,
    REPLY_HEAD,
    TransformCall,
    TransformReply,
    receive_exactly,
)
from headrace.transforms.workers import (
    GrantedPayloads,
    PendingTensors,
    PendingUserCode,
    PendingValue,
    apply_transform,
)
from headrace.tuning import TUNING, TransformTuning

log = structlog.get_logger(__name__)

_MODULE = "headrace.transforms.child"
_Made: TypeAlias = tuple[list[InputTensor], InferenceRequest | None]
_decode_reply = msgspec.msgpack.Decoder(TransformReply).decode


class TransformProcess:
    """A worker that is a child process, started with its first payload.

    Args:
        max_attempts: number of children that may end with a payload before it is refused.
        max_bytes: most bytes that the inputs of a payload may have.

    Raises:
        ConfigurationError: the system is not Linux.
    """

    def __init__(
        self,
        max_attempts: int,
        max_bytes: int,
        metrics: Metrics,
        tuning: TransformTuning = TUNING.transforms,
    ) -> None:
        if sys.platform != "linux":
            raise ConfigurationError(
                f"ingest.transform_isolation: expected Linux for process, got {sys.platform}"
            )
        self._max_attempts = max_attempts
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._tuning = tuning
        self._worker = WorkerThread("transforms")
        self._pauses = Pauses(tuning.restart)
        self._child: _Child | None = None
        self._closing = threading.Event()

    async def run(self, payloads: GrantedPayloads) -> None:
        """See `headrace.transforms.workers.TransformWorker`."""
        if not self._worker.is_started:
            self._worker.start()
        await self._worker.call(lambda: self._transform_all(payloads)).done

    def close(self) -> None:
        """End the thread and its child after the payload that they have."""
        self._closing.set()
        if self._worker.is_started:
            self._worker.call(self._end_child)
        self._worker.close()

    # --- on the thread ---------------------------------------------------------------------------

    def _transform_all(self, payloads: GrantedPayloads) -> None:
        while not self._closing.is_set() and (payload := payloads.take()) is not None:
            began_s = time.monotonic()
            if payload.stays_in_process:
                apply_transform(payload)
            else:
                self._transform(payload)
            payload.took_s = time.monotonic() - began_s
            payloads.note_made(payload)

    def _transform(self, payload: PendingValue) -> None:
        attempts = failed_starts = 0
        while True:
            try:
                child = self._start_child()
            except (EOFError, OSError):
                # TimeoutError is an OSError. The payload has not been there, so it does not count.
                failed_starts += 1
                how = self._replace("start", payload.model, failed_starts)
                if failed_starts < self._tuning.starts and not self._closing.is_set():
                    continue
                payload.error = Rejected(
                    Code.INTERNAL,
                    f"{payload.what}: {failed_starts} processes ended at start ({how})",
                )
                return
            try:
                child.transform(payload)
                payload.bind()
            except Rejected as error:
                payload.error = error
                self._pauses.reset()
            except TimeoutError:
                self._replace("hang", payload.model, 1)
                payload.error = payload.describe_hang()
            except (EOFError, OSError):
                # It has ended, whichever end of the socket showed it.
                attempts += 1
                how = self._replace("crash", payload.model, attempts)
                if attempts < self._max_attempts and not self._closing.is_set():
                    continue
                payload.error = Rejected(
                    Code.MODEL_FAILED,
                    f"{payload.what}: each time that it ran for this payload, with nothing else in "
                    f"its process, the process ended ({how}); it does not run again",
                )
            else:
                self._pauses.reset()
            return

    def _start_child(self) -> _Child:
        if self._child is None:
            self._child = _Child(self._max_bytes, self._tuning)
        self._child.wait_until_ready()
        return self._child

    def _replace(self, reason: str, model: str, attempt: int) -> str:
        """End a child that crashed or hangs, pause, and return how it ended."""
        child = self._child
        how = "" if child is None else child.end()
        self._child = None
        self._metrics.transform_restarted(reason)
        log.warning(
            Event.TRANSFORM_WORKER_ENDED,
            model=model,
            reason=reason,
            how=how,
            attempt=attempt,
        )
        self._closing.wait(self._pauses.next_s())
        return how

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    """A child process, for the thread that has started it."""

    def __init__(self, max_bytes: int, tuning: TransformTuning) -> None:
        self._max_bytes = max_bytes
        self._tuning = tuning
        self._keys: weakref.WeakKeyDictionary[ModelVersion, int] = weakref.WeakKeyDictionary()
        self._next_key = count()
        self._forgotten: list[int] = []
        self._is_ready = False
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = start_child(_MODULE, str(theirs.fileno()), pass_fds=[theirs.fileno()])

    def wait_until_ready(self) -> None:
        """Wait until it has imported what it needs. Raises as `transform` does."""
        if not self._is_ready:
            self._receive(time.monotonic() + self._tuning.start_s)
            self._is_ready = True

    def transform(self, payload: PendingValue) -> None:
        """Set the inputs that a value becomes.

        Raises:
            Rejected: see `headrace.models.inputs.transforms.Transform`.
            TimeoutError: it took too long.
            EOFError, OSError: the child has ended.
        """
        if isinstance(payload, PendingTensors):
            call = self._prepare(TransformCall(0, decoding=(payload.envelope, payload.limits)))
        else:
            assert isinstance(payload, PendingUserCode)
            call = self._prepare(TransformCall(self._load(payload)))
        until_s = time.monotonic() + payload.limit_s
        call = call._replace(
            content_type=payload.content_type, what=payload.what, failure_code=payload.failure_code
        )
        payload.inputs, message = self._call(call, payload.child_value, until_s)
        if isinstance(payload, PendingTensors):
            payload.message = message

    def _load(self, payload: PendingUserCode) -> int:
        """Return the number of a version, whose function the child has made by then."""
        version = payload.version
        if version not in self._keys:
            key = next(self._next_key)
            until_s = time.monotonic() + version.config.max_load_s
            self._call(TransformCall(key, payload.source, what=payload.what), b"", until_s)
            self._keys[version] = key
            weakref.finalize(version, self._forgotten.append, key)
        return self._keys[version]

    def _prepare(self, call: TransformCall) -> TransformCall:
        """Return a call with the limits, and with the versions that are gone."""
        forgotten = tuple(self._forgotten)
        del self._forgotten[: len(forgotten)]
        return call._replace(
            max_bytes=self._max_bytes,
            shared_bytes=self._tuning.shared_input_bytes,
            forgotten=forgotten,
        )

    def end(self) -> str:
        """Kill it, and return how it ended: by which signal, or with which exit code."""
        self._connection.close()
        self._process.kill()  # without effect if it has ended already
        return describe_exit(self._process.wait())

    def _call(self, call: TransformCall, payload: bytes | memoryview, until_s: float) -> _Made:
        pickled = pickle.dumps(call)
        self._wait(until_s)
        self._connection.sendall(CALL_HEAD.pack(len(pickled), len(payload)) + pickled)
        self._wait(until_s)
        self._connection.sendall(payload)
        return self._receive(until_s)

    def _receive(self, until_s: float) -> _Made:
        self._wait(until_s)
        # The memory file comes with the first bytes of a head.
        head, files, _, _ = socket.recv_fds(self._connection, REPLY_HEAD.size, 1)
        try:
            if not head:
                raise EOFError
            head += receive_exactly(self._connection, REPLY_HEAD.size - len(head))
            reply_bytes, size_bytes, is_shared = REPLY_HEAD.unpack(head)
            self._wait(until_s)
            reply = _decode_reply(receive_exactly(self._connection, reply_bytes))
            if reply.code:
                code, after_ms = Code(reply.code), reply.retry_after_ms
                raise Rejected(code, reply.reason, retry_after_ms=after_ms)
            if is_shared:
                content = memoryview(mmap.mmap(files[0], size_bytes, access=mmap.ACCESS_READ))
            else:
                content = memoryview(receive_exactly(self._connection, size_bytes)).toreadonly()
        finally:
            for file in files:
                os.close(file)
        inputs = []
        start = 0
        for name, datatype, shape, size in reply.inputs:
            data = content[start : start + size]
            inputs.append(InputTensor(name=name, datatype=datatype, shape=shape, data=data))
            start += size
        return inputs, reply.message

    def _wait(self, until_s: float) -> None:
        """Bound the next operations on the socket. Raises `TimeoutError` if the time is over."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
