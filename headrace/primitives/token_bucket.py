"""Token bucket: limits how often something may happen, without I/O."""

from __future__ import annotations


class TokenBucket:
    """Holds up to `burst` tokens, gains `per_second` tokens a second, and starts full.

    Args:
        burst: number of tokens that can be taken at once.
        per_second: number of tokens that can be taken a second in the long run.
    """

    __slots__ = ("_burst", "_filled_at_s", "_per_second", "_tokens")

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._tokens = burst
        self._filled_at_s = 0.0

    def take(self, now_s: float) -> bool:
        """Take a token; return whether there was one. A clock that goes backwards adds none."""
        gained = max(0.0, now_s - self._filled_at_s) * self._per_second
        self._tokens = min(self._burst, self._tokens + gained)
        self._filled_at_s = now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def wait_s(self, now_s: float) -> float:
        """Return the time until there is a token, if nothing takes one before. The bucket must gain
        some.
        """
        gained = max(0.0, now_s - self._filled_at_s) * self._per_second
        return max(0.0, 1.0 - self._tokens - gained) / self._per_second
