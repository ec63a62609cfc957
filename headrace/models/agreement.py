"""How far two runs' outputs for the same rows are apart.

Two measures, and they answer different questions. `identical` compares bits: what a row's mates do
to it shows there, however little it is. `distance` is the largest difference in parts of the
output's scale, which is what rounding is judged by.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def identical(one: Array, other: Array) -> bool:
    """Whether two arrays have the same shape, datatype and bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype == object:
        return bool((one == other).all())
    return one.tobytes() == other.tobytes()


def scale_of(array: Array) -> float:
    """The largest finite magnitude; 1 for what has none, and for texts."""
    if array.dtype == object:
        return 1.0
    magnitudes = np.abs(array.astype(np.float64))
    finite = magnitudes[np.isfinite(magnitudes)]
    return float(finite.max(initial=0.0)) or 1.0


def distance(one: Array, other: Array, scale: float) -> float:
    """The largest difference of two elements in the same place, in parts of `scale`.

    Infinite where the shapes differ, a text differs, or only one of two elements is finite. The
    same infinity twice, and NaN twice, are no difference.
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
