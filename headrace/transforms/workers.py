"""Workers that make inputs of payloads, with a time limit, so that none blocks the event loop.

A worker is a thread, or a child process (`headrace.transforms.process`). User code
may take long or never return. On a thread, a transform that exceeds its model's `max_execution_s`
is interrupted by an exception, which ends any Python code. Native code does not notice the
exception; then the process ends after a grace period, and the record is found like any other that
ends its process. A child process is killed instead, and replaced.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from headrace.config import LimitSettings
from headrace.delivery.inflight import InFlightAck
from headrace.errors import Code, Fatal, Rejected, describe_error
from headrace.models.inputs.binding import Bound
from headrace.models.user_code import Interrupted, Interruptible
from headrace.models.version import ModelVersion
from headrace.primitives.worker_thread import WorkerThread
from headrace.protocol.codec import decode_request
from headrace.protocol.compression import decompress
from headrace.protocol.headers import JSON, MSGPACK_TYPES, NO_HEADERS
from headrace.protocol.messages import Envelope, InferenceRequest, InputTensor, Request
from headrace.transforms.child import WorkerSource
from headrace.tuning import TUNING, TransformTuning


class PendingValue(ABC):
    """A value that waits for a worker, and what the worker has made of it.

    The classes below differ in the work: `PendingTransform` runs the transform of a model,
    `PendingCompressed` decompresses, and `PendingTensors` decodes many or large tensors. For the
    executor there is `headrace.services.executor.postprocessing.PendingPostprocess`.

    Attributes:
        what: name of the work, for messages.
        failure_code: code of the error if the work raises anything but a `Rejected`.
        inputs: the inputs; None if they could not be made.
        version: the version that the request is for, once that is known.
        bound: the inputs, checked; see `headrace.models.inputs.binding.Binder.bind`.
        error: why there is none of these.
        took_s: how long a worker was busy with it.
        serial: its number among those that wait.
        reserved_bytes: what is charged to its record while it waits.
        is_reread: its record was deferred and read a second time.
    """

    what = "transform"
    failure_code = Code.INVALID_REQUEST

    def __init__(self, request: Request, value: bytes | memoryview, content_type: str) -> None:
        self.request = request
        self.value = value
        self.content_type = content_type
        self.inputs: list[InputTensor] | None = None
        self.bound: Bound | None = None
        self.version: ModelVersion | None = None
        self.error: Rejected | None = None
        self.took_s = 0.0
        self.serial = -1
        self.reserved_bytes = 0
        self.is_reread = False

    @property
    def model(self) -> str:
        """Name of the model for metrics and logs; empty while it may be unknown."""
        return ""

    @property
    @abstractmethod
    def limit_s(self) -> float:
        """Time in which the inputs must be made."""

    @property
    def stays_in_process(self) -> bool:
        """True if the inputs are made in this process even where workers are child processes, since
        a child could not make them, or would take longer.
        """
        return False

    @property
    def made_bytes(self) -> int:
        """Size of the inputs."""
        return sum(len(given.data) for given in self.inputs or ())

    @property
    def waiting_bytes(self) -> int:
        """Size of the value, and of the inputs that it is expected to become."""
        own_bytes = len(self.value) if self.value is self.request.value else 0
        return own_bytes + self.reserved_bytes

    def reserve(self, input_bytes: int) -> None:
        """Charge the inputs that are expected, and what was decompressed, to the record."""
        self.release()
        is_view = self.content_type in MSGPACK_TYPES  # which is charged for already
        key_and_header_bytes = 0 if is_view or self.value is self.request.value else len(self.value)
        self._charge(input_bytes + key_and_header_bytes)

    def release(self) -> None:
        """Release what `reserve` has charged."""
        self._charge(-self.reserved_bytes)

    def _charge(self, size_bytes: int) -> None:
        ack_handle = self.request.ack_handle
        if size_bytes and isinstance(ack_handle, InFlightAck):
            ack_handle.resize(ack_handle.size_bytes + size_bytes)
            self.reserved_bytes += size_bytes

    @property
    def child_value(self) -> bytes | memoryview:
        """The value as a child process gets it. Raises `Rejected`."""
        return self.value

    @abstractmethod
    def make_inputs(self) -> list[InputTensor]:
        """Return the inputs that the value becomes. Raises `Rejected`, or what user code does."""

    @abstractmethod
    def bind(self) -> None:
        """Set `bound`. Raises `Rejected`."""

    def describe_hang(self) -> Rejected:
        """Return the error of a value whose worker took too long."""
        return Rejected(
            Code.MODEL_FAILED,
            f"{self.what}: expected it to end within max_execution_s = {self.limit_s:g} s",
        )


class PendingUserCode(PendingValue):
    """A value that waits for code of its model, which may run for `max_execution_s`."""

    def __init__(
        self, request: Request, version: ModelVersion, value: bytes, content_type: str
    ) -> None:
        super().__init__(request, value, content_type)
        self.version: ModelVersion = version

    @property
    def model(self) -> str:
        """See `PendingValue`."""
        return self.version.name

    @property
    def limit_s(self) -> float:
        """See `PendingValue`."""
        return self.version.config.max_execution_s

    @property
    @abstractmethod
    def source(self) -> WorkerSource:
        """Source of the function that a child process calls with the value."""


class PendingTransform(PendingUserCode):
    """A payload that waits for its transform."""

    def __init__(
        self, request: Request, version: ModelVersion, value: bytes, content_type: str
    ) -> None:
        super().__init__(request, version, value, content_type)
        self.payload = value

    @property
    def source(self) -> WorkerSource:
        """See `PendingUserCode`."""
        return self.version.transform_source

    @property
    def stays_in_process(self) -> bool:
        """See `PendingValue`: the schemas of a registry are in this process."""
        return self.version.records is not None and self.version.records.framed is not None

    def make_inputs(self) -> list[InputTensor]:
        """See `PendingValue`."""
        return self.version.transform(self.payload, self.content_type)

    def bind(self) -> None:
        """See `PendingValue`."""
        self.bound = self.version.bind(self.inputs or [], None)


class PendingDecoding(PendingValue):
    """A value that takes long to decode, without any user code.

    Args:
        limits: limits of requests.
    """

    def __init__(
        self,
        request: Request,
        value: bytes | memoryview,
        content_type: str,
        limits: LimitSettings,
    ) -> None:
        super().__init__(request, value, content_type)
        self.limits = limits

    @property
    def limit_s(self) -> float:
        """See `PendingValue`."""
        return TUNING.transforms.decode_limit_s

    def describe_hang(self) -> Rejected:
        """See `PendingValue`."""
        return Rejected(
            Code.INTERNAL, f"value: expected it to be decoded within {self.limit_s:g} s"
        )


class PendingCompressed(PendingDecoding):
    """A compressed value that may become large.

    Attributes:
        plain: the decompressed value, which is decoded afterwards.
    """

    stays_in_process = True

    def __init__(
        self,
        request: Request,
        value: bytes | memoryview,
        limits: LimitSettings,
    ) -> None:
        # Without a content type: the decompressed value takes memory of its own in any case.
        super().__init__(request, value, "", limits)
        self.plain: bytes | memoryview = b""

    @property
    def made_bytes(self) -> int:
        """See `PendingValue`."""
        return len(self.plain)

    def make_inputs(self) -> list[InputTensor]:
        """See `PendingValue`."""
        coding = self.request.envelope.content_encoding
        self.plain = decompress(self.value, coding, self.limits.max_request_bytes, "value")
        return []

    def bind(self) -> None:
        """See `PendingValue`."""


class PendingTensors(PendingDecoding):
    """A large value with tensors, which takes long to decode.

    Args:
        envelope: of the request.
        limits: of the request.
        lookup: returns a version by name and version.
        absent: why the model in `x-model` cannot be used, if the value may be a payload for it.

    Attributes:
        message: the decoded request; its inputs may be missing.
        absent: the same.
    """

    def __init__(
        self,
        request: Request,
        value: bytes | memoryview,
        envelope: Envelope,
        limits: LimitSettings,
        lookup: Callable[[str, str | None], ModelVersion],
        absent: Rejected | None = None,
    ) -> None:
        super().__init__(request, value, envelope.content_type, limits)
        self.envelope = NO_HEADERS._replace(
            content_type=envelope.content_type, model=envelope.model, version=envelope.version
        )
        self.message: InferenceRequest | None = None
        self.absent = absent
        self._lookup = lookup

    @property
    def stays_in_process(self) -> bool:
        """See `PendingValue`: in MessagePack the inputs are views of the value."""
        return self.content_type != JSON

    def make_inputs(self) -> list[InputTensor]:
        """See `PendingValue`."""
        self.message = decode_request(self.value, self.envelope, self.limits)
        return self.message.inputs

    def bind(self) -> None:
        """See `PendingValue`."""
        message = self.message
        assert message is not None
        self.version = self._lookup(message.model_name, message.model_version)
        self.bound = self.version.bind(self.inputs or [], message.outputs)


class GrantedPayloads:
    """Payloads granted to workers, which take them in order until their inputs have some size.

    Workers call `take` and `note_made` on their threads.

    Args:
        payloads: the first ones.
        limit_bytes: size of the inputs that were made and not passed on, from which on no worker
            takes another payload.

    Attributes:
        taken: number of payloads that were taken, or passed over because they had failed before.
        on_made: called on a worker's thread when it has made a payload, unless others that were
            made already wait for `pop_made`: they were announced.
    """

    def __init__(self, payloads: Iterable[PendingValue], limit_bytes: int) -> None:
        self._payloads = deque(payloads)
        self._limit_bytes = limit_bytes
        self._made_bytes = 0
        self._made: list[PendingValue] = []
        self._lock = threading.Lock()
        self.taken = 0
        self.on_made: Callable[[], None] = lambda: None

    @property
    def is_open(self) -> bool:
        """True if a worker may take a payload now."""
        return bool(self._payloads) and self._made_bytes < self._limit_bytes

    def take(self) -> PendingValue | None:
        """Return the next payload to transform; None if this worker has nothing left to do."""
        with self._lock:
            while self.is_open:
                payload = self._payloads.popleft()
                self.taken += 1
                if payload.error is None and payload.request.failure is None:
                    return payload
        return None

    def note_made(self, payload: PendingValue) -> None:
        """Count the inputs that a payload became."""
        with self._lock:
            self._made_bytes += payload.made_bytes
            self._made.append(payload)
            is_first = len(self._made) == 1
        if is_first:
            self.on_made()

    def add(self, payloads: Iterable[PendingValue]) -> None:
        """Add payloads to those that workers take."""
        with self._lock:
            self._payloads += payloads

    def waiting(self) -> list[PendingValue]:
        """Return the payloads that no worker has taken."""
        with self._lock:
            return list(self._payloads)

    def withdraw(self) -> list[PendingValue]:
        """Remove and return the payloads that no worker has taken."""
        with self._lock:
            payloads = list(self._payloads)
            self._payloads.clear()
        return payloads

    def discard(self, payload: PendingValue) -> None:
        """Remove a payload, unless a worker has taken it."""
        with self._lock:
            if payload in self._payloads:
                self._payloads.remove(payload)

    def pop_made(self) -> list[PendingValue]:
        """Remove and return the payloads that were made."""
        with self._lock:
            made, self._made = self._made, []
        return made

    def release(self, payloads: Iterable[PendingValue]) -> None:
        """Count the inputs of payloads that were removed no longer: they have been passed on."""
        with self._lock:
            self._made_bytes -= sum([each.made_bytes for each in payloads])


class TransformWorker(Protocol):
    """A thread or a child process that transforms one payload at a time."""

    async def run(self, payloads: GrantedPayloads) -> None:
        """Take payloads and transform them until there is none. Raises `Fatal`."""
        ...

    def close(self) -> None:
        """End the worker after the payloads that it has taken."""
        ...


class TransformPool:
    """Workers that share payloads.

    Args:
        workers: at least one.
        transformed_bytes: size of the inputs that one `run` makes.

    Attributes:
        workers: the same.
    """

    def __init__(
        self,
        workers: Sequence[TransformWorker],
        transformed_bytes: int = TUNING.ingest.transformed_bytes,
    ) -> None:
        self.workers = workers
        self._transformed_bytes = transformed_bytes

    async def run(self, payloads: Sequence[PendingValue]) -> int:
        """Transform payloads until their inputs have `transformed_bytes`; return how many of them,
        from the first on, have ended. Those that failed before are passed over.

        Each worker may exceed the size by the inputs of one payload.

        Raises:
            Fatal: a transform on a thread did not end when it was interrupted.
        """
        granted = GrantedPayloads(payloads, self._transformed_bytes)
        if len(self.workers) == 1 or len(payloads) == 1:
            await self.workers[0].run(granted)
            return granted.taken
        async with asyncio.TaskGroup() as tasks:
            for number, worker in enumerate(self.workers[: len(payloads)]):
                tasks.create_task(worker.run(granted), name=f"transforms-{number}")
        return granted.taken

    def close(self) -> None:
        """End the workers after the payloads that they have taken."""
        for worker in self.workers:
            worker.close()


class TransformThread:
    """A worker that is a thread, started with its first payload."""

    def __init__(self, tuning: TransformTuning = TUNING.transforms) -> None:
        self._tuning = tuning
        self._worker = WorkerThread("transforms")
        self._current: tuple[PendingValue, Interruptible] | None = None
        self._since_s = 0.0

    async def run(self, payloads: GrantedPayloads) -> None:
        """See `TransformWorker`.

        Raises:
            Fatal: a transform did not end when it was interrupted.
        """
        if not self._worker.is_started:
            self._worker.start()
        done = self._worker.call(lambda: self._transform_all(payloads)).done
        while not (await asyncio.wait([done], timeout=max(0.001, self._left_s())))[0]:
            current = self._current
            if current is None or self._left_s() > 0 or current[1].is_done:
                continue
            payload, code = current
            if code.is_interrupted:
                grace_s = self._tuning.interrupt_grace_s
                raise Fatal(
                    f"{payload.what} of {payload.model or 'a large request'}: did not end "
                    f"{grace_s:g} s "
                    "after it was interrupted"
                )
            code.interrupt(self._worker.thread)
        done.result()

    def close(self) -> None:
        """End the thread after the payloads it was given."""
        self._worker.close()

    def _left_s(self) -> float:
        """Return the time until the current payload must be interrupted or the process ended."""
        current, now_s = self._current, time.monotonic()
        if current is None:
            return self._tuning.check_s
        payload, code = current
        limit_s = payload.limit_s
        if code.is_interrupted:
            limit_s += self._tuning.interrupt_grace_s
        return self._since_s + limit_s - now_s

    # --- on the thread ---------------------------------------------------------------------------

    def _transform_all(self, payloads: GrantedPayloads) -> None:
        while (payload := payloads.take()) is not None:
            self._transform(payload)
            payload.took_s = time.monotonic() - self._since_s
            payloads.note_made(payload)

    def _transform(self, payload: PendingValue) -> None:
        code = Interruptible()
        self._since_s = time.monotonic()
        self._current = (payload, code)
        try:
            code.run(lambda: apply_transform(payload))
        except Interrupted:
            payload.bound, payload.error = None, payload.describe_hang()
        self._current = None


def apply_transform(payload: PendingValue) -> None:
    """Transform a payload on this thread, and set its inputs, or its error."""
    try:
        payload.inputs = payload.make_inputs()
        payload.bind()
    except Rejected as error:
        payload.error = error
    except Interrupted:
        raise
    except BaseException as error:  # noqa: BLE001 - a user's code must not end the thread
        payload.error = Rejected(payload.failure_code, f"{payload.what}: {describe_error(error)}")
