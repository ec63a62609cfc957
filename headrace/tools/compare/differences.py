"""Differences between two answers to one request, output by output. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from headrace.errors import Rejected
from headrace.log.port import Record
from headrace.protocol.codec import decode_response
from headrace.protocol.messages import ErrorResponse

Floats = NDArray[np.float64]


class ArrayDifference(NamedTuple):
    """Difference between an output and its reference.

    Attributes:
        exact: same dtype, shape and elements; NaN is equal to NaN.
        comparable: floats of one shape on both sides; otherwise the following fields are
            meaningless.
        max_abs, mean_abs: of the elementwise differences; infinite if only one side is NaN or
            infinite.
        cosine: of the flattened arrays, from -1 to 1; 1 for two arrays of zeros.
        top1: share of rows with the largest element at the same index; None if the last dimension
            has fewer than two elements.
        topk: share of the k largest elements' indices that both sides have, over all rows.
        scale: the largest finite absolute value of the reference.
    """

    exact: bool
    comparable: bool = False
    max_abs: float = 0.0
    mean_abs: float = 0.0
    cosine: float = 1.0
    top1: float | None = None
    topk: float | None = None
    scale: float = 0.0


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is one of the protocol's floating-point datatypes."""
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


def resolution(dtype: np.dtype[Any]) -> float:
    """Return the distance from 1 to the next larger number of a float dtype."""
    found = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]  # knows bfloat16 as well
    return float(found.eps)


def compare_arrays(reference: NDArray[Any], other: NDArray[Any], k: int) -> ArrayDifference:
    """See `ArrayDifference`; `k` is that of top-k, at most one less than there are elements."""
    if reference.dtype != other.dtype or reference.shape != other.shape:
        return ArrayDifference(exact=False)
    if not is_float(reference.dtype):
        return ArrayDifference(exact=bool(np.array_equal(reference, other)))
    left, right = reference.astype(np.float64), other.astype(np.float64)
    exact = bool(np.array_equal(left, right, equal_nan=True))
    finite = left[np.isfinite(left)]
    top1, topk = _agreement(left, right, k)
    differences = _differences(left, right)
    return ArrayDifference(
        exact,
        comparable=True,
        max_abs=float(differences.max(initial=0.0)),
        mean_abs=float(differences.mean()) if differences.size else 0.0,
        cosine=_cosine(left, right),
        top1=top1,
        topk=topk,
        scale=float(np.abs(finite).max(initial=0.0)),
    )


def _differences(left: Floats, right: Floats) -> Floats:
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore", over="ignore"):
        differences = np.asarray(np.abs(left - right))  # of scalars it is no array
    differences[~np.isfinite(differences)] = math.inf
    differences[same] = 0.0
    return differences


def _cosine(left: Floats, right: Floats) -> float:
    a, b = np.nan_to_num(left.ravel()), np.nan_to_num(right.ravel())
    # Scaled first, so that the squares of large numbers do not overflow.
    largest_a, largest_b = np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0)
    if not largest_a or not largest_b:
        return 1.0 if largest_a == largest_b else 0.0
    a, b = a / largest_a, b / largest_b
    product = float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))
    return max(-1.0, min(1.0, product))


def _agreement(left: Floats, right: Floats, k: int) -> tuple[float | None, float | None]:
    """Return the agreement of the largest elements' indices along the last dimension."""
    if not left.ndim or left.shape[-1] < 2 or not left.size:
        return None, None
    size = left.shape[-1]
    k = min(k, size - 1)
    # Stable, so that equal elements are taken in the same order on both sides.
    order_left = np.argsort(-left.reshape(-1, size), axis=1, kind="stable")[:, :k]
    order_right = np.argsort(-right.reshape(-1, size), axis=1, kind="stable")[:, :k]
    top1 = float(np.mean(order_left[:, 0] == order_right[:, 0]))
    shared = (order_left[:, :, None] == order_right[:, None, :]).any(axis=2)
    return top1, float(shared.mean())


# --- answers -------------------------------------------------------------------------------------


OK = "ok"
UNREADABLE = "unreadable"
MISSING = "missing"
"""Codes of an answer that is not Headrace's, and of a recorded answer that is missing."""


class TimedAnswer(NamedTuple):
    """An answer, and its timings.

    Attributes:
        code: `ok`, the code of an error, `unreadable` or `missing`.
        message: of an error.
        queue_us, compute_us: as reported by the answer; None if missing.
        end_to_end_us: from sending the request to receiving its answer; None if recorded.
    """

    code: str
    message: str = ""
    outputs: Mapping[str, NDArray[Any]] = {}
    queue_us: int | None = None
    compute_us: int | None = None
    end_to_end_us: int | None = None


def measured(record: Record, end_to_end_us: int | None = None) -> TimedAnswer:
    """Parse an answer record."""
    try:
        answer = decode_response(record.headers, record.value)
    except Rejected as error:
        return TimedAnswer(UNREADABLE, error.message, end_to_end_us=end_to_end_us)
    if isinstance(answer, ErrorResponse):
        code = answer.error_details.code
        return TimedAnswer(code, answer.error, end_to_end_us=end_to_end_us)
    return TimedAnswer(
        OK,
        "",
        answer.outputs,
        _microseconds(answer.parameters.get("queue_us")),
        _microseconds(answer.parameters.get("compute_us")),
        end_to_end_us,
    )


def _microseconds(parameter: object) -> int | None:
    return parameter if isinstance(parameter, int) else None


class AnswerDifference(NamedTuple):
    """Difference between an answer and its reference.

    Attributes:
        codes: of the reference and of the other one.
        outputs: by name, if both are `ok`; an output that one side lacks is not exact.
    """

    codes: tuple[str, str]
    outputs: Mapping[str, ArrayDifference]

    @property
    def exact(self) -> bool:
        """Return whether nothing differs."""
        same_code = self.codes[0] == self.codes[1]
        return same_code and all(each.exact for each in self.outputs.values())

    @property
    def badness(self) -> tuple[int, float]:
        """Return a sort key, the worst difference last.

        Different codes are worst, then inexact outputs without a numeric distance, then the largest
        difference relative to the reference's scale.
        """
        if self.codes[0] != self.codes[1]:
            return 3, 0.0
        if any(not each.exact and not each.comparable for each in self.outputs.values()):
            return 2, self._relative
        return int(not self.exact), self._relative

    @property
    def _relative(self) -> float:
        return max(
            (each.max_abs / (each.scale or 1.0) for each in self.outputs.values()), default=0.0
        )


def compare_answers(reference: TimedAnswer, other: TimedAnswer, k: int) -> AnswerDifference:
    """See `AnswerDifference`; `k` is that of top-k."""
    codes = reference.code, other.code
    if codes != (OK, OK):
        return AnswerDifference(codes, {})
    names = [*reference.outputs, *(name for name in other.outputs if name not in reference.outputs)]
    differences = {}
    for name in names:
        left, right = reference.outputs.get(name), other.outputs.get(name)
        if left is None or right is None:
            differences[name] = ArrayDifference(exact=False)
        else:
            differences[name] = compare_arrays(left, right, k)
    return AnswerDifference(codes, differences)
