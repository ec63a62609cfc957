"""Comparison of two answers to one request; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray

from headrace.errors import Rejected
from headrace.log.port import Record
from headrace.protocol.codec import decode_response
from headrace.protocol.messages import ErrorResponse
from headrace.tools.replay.compare.arrays import ArrayDifference, compare_arrays

OK = "ok"
UNREADABLE = "unreadable"
MISSING = "missing"
"""Codes of an answer that is not Headrace's, and of a recorded answer that is missing."""


class Measured(NamedTuple):
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


def measured(record: Record, end_to_end_us: int | None = None) -> Measured:
    """Parse an answer record."""
    try:
        answer = decode_response(record.headers, record.value)
    except Rejected as error:
        return Measured(UNREADABLE, error.message, end_to_end_us=end_to_end_us)
    if isinstance(answer, ErrorResponse):
        code = answer.error_details.code
        return Measured(code, answer.error, end_to_end_us=end_to_end_us)
    return Measured(
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


def compare_answers(reference: Measured, other: Measured, k: int) -> AnswerDifference:
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
