"""Verdict on a model's batch safety, and the measures of difference that it rests on.

`is_identical` compares bits, so it shows any influence of the other rows of the batch, however
small. `relative_difference` is the largest difference relative to the output's scale; rounding is
judged by it.
"""

from __future__ import annotations

from enum import StrEnum
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.models.config import CPU, CUDA, ModelConfig
from headrace.models.signature import Signature
from headrace.tuning import TUNING, ModelTuning


class Batching(StrEnum):
    """Answer to the question whether requests may share a run."""

    BATCHABLE = "batchable"
    NOT_BATCHABLE = "not batchable"
    UNDECIDED = "undecided"


class Verdict(NamedTuple):
    """Result of testing whether a model's answers depend on the other rows of the batch.

    Attributes:
        reason: why it is not batchable, or undecided; empty if it is batchable.
        rounding: largest difference between a row alone and in a batch, relative to the output's
            scale; None if it was not measured.
        tolerance: the allowed difference.
        seen_with: inputs of the test: made-up, recorded or from requests.
        has_no_batch: dimension 0 is not the batch at all, whatever the signature says.
    """

    batching: Batching
    reason: str = ""
    rounding: float | None = None
    tolerance: float | None = None
    seen_with: str = ""
    has_no_batch: bool = False

    @property
    def description(self) -> str:
        """Verdict and reason, for display."""
        return f"{self.batching}: {self.reason}" if self.reason else str(self.batching)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for `/status` and `headrace models check --json`."""
        return {
            "verdict": str(self.batching),
            "reason": self.reason,
            "rounding": self.rounding if isfinite(self.rounding or 0) else None,
            "tolerance": self.tolerance,
            "seen_with": self.seen_with,
        }


def choose_tolerance(
    config: ModelConfig, signature: Signature, tuning: ModelTuning = TUNING.models
) -> float:
    """Return the allowed difference of batched from unbatched answers, relative to the output's
    scale.

    It is `batch_tolerance` of the model's configuration. "auto" follows the precision that the
    model computes in; a GPU multiplies fp32 as TF32 unless that is disabled.
    """
    if config.batch_tolerance != "auto":
        return config.batch_tolerance
    datatypes = {spec.datatype for spec in signature.inputs + signature.outputs}
    datatypes.add(signature.precision)
    known = {"BF16": tuning.bf16_tolerance, "FP16": tuning.fp16_tolerance}
    tolerances = [value for name, value in known.items() if name in datatypes]
    if config.execution_providers[0] != CPU:
        options = config.provider_options.get("CUDAExecutionProvider") or {}
        tf32 = str(options.get("use_tf32", 1)) in ("1", "True")
        if tf32 or config.execution_providers[0] != CUDA:
            tolerances.append(tuning.tf32_tolerance)
    return max(tolerances, default=tuning.fp32_tolerance)


Array = NDArray[Any]


def is_identical(one: Array, other: Array) -> bool:
    """Return whether two arrays have the same shape, datatype and bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype == object:
        return bool((one == other).all())
    return one.tobytes() == other.tobytes()


def output_scale(array: Array) -> float:
    """Return the largest finite magnitude; 1 if there is none, and for BYTES."""
    if array.dtype == object:
        return 1.0
    magnitudes = np.abs(array.astype(np.float64))
    finite = magnitudes[np.isfinite(magnitudes)]
    return float(finite.max(initial=0.0)) or 1.0


def relative_difference(one: Array, other: Array, scale: float) -> float:
    """Return the largest difference between corresponding elements, divided by `scale`.

    Infinite if the shapes differ, a BYTES element differs, or only one of two elements is finite.
    Equal infinities, and NaN in both, count as no difference.
    """
    if is_identical(one, other):
        return 0.0
    if one.shape != other.shape or object in (one.dtype, other.dtype):
        return float("inf")
    first, second = one.astype(np.float64), other.astype(np.float64)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    finite = np.isfinite(first) & np.isfinite(second)
    if not (same | finite).all():
        return float("inf")
    apart = np.abs(first[finite] - second[finite])
    return float(apart.max(initial=0.0)) / scale
