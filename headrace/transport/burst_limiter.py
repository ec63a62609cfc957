"""Rule for when the next group of requests is written to a topic; no I/O.

Each write costs a produce request here and a fetch in the process that reads the topic, however
many requests it contains. At low rates each group is written immediately. At high rates the
requests that arrive within `PACE_S` are written together.
"""

from __future__ import annotations

PACE_S = 0.01
"""Longest delay of a write; there is none at low request rates."""
PACED_PER_S = 6400.0
"""A steady rate up to this many requests per second is never delayed."""
TURN_S = 0.001
"""Writes to several partitions that start within this time are not delayed separately."""
_ALLOWED = PACED_PER_S * PACE_S
_MOST = 4 * _ALLOWED


class Pace:
    """Leaky bucket, filled by every request that is written."""

    __slots__ = ("_due_s", "_filled", "_since_s", "_turn_s")

    def __init__(self) -> None:
        self._filled = 0.0
        self._since_s = 0.0
        self._turn_s = 0.0
        self._due_s = 0.0

    def pause_s(self, now_s: float) -> float:
        """Return the seconds to wait before writing at `now_s`; 0 to write immediately."""
        if now_s - self._turn_s < TURN_S:
            return 0.0
        return max(0.0, self._due_s - now_s)

    def left(self, requests: int, now_s: float) -> None:
        """Record that so many requests were written."""
        drained = max(0.0, self._filled - (now_s - self._since_s) * PACED_PER_S)
        self._filled = min(_MOST, drained + requests)
        self._since_s = now_s
        if now_s - self._turn_s >= TURN_S:
            self._turn_s = now_s
        over = max(0.0, self._filled - _ALLOWED)
        self._due_s = self._turn_s + min(PACE_S, over / PACED_PER_S)
