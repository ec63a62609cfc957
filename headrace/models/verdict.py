"""What is known of a model's batch safety, and how it came to be known."""

from __future__ import annotations

from enum import StrEnum
from math import isfinite
from typing import Any, NamedTuple

from headrace.models.config import CPU, CUDA, ModelConfig
from headrace.models.signature import Signature

_TOLERANCES = {"BF16": 3e-2, "FP16": 1e-2}
_TF32 = 1e-2
_FP32 = 1e-4


UNDECIDED_ROWS = 4
"""The size of a batch on which requests themselves are to decide."""


class Batching(StrEnum):
    """Whether requests may share a run."""

    BATCHABLE = "batchable"
    NOT_BATCHABLE = "not batchable"
    UNDECIDED = "undecided"


class Verdict(NamedTuple):
    """The outcome of asking whether a model's answers depend on who else is in the batch.

    Attributes:
        reason: why it is not batchable, or could not be decided; empty for one that is.
        rounding: the largest difference seen between a row alone and in a batch, in parts of the
            output's scale; None where none was measured.
        tolerance: what was allowed of it.
        seen_with: what the model was asked with: made-up inputs, recorded ones or requests.
        has_no_batch: dimension 0 is not the batch at all, whatever the signature says.
    """

    batching: Batching
    reason: str = ""
    rounding: float | None = None
    tolerance: float | None = None
    seen_with: str = ""
    has_no_batch: bool = False

    @property
    def told(self) -> str:
        """Verdict and reason, for people."""
        return f"{self.batching}: {self.reason}" if self.reason else str(self.batching)

    def entry(self) -> dict[str, Any]:
        """For `/status` and `headrace models check --json`."""
        return {
            "verdict": str(self.batching),
            "reason": self.reason,
            "rounding": self.rounding if isfinite(self.rounding or 0) else None,
            "tolerance": self.tolerance,
            "seen_with": self.seen_with,
        }


def tolerance_of(config: ModelConfig, signature: Signature) -> float:
    """How far a batched answer may be from the unbatched one, in parts of the output's scale.

    `batch_tolerance` of the model's configuration; "auto" goes by the precision that the model
    computes in: 3e-2 for bfloat16, 1e-2 for fp16 and for TF32, in which a GPU multiplies fp32
    unless it is told not to, 1e-4 otherwise.
    """
    if config.batch_tolerance != "auto":
        return config.batch_tolerance
    datatypes = {spec.datatype for spec in signature.inputs + signature.outputs}
    datatypes.add(signature.precision)
    tolerances = [value for name, value in _TOLERANCES.items() if name in datatypes]
    if config.execution_providers[0] != CPU:
        options = config.provider_options.get("CUDAExecutionProvider") or {}
        tf32 = str(options.get("use_tf32", 1)) in ("1", "True")
        tolerances += [_TF32] if tf32 or config.execution_providers[0] != CUDA else []
    return max(tolerances, default=_FP32)
