"""Measures of the difference between two runs' outputs for the same rows.

`identical` compares bits, so it shows any influence of the other rows of the batch, however small.
`distance` is the largest difference relative to the output's scale; rounding is judged by it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def identical(one: Array, other: Array) -> bool:
    """Return whether two arrays have the same shape, datatype and bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype == object:
        return bool((one == other).all())
    return one.tobytes() == other.tobytes()


def scale_of(array: Array) -> float:
    """Return the largest finite magnitude; 1 if there is none, and for BYTES."""
    if array.dtype == object:
        return 1.0
    magnitudes = np.abs(array.astype(np.float64))
    finite = magnitudes[np.isfinite(magnitudes)]
    return float(finite.max(initial=0.0)) or 1.0


def distance(one: Array, other: Array, scale: float) -> float:
    """Return the largest difference between corresponding elements, divided by `scale`.

    Infinite if the shapes differ, a BYTES element differs, or only one of two elements is finite.
    Equal infinities, and NaN in both, count as no difference.
    """
    if identical(one, other):
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
