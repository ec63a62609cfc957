"""Histogram of times over six decades, of bounded size. Pure."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

LOWEST_S = 1e-6
HIGHEST_S = 1e3
PER_DECADE = 256
"""Neighbouring buckets differ by 0.9 %, so percentiles are accurate to half of that."""

_BUCKETS = round(math.log10(HIGHEST_S / LOWEST_S) * PER_DECADE) + 1


class Histogram:
    """Counts times in seconds; times out of range count in the first or last bucket."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(_BUCKETS, np.int64)
        self._total_s = 0.0
        self.max_s = 0.0

    def __len__(self) -> int:
        """Number of counted times."""
        return int(self._counts.sum())

    def add(self, times_s: ArrayLike) -> None:
        """Count some times."""
        times: NDArray[np.float64] = np.asarray(times_s, np.float64)
        if not times.size:
            return
        held = np.clip(times, LOWEST_S, HIGHEST_S)
        places = np.rint(np.log10(held / LOWEST_S) * PER_DECADE).astype(np.int64)
        self._counts += np.bincount(places, minlength=_BUCKETS)
        self._total_s += float(times.sum())
        self.max_s = max(self.max_s, float(times.max()))

    def percentile_s(self, percent: float) -> float:
        """Return the time that `percent` of the counted times do not exceed; 0 if
        there are none.
        """
        count = len(self)
        if not count:
            return 0.0
        rank = max(1, math.ceil(count * percent / 100))
        place = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(_middle_s(place), self.max_s)

    @property
    def mean_s(self) -> float:
        """Return the mean; 0 if there are no times."""
        return self._total_s / max(1, len(self))


def _middle_s(place: int) -> float:
    return LOWEST_S * math.pow(10.0, place / PER_DECADE)
