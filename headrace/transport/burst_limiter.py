"""Rule for when the next group of requests is written to a topic; no I/O.

Each write costs a produce request here and a fetch in the process that reads the topic, however
many requests it contains. At low rates each group is written immediately. At high rates the
requests that arrive within `max_write_delay_s` are written together. Large requests count as
several, since fewer of them keep the processes as busy.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.protocol.messages import Request
from headrace.tuning import TUNING, TransportTuning


class BurstLimiter:
    """Leaky bucket, filled by every request that is written."""

    __slots__ = (
        "_allowed",
        "_counted_bytes",
        "_due_s",
        "_filled",
        "_max_delay_s",
        "_max_filled",
        "_rate",
        "_same_write_s",
        "_since_s",
        "_write_s",
    )

    def __init__(self, tuning: TransportTuning = TUNING.transport) -> None:
        self._rate = tuning.undelayed_requests_per_s
        self._counted_bytes = tuning.counted_request_bytes
        self._max_delay_s = tuning.max_write_delay_s
        self._same_write_s = tuning.same_write_within_s
        self._allowed = self._rate * tuning.max_write_delay_s
        self._max_filled = self._rate * tuning.burst_memory_s
        self._filled = 0.0
        self._since_s = 0.0
        self._write_s = 0.0
        self._due_s = 0.0

    def delay_s(self, now_s: float) -> float:
        """Return the seconds to wait before writing at `now_s`; 0 to write immediately."""
        if now_s - self._write_s < self._same_write_s:
            return 0.0
        return max(0.0, self._due_s - now_s)

    def record_write(self, requests: int, size_bytes: int, now_s: float) -> None:
        """Record that so many requests were written, with inputs of so many bytes."""
        drained = max(0.0, self._filled - (now_s - self._since_s) * self._rate)
        counted = requests + size_bytes / self._counted_bytes
        self._filled = min(self._max_filled, drained + counted)
        self._since_s = now_s
        if now_s - self._write_s >= self._same_write_s:
            self._write_s = now_s
        over = max(0.0, self._filled - self._allowed)
        self._due_s = self._write_s + min(self._max_delay_s, over / self._rate)


def input_bytes(requests: Iterable[Request]) -> int:
    """Return the size in bytes of the requests' inputs."""
    return sum([request.size_bytes for request in requests])
