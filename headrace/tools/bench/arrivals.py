"""Due times of requests: a Poisson process, in chunks; without I/O."""

from __future__ import annotations

import math

import numpy as np

CHUNK = 1024


class PoissonArrivals:
    """Due times of independent callers, which do not wait for each other's answers.

    Args:
        per_s: average rate per second.
        seconds: duration.
        seed: equal seeds give equal times.

    Raises:
        ValueError: the rate is not a positive number.
    """

    def __init__(self, per_s: float, seconds: float, seed: int = 0) -> None:
        if not (per_s > 0 and math.isfinite(per_s)):
            raise ValueError(
                f"rate: expected a positive number of requests per second, got {per_s}"
            )
        self._per_s = per_s
        self._seconds = seconds
        self._random = np.random.default_rng(seed)
        self._last_s = 0.0
        self._pending: list[float] = []
        self._next = 0
        self._ended = False

    def due(self, now_s: float) -> list[float]:
        """Return the due times up to now that were not returned yet, in seconds
        from the beginning.
        """
        taken: list[float] = []
        while (next_s := self.next_s()) is not None and next_s <= now_s:
            taken.append(next_s)
            self._next += 1
        return taken

    def next_s(self) -> float | None:
        """Return the next due time; None if there are no more."""
        if self._next >= len(self._pending) and not self._ended:
            self._draw()
        return self._pending[self._next] if self._next < len(self._pending) else None

    def _draw(self) -> None:
        gaps = self._random.exponential(1 / self._per_s, CHUNK)
        times = self._last_s + np.cumsum(gaps)
        self._last_s = float(times[-1])
        self._ended = self._last_s > self._seconds
        self._pending = times[times <= self._seconds].tolist()
        self._next = 0
