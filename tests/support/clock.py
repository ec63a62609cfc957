"""A clock that stands still until it is told to move."""

from __future__ import annotations


class ManualClock:
    """Time in the caller's hands.

    Args:
        now_ms: where it starts, in milliseconds (of the epoch, where that matters).
    """

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def now_s(self) -> float:
        return self._now_ms / 1000

    def advance_ms(self, by_ms: int) -> None:
        """Move on; a clock never goes back."""
        if by_ms < 0:
            raise ValueError(f"expected 0 ms or more, got {by_ms}")
        self._now_ms += by_ms
