"""Clocks in the hands of a test: one that stands still, and one that is set while it goes."""

from __future__ import annotations

from headrace.clock import wall_clock_us


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


class SettableClock:
    """A wall clock that goes on by itself and can be set, back as well as forward."""

    def __init__(self) -> None:
        self._ahead_us = 0

    def __call__(self) -> int:
        """The time in microseconds since the epoch."""
        return wall_clock_us() + self._ahead_us

    def now_ms(self) -> int:
        """The same in milliseconds, as the embedded log wants it."""
        return self() // 1000

    def set_by(self, seconds: float) -> None:
        """Set it by so much; back where that is negative."""
        self._ahead_us += round(seconds * 1e6)
