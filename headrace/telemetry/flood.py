"""Rate limit of log lines, for each kind of event, without I/O."""

from __future__ import annotations

from headrace.telemetry.token_bucket import TokenBucket
from headrace.tuning import TUNING, RuntimeTuning


class LogRateLimiter:
    """Admits a burst of events of each kind at once, and a steady rate after that.

    Attributes:
        suppressed: how many were not admitted, by kind, since the start.
    """

    def __init__(self, tuning: RuntimeTuning = TUNING.runtime) -> None:
        self._tuning = tuning
        self._buckets: dict[str, TokenBucket] = {}
        self._since_last: dict[str, int] = {}
        self.suppressed: dict[str, int] = {}

    def admit(self, kind: str, now_s: float) -> int | None:
        """Return how many of the kind were suppressed since the last admitted one; None if this one
        is suppressed too.

        Args:
            kind: the kind of event; beyond `log_max_kinds` further kinds share one bucket.
            now_s: monotonic seconds.
        """
        if kind not in self._buckets and len(self._buckets) >= self._tuning.log_max_kinds:
            kind = ""
        bucket = self._buckets.get(kind)
        if bucket is None:
            bucket = self._buckets[kind] = TokenBucket(
                self._tuning.log_burst_lines, self._tuning.log_lines_per_s
            )
        if bucket.take(now_s):
            return self._since_last.pop(kind, 0)
        self._since_last[kind] = self._since_last.get(kind, 0) + 1
        self.suppressed[kind] = self.suppressed.get(kind, 0) + 1
        return None
