"""Batch-safety sampling, and checks of outputs.

Sampling decides on batching with real requests if generated inputs could not. Sampled requests are
run alone and together, and the outputs are compared. Their answers come from separate runs; the
result here is only a verdict. The criteria are those of `headrace.models.profiling.probe`: alone
and batched agree within the tolerance, and outputs are identical to the bit whatever other requests
are in the batch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum

import numpy as np
import structlog
from numpy.typing import NDArray

from headrace.errors import Code, Fatal, describe_error
from headrace.models.backends.port import Arrays
from headrace.models.profiling.batch_safety import (
    Batching,
    Verdict,
    choose_tolerance,
    is_identical,
    output_scale,
    relative_difference,
)
from headrace.models.signature import Signature
from headrace.models.version import ModelVersion
from headrace.protocol.messages import Failure, Request
from headrace.protocol.tensors import to_array
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.topics import Stage
from headrace.tuning import TUNING, ExecutorTuning

log = structlog.get_logger(__name__)

RunModel = Callable[[Arrays], Awaitable[Arrays]]
Gather = Callable[[Sequence[Request]], Arrays]


class Outcome(StrEnum):
    """Result of comparing one batch of requests."""

    AGREED = "agreed"
    DIFFERED = "differed"
    INCONCLUSIVE = "inconclusive"


class BatchSafetySampler:
    """Comparison of one version's runs; it applies its verdict to the version."""

    def __init__(
        self,
        version: ModelVersion,
        metrics: Metrics,
        tuning: ExecutorTuning = TUNING.executor,
    ) -> None:
        self._metrics = metrics
        self._tuning = tuning
        self._version = version
        self._names = [spec.name for spec in version.signature.outputs]
        self._tolerance = choose_tolerance(version.config, version.signature, version.tuning)
        self._offered = 0
        self._agreed = 0
        self._rounding = 0.0
        self._verdict: Verdict | None = None

    async def sample(self, requests: Sequence[Request], gather: Gather, run: RunModel) -> None:
        """Compare the runs of these requests if this batch is one of those to be compared.

        Raises:
            Fatal: the instance cannot be used any more.
        """
        if not self._is_due():
            return
        version = self._version
        outcome = await self._compare(requests, gather, run)
        self._metrics.tried_together(version.name, version.version, outcome)
        if self._verdict is not None and version.is_undecided:
            version.apply_verdict(self._verdict)
            log.info(
                Event.MODEL_BATCHING_DECIDED,
                model=version.name,
                version=version.version,
                batching=self._verdict.description,
            )

    def _is_due(self) -> bool:
        """Count a batch; return True if it should be compared."""
        self._offered += 1
        tuning = self._tuning
        return (
            self._offered <= tuning.comparison_batches
            or self._offered % tuning.comparison_every_batches == 0
        )

    async def _compare(self, requests: Sequence[Request], gather: Gather, run: RunModel) -> Outcome:
        """Run requests alone and together, and return what the comparison shows."""
        try:
            alone = [await run(gather([request])) for request in requests]
        except Fatal:
            raise
        except Exception:  # noqa: BLE001 - one of them fails alone as well, and is answered so
            return Outcome.INCONCLUSIVE
        if self._are_all_equal(alone):
            return Outcome.INCONCLUSIVE
        try:
            reason = await self._find_difference(requests, alone, gather(requests), run)
        except Fatal:
            raise
        except Exception as error:  # noqa: BLE001 - a model may raise anything; it is reported
            reason = f"requests that succeed alone fail together: {describe_error(error)}"
        return self._record(reason)

    async def _find_difference(
        self, requests: Sequence[Request], alone: Sequence[Arrays], batch: Arrays, run: RunModel
    ) -> str:
        """Return why batching is unsafe, or an empty string."""
        together = await run(batch)
        staying = requests[0].rows
        others = await run(_repeat_rows(batch, staying))
        for name in self._names:
            scale = max(output_scale(outputs[name]) for outputs in alone)
            begin = 0
            for request, outputs in zip(requests, alone, strict=True):
                end = begin + request.rows
                apart = relative_difference(outputs[name], together[name][begin:end], scale)
                self._rounding = max(self._rounding, apart)
                if apart > self._tolerance:
                    return (
                        f"rounding: {name} of a request alone and in a batch differ by "
                        f"{apart:.1e} of the output's scale"
                    )
                begin = end
            if not is_identical(together[name][:staying], others[name][:staying]):
                repeated = await run(batch)
                if is_identical(together[name], repeated[name]):
                    return f"rows leak: {name} of a request changes with what runs beside it"
        return ""

    def _record(self, reason: str) -> Outcome:
        seen_with = f"{self._agreed + 1} batches of requests"
        if reason:
            self._verdict = Verdict(
                Batching.NOT_BATCHABLE, reason, self._rounding, self._tolerance, seen_with
            )
            return Outcome.DIFFERED
        self._agreed += 1
        if self._agreed >= self._tuning.comparison_batches:
            self._verdict = Verdict(
                Batching.BATCHABLE, "", self._rounding, self._tolerance, seen_with
            )
        return Outcome.AGREED

    def _are_all_equal(self, alone: Sequence[Arrays]) -> bool:
        """True if all answers are equal: they would show nothing about other batch members."""
        return all(
            is_identical(alone[0][name], outputs[name]) for outputs in alone for name in self._names
        )


def _repeat_rows(batch: Arrays, rows: int) -> Arrays:
    """Return a batch of the same size that repeats the first `rows` rows."""
    return {name: array[np.arange(len(array)) % rows] for name, array in batch.items()}


def refuse_nonfinite(
    requests: Sequence[Request], signature: Signature, outputs: Arrays, max_listed_rows: int
) -> None:
    """Fail the requests that have NaN or infinity in their own rows; the error text lists up to
    `max_listed_rows` of them.
    """
    for spec in signature.outputs:
        if not spec.datatype.startswith(("FP", "BF")):
            continue
        array = outputs[spec.name]
        finite = np.isfinite(array)
        if finite.all():
            continue
        if signature.buckets:
            _refuse_padded(requests, spec.name, max_listed_rows)
            continue
        if not signature.batched:
            requests[0].outputs = None
            requests[0].fail(_failure(f"output {spec.name}: expected finite values, got others"))
            continue
        rows = np.asarray(finite.reshape(len(array), -1).all(axis=1))
        _refuse_rows(requests, spec.name, rows, max_listed_rows)


def _refuse_padded(requests: Sequence[Request], name: str, max_listed_rows: int) -> None:
    """Check the requests' own outputs, from which padding has been removed."""
    for request in requests:
        own = [to_array(one) for one in request.outputs or () if one.name == name]
        for array in own:
            finite = np.asarray(np.isfinite(array).reshape(len(array), -1).all(axis=1))
            _refuse_rows([request], name, finite, max_listed_rows)


def _refuse_rows(
    requests: Sequence[Request], name: str, finite: NDArray[np.bool_], max_listed_rows: int
) -> None:
    begin = 0
    for request in requests:
        bad = np.flatnonzero(~finite[begin : begin + request.rows])
        begin += request.rows
        if not bad.size or request.failure is not None:
            continue
        listed = ", ".join(map(str, bad[:max_listed_rows]))
        more = f" and {bad.size - max_listed_rows} more" if bad.size > max_listed_rows else ""
        request.outputs = None
        request.fail(
            _failure(
                f"output {name}: expected finite values, got NaN or infinities in "
                f"{bad.size} of {request.rows} rows: {listed}{more}"
            )
        )


def _failure(message: str) -> Failure:
    return Failure(Code.MODEL_FAILED, message, Stage.EXECUTOR)
