"""A user's postprocess between a run and the answers to payloads, on a worker of the instance.

One that raises, crashes or hangs fails its own request, as a transform does at ingest: the workers
are the same (`headrace.transforms`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from headrace.clock import Clock, wall_clock_us
from headrace.config import DeliverySettings, LimitSettings
from headrace.delivery.failures import find_end, rejection
from headrace.errors import Code, Rejected
from headrace.models.postprocess import PayloadRequest, Postprocess, pack
from headrace.models.version import ModelVersion
from headrace.protocol.codec import plain_value
from headrace.protocol.messages import Envelope, InputTensor, Request, Tensor
from headrace.protocol.tensors import to_array
from headrace.telemetry.metrics import Metrics
from headrace.topics import Stage
from headrace.transforms.child import WorkerSource
from headrace.transforms.process import TransformProcess
from headrace.transforms.workers import (
    GrantedPayloads,
    PendingUserCode,
    TransformThread,
    TransformWorker,
)
from headrace.tuning import TUNING, TransformTuning


class PendingPostprocess(PendingUserCode):
    """The outputs of a request that wait for their postprocess; `inputs` are what it has made.

    The worker decompresses the payload when it takes the request: those of a whole batch would take
    memory that nothing is charged for, and time of the event loop.

    Args:
        request: with outputs.
        version: of the model that has run.
        postprocess: of the version.
        answer_type: content type of the answer that it makes; empty if it makes arrays.
        clock: wall clock, in which deadlines are given.
    """

    what = "postprocess"
    failure_code = Code.MODEL_FAILED

    def __init__(
        self,
        request: Request,
        version: ModelVersion,
        postprocess: Postprocess,
        answer_type: str,
        clock: Clock,
    ) -> None:
        super().__init__(request, version, b"", request.envelope.content_type)
        self._clock = clock
        self._postprocess = postprocess
        self._answer_type = answer_type
        self._rows = request.rows if version.signature.batched else None

    @property
    def source(self) -> WorkerSource:
        """See `PendingUserCode`."""
        return self.version.postprocess_source

    @property
    def child_value(self) -> bytes:
        """See `PendingValue`."""
        return pack(self.request.outputs or (), self._describe_request(), self._rows)

    def make_inputs(self) -> list[InputTensor]:
        """See `PendingValue`."""
        about = self._describe_request()
        outputs = {tensor.name: to_array(tensor) for tensor in self.request.outputs or ()}
        return self._postprocess.apply(outputs, about, self._rows)

    def _describe_request(self) -> PayloadRequest:
        """Return the request as the user's function gets it. Raises `Rejected`."""
        request, limit_bytes = self.request, TUNING.protocol.max_decompressed_bytes
        # Requests of the same run may have taken the time until its turn.
        if ended := find_end(request, self._clock(), Stage.EXECUTOR):
            raise Rejected(Code(ended.code), ended.message)
        payload = plain_value(request.value, request.envelope, limit_bytes)
        if payload is None:
            raise Rejected(Code.INTERNAL, "expected the payload of the request, got none")
        return PayloadRequest(bytes(payload), self.content_type, self._answer_type)

    def bind(self) -> None:
        """See `PendingValue`: what was made has been checked."""


class PostprocessOptions(NamedTuple):
    """Limits and tuning of user code behind models, the same for all models of a process.

    Attributes:
        max_attempts: number of child processes that may end with a request before it fails.
        max_bytes: most bytes that one may make of the outputs of a request.
        tuning: of threads and child processes.
    """

    max_attempts: int = DeliverySettings().max_attempts
    max_bytes: int = LimitSettings().max_in_flight_bytes
    tuning: TransformTuning = TUNING.transforms


DEFAULT_OPTIONS = PostprocessOptions()
"""Those of the default settings."""


class Postprocessor:
    """Runs the postprocess of a version for one instance; its worker starts with the first use.

    Args:
        version: one with a postprocess.
        options: of the process.
        metrics: count child processes that are replaced, and have the time of each call.

    Raises:
        ConfigurationError: it is to run in a child process, and the system is not Linux.
    """

    def __init__(
        self, version: ModelVersion, options: PostprocessOptions, metrics: Metrics
    ) -> None:
        assert version.postprocess is not None
        assert version.config.python is not None
        self._version = version
        self._postprocess = version.postprocess
        self._metrics = metrics
        self._worker: TransformWorker = (
            TransformProcess(options.max_attempts, options.max_bytes, metrics, options.tuning)
            if version.config.python.isolation == "process"
            else TransformThread(options.tuning)
        )

    def close(self) -> None:
        """End the worker after the request that it has."""
        self._worker.close()

    async def run(self, requests: Sequence[Request], clock: Clock = wall_clock_us) -> None:
        """Replace the outputs of requests with payloads by what the user's function makes of them.

        A request fails if that cannot be made, or if its deadline passes before its turn.

        Raises:
            Fatal: the function hangs on a thread and could not be interrupted.
        """
        prepared = [self._prepare(request, clock) for request in requests]
        pending = [each for each in prepared if each is not None]
        await self._worker.run(GrantedPayloads(pending, sys.maxsize))  # without a limit
        for each in pending:
            if each.took_s:
                self._metrics.postprocessed(each.model, each.took_s)
            _take(each)

    def _prepare(self, request: Request, clock: Clock) -> PendingPostprocess | None:
        """Return what the worker takes; None for a request that is not for it, or fails."""
        if request.output_data is None or request.failure is not None:
            return None
        try:
            answer_type = self._choose_type(request.envelope)
        except Rejected as error:
            _fail(request, error)
            return None
        if answer_type is None:
            return None
        return PendingPostprocess(request, self._version, self._postprocess, answer_type, clock)

    def _choose_type(self, envelope: Envelope) -> str | None:
        """Return the content type of the answer that is to be made, empty for arrays; None if the
        answer has the outputs of the model. Raises `Rejected`.
        """
        if not self._version.takes_payload(envelope):
            return None
        table = self._version.config.answer
        if table is None or not table.returns_answers:
            return ""
        return self._version.choose_whole_type(envelope) or None


def _take(pending: PendingPostprocess) -> None:
    """Set the outputs of a request that has ended."""
    request, made = pending.request, pending.inputs
    if pending.error is not None or made is None:
        _fail(request, pending.error or Rejected(Code.INTERNAL, "postprocess: it was stopped"))
        return
    request.outputs = tuple(
        [Tensor(each.name, each.datatype, tuple(each.shape), each.data) for each in made]
    )


def _fail(request: Request, error: Rejected) -> None:
    request.outputs = None
    request.fail(rejection(error, Stage.EXECUTOR))
