"""When the next run of requests leaves a process for a topic: a pure rule.

Each run costs a produce request here and a fetch in the process that reads the topic, however many
requests it has. While few requests pass, each run leaves at once. While many do, what gathers in
`PACE_S` leaves together.
"""

from __future__ import annotations

PACE_S = 0.01
"""A run waits for so long at most, and only while many requests pass."""
PACED_PER_S = 6400.0
"""A steady flow of no more requests a second than this is never held back."""
TURN_S = 0.001
"""Runs to several partitions leave together when no more time than this lies between them."""
_ALLOWED = PACED_PER_S * PACE_S
_MOST = 4 * _ALLOWED


class Pace:
    """A leaky bucket, filled by every request that leaves."""

    __slots__ = ("_due_s", "_filled", "_since_s", "_turn_s")

    def __init__(self) -> None:
        self._filled = 0.0
        self._since_s = 0.0
        self._turn_s = 0.0
        self._due_s = 0.0

    def pause_s(self, now_s: float) -> float:
        """How long a run that is ready now waits, in seconds; 0: it leaves."""
        if now_s - self._turn_s < TURN_S:
            return 0.0
        return max(0.0, self._due_s - now_s)

    def left(self, requests: int, now_s: float) -> None:
        """A run of so many requests has left."""
        drained = max(0.0, self._filled - (now_s - self._since_s) * PACED_PER_S)
        self._filled = min(_MOST, drained + requests)
        self._since_s = now_s
        if now_s - self._turn_s >= TURN_S:
            self._turn_s = now_s
        over = max(0.0, self._filled - _ALLOWED)
        self._due_s = self._turn_s + min(PACE_S, over / PACED_PER_S)
