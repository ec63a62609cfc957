"""Limits on the values of an input, for models that fail or give wrong results outside of them.

An index past the end of an embedding table fails the whole batch on some devices and reads
unrelated memory on others, so values are checked before a request joins a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.signature import Signature
from headrace.protocol.messages import Tensor
from headrace.protocol.tensors import DATATYPES

Range = tuple[float, float]
"""Lowest and highest allowed value, both inclusive."""


class RangeCheck(NamedTuple):
    """Limits of one input, identified by its position in the signature."""

    position: int
    low: float
    high: float
    dtype: np.dtype[Any]

    def check(self, tensor: Tensor, where: str) -> None:
        """Refuse a tensor with a value outside of the limits; NaN is outside.

        Raises:
            Rejected: `INVALID_TENSOR`, with the first such value and its index.
        """
        values = np.frombuffer(tensor.data, self.dtype)
        if not values.size or (values.min() >= self.low and values.max() <= self.high):
            return
        outside = ~((values >= self.low) & (values <= self.high))
        first = int(outside.argmax())
        index = [int(part) for part in np.unravel_index(first, tensor.shape)]
        raise Rejected.mismatch(
            Code.INVALID_TENSOR,
            where,
            expected=f"values in [{self.low}, {self.high}]",
            got=f"{values[first]} at index {index}",
        )


class FiniteCheck(NamedTuple):
    """Check that the values of one input are neither NaN nor infinite."""

    position: int
    dtype: np.dtype[Any]

    def check(self, tensor: Tensor, where: str) -> None:
        """Refuse a tensor with a value that is not finite.

        Raises:
            Rejected: `INVALID_TENSOR`, with the first such value and its index.
        """
        finite = np.isfinite(np.frombuffer(tensor.data, self.dtype))
        if finite.all():
            return
        first = int((~finite).argmax())
        index = [int(part) for part in np.unravel_index(first, tensor.shape)]
        value = np.frombuffer(tensor.data, self.dtype)[first]
        raise Rejected.mismatch(
            Code.INVALID_TENSOR, where, expected="finite values", got=f"{value} at index {index}"
        )


def clip_range(datatype: str, allowed: Sequence[float] | None) -> tuple[Any, Any] | None:
    """Return the lowest and highest value of a datatype within a range; None for no limit."""
    if allowed is None:
        return None
    dtype = DATATYPES[datatype].dtype
    low, high = allowed
    if dtype.kind in "iu":
        known = np.iinfo(dtype)
        least, most = max(math.ceil(low), int(known.min)), min(math.floor(high), int(known.max))
        return (least, most) if least <= most else None
    largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]  # no stubs
    if low > largest or high < -largest:
        return None
    return max(low, -largest), min(high, largest)


def make_finite_checks(signature: Signature) -> tuple[FiniteCheck, ...]:
    """Return a check for each floating-point input."""
    return tuple(
        FiniteCheck(position, DATATYPES[spec.datatype].dtype)
        for position, spec in enumerate(signature.inputs)
        if spec.datatype.startswith(("FP", "BF"))
    )


def make_range_checks(
    signature: Signature, ranges: Mapping[str, Sequence[float]]
) -> tuple[RangeCheck, ...]:
    """Return the checks for the ranges of a model's configuration.

    Raises:
        ConfigurationError: a range is for an unknown input, or for one that is not numeric.
    """
    positions = {spec.name: position for position, spec in enumerate(signature.inputs)}
    checks = []
    for name, (low, high) in ranges.items():
        if name not in positions:
            raise ConfigurationError(
                f"range.{name}: expected one of the inputs {', '.join(positions)}"
            )
        datatype = signature.inputs[positions[name]].datatype
        if datatype in ("BYTES", "BOOL"):
            raise ConfigurationError(f"range.{name}: expected an input of numbers, got {datatype}")
        limits = clip_range(datatype, (low, high))
        if limits is None:
            raise ConfigurationError(
                f"range.{name}: expected a range with values of {datatype} in it, "
                f"got [{low}, {high}]"
            )
        checks.append(RangeCheck(positions[name], *limits, DATATYPES[datatype].dtype))
    return tuple(checks)
