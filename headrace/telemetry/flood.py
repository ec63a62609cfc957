"""Keeps one kind of event from flooding the log: a token bucket for each, without I/O."""

from __future__ import annotations

BURST = 20
PER_S = 2.0
MAX_KINDS = 1000


class _Bucket:
    __slots__ = ("at_s", "suppressed", "tokens")

    def __init__(self, now_s: float) -> None:
        self.tokens = float(BURST)
        self.at_s = now_s
        self.suppressed = 0


class Flood:
    """Lets `BURST` events of a kind pass at once, and `PER_S` a second after that.

    Attributes:
        suppressed: how many did not pass, by kind, from the beginning.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}
        self.suppressed: dict[str, int] = {}

    def admit(self, kind: str, now_s: float) -> int | None:
        """How many of the kind were held back since the last that passed; None: hold this back.

        Args:
            kind: of the event; beyond `MAX_KINDS` they share one bucket.
            now_s: monotonic seconds.
        """
        if kind not in self._buckets and len(self._buckets) >= MAX_KINDS:
            kind = ""
        bucket = self._buckets.get(kind)
        if bucket is None:
            bucket = self._buckets[kind] = _Bucket(now_s)
        bucket.tokens = min(BURST, bucket.tokens + (now_s - bucket.at_s) * PER_S)
        bucket.at_s = now_s
        if bucket.tokens < 1:
            bucket.suppressed += 1
            self.suppressed[kind] = self.suppressed.get(kind, 0) + 1
            return None
        bucket.tokens -= 1
        suppressed, bucket.suppressed = bucket.suppressed, 0
        return suppressed
