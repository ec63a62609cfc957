"""How much of something may happen: so much at once, and so much a second after that."""

from __future__ import annotations


class Allowance:
    """A token bucket, without I/O.

    Args:
        burst: how many may happen at once.
        per_s: how many a second in the long run.
    """

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = float(burst)
        self._at_us = 0

    def take(self, now_us: int) -> bool:
        """Whether one more may happen now; a clock that goes back gives nothing."""
        grown = self._left + max(0, now_us - self._at_us) * self._per_s / 1e6
        self._left = min(float(self._burst), grown)
        self._at_us = now_us
        if self._left < 1:
            return False
        self._left -= 1
        return True
