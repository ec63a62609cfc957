"""Due times of records, and how precisely they were kept; pure, with the time passed in.

There is one timeline for all partitions. A late record does not move those after it: their due
times stay, and all due records are sent at once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Protocol

from headrace.log.port import Record


class Pace(Protocol):
    """Maps records to positions on the timeline."""

    def at_s(self, record: Record) -> float:
        """Return seconds after the first record; called once per record, in order."""
        ...


class OriginalSpacing:
    """Spacing of the records' timestamps, `speed` times as fast.

    A record with an earlier timestamp than its predecessor is due together with it.
    """

    def __init__(self, speed: float = 1.0) -> None:
        if not (speed > 0 and math.isfinite(speed)):
            raise ValueError(f"speed: expected a positive number, got {speed}")
        self._speed = speed
        self._first_ms: int | None = None

    def at_s(self, record: Record) -> float:
        if self._first_ms is None:
            self._first_ms = record.timestamp
        return (record.timestamp - self._first_ms) / 1000 / self._speed


class FixedRate:
    """Constant rate of `per_s` records per second."""

    def __init__(self, per_s: float) -> None:
        if not (per_s > 0 and math.isfinite(per_s)):
            raise ValueError(f"rate: expected a positive number of records per second, got {per_s}")
        self._per_s = per_s
        self._count = 0

    def at_s(self, record: Record) -> float:
        at_s = self._count / self._per_s
        self._count += 1
        return at_s


class Unpaced:
    """As fast as possible: everything is due at once."""

    def at_s(self, record: Record) -> float:
        return 0.0


class Schedule:
    """Due times of the records on a clock.

    Args:
        started_s: when the first record is due, on the clock whose time is passed later.
    """

    def __init__(self, pace: Pace, started_s: float) -> None:
        self._pace = pace
        self._started_s = started_s
        self._last_s = started_s

    def plan(self, records: Iterable[Record]) -> list[float]:
        """Return the due time of each of the next records; never before its predecessor's."""
        dues = []
        for record in records:
            self._last_s = max(self._last_s, self._started_s + self._pace.at_s(record))
            dues.append(self._last_s)
        return dues


def due_until(dues: Sequence[float], start: int, now_s: float) -> int:
    """Return the index after the last due record, from `start` on."""
    return bisect_right(dues, now_s, lo=start)


class Punctuality:
    """Histogram, of bounded size, of the differences between due times and send times.

    Its buckets grow by 5 % each, so percentiles are accurate to 2.5 %.
    """

    _GROWTH = math.log(1.05)

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self._count = 0
        self.max_s = 0.0

    def add(self, dues: Iterable[float], sent_s: float) -> None:
        """Count records that were due at these times and sent at `sent_s`."""
        for due_s in dues:
            error_s = abs(sent_s - due_s)
            self.max_s = max(self.max_s, error_s)
            bucket = int(math.log1p(error_s * 1e6) / self._GROWTH)
            self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
            self._count += 1

    def percentile_s(self, percent: float) -> float:
        """Return the error in seconds that `percent` of the records do not exceed; 0 without
        records.
        """
        rank = math.ceil(self._count * percent / 100)
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                return min(math.expm1((bucket + 0.5) * self._GROWTH) / 1e6, self.max_s)
        return 0.0
