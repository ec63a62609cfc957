"""S(b), the duration of a run of b rows, interpolated from the known sizes.

The known durations are made monotone by weighted isotonic regression (pool adjacent violators;
Barlow et al., 1972), since a batch of more rows is not faster. S is linear between known sizes, and
continues outside of them with the slope of the least-squares line S(b) = t0 + a b.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from headrace.tuning import TUNING, ModelTuning


class Point(NamedTuple):
    """Known data of one size: its median in microseconds, and the weight of that."""

    rows: int
    us: float
    weight: float


class Curve:
    """S(b) interpolated between known sizes and extrapolated beyond them.

    Args:
        points: at least one, in ascending order of rows.
        tuning: the overhead of a batch, and the throughput that is good enough.
    """

    __slots__ = ("_tuning", "rows", "slope_us", "t0_us", "us")

    def __init__(self, points: Sequence[Point], tuning: ModelTuning = TUNING.models) -> None:
        self._tuning = tuning
        self.rows = [each.rows for each in points]
        self.us = isotonic(points)
        self.t0_us, self.slope_us = _line(points, self.us)

    def __call__(self, rows: int) -> float:
        """Return S(rows) in microseconds."""
        known, us = self.rows, self.us
        place = bisect_left(known, rows)
        if place == len(known):
            return us[-1] + self.slope_us * (rows - known[-1])
        if known[place] == rows:
            return us[place]
        if place == 0:
            return max(1.0, us[0] - self.slope_us * (known[0] - rows))
        share = (rows - known[place - 1]) / (known[place] - known[place - 1])
        return us[place - 1] + share * (us[place] - us[place - 1])

    def most_within(self, limit: int, slack_us: float) -> int:
        """Return the most rows, from 1 to `limit`, whose run takes at most `slack_us`."""
        if self(limit) <= slack_us:
            return limit
        low, high = 1, limit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self(middle) <= slack_us else (low, middle)
        return low

    def best(self, limit: int) -> int:
        """Return the smallest size up to `limit` with nearly the best throughput, including
        overhead.

        Between two known sizes the throughput is monotone, so only the known sizes and the limit
        need to be compared. A single known size says nothing about others; the limit is returned
        then.
        """
        if len(self.rows) == 1:
            return limit
        sizes = [*self.rows[: bisect_left(self.rows, limit)], limit]
        rates = [rows / (self(rows) + self._tuning.batch_overhead_us) for rows in sizes]
        least = self._tuning.sufficient_throughput * max(rates)
        return min(rows for rows, rate in zip(sizes, rates, strict=True) if rate >= least)


def isotonic(points: Sequence[Point]) -> list[float]:
    """Return the non-decreasing sequence closest to the points by weighted least squares."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, number of points
    for _, us, weight in points:
        mean, total, length = us, weight, 1
        while pools and pools[-1][0] > mean:
            before, before_weight, before_length = pools.pop()
            mean = (before * before_weight + mean * total) / (before_weight + total)
            total += before_weight
            length += before_length
        pools.append((mean, total, length))
    return [mean for mean, _, length in pools for _ in range(length)]


def _line(points: Sequence[Point], us: Sequence[float]) -> tuple[float, float]:
    """Return t0 and a of the weighted least-squares line, neither below 0.

    With a single size, t0 is 0 and a is its time per row.
    """
    if len(points) == 1:
        return 0.0, us[0] / points[0].rows
    total = sum(each.weight for each in points)
    mean_rows = sum(each.weight * each.rows for each in points) / total
    mean_us = sum(each.weight * one for each, one in zip(points, us, strict=True)) / total
    spread = sum(each.weight * (each.rows - mean_rows) ** 2 for each in points)
    together = sum(
        each.weight * (each.rows - mean_rows) * (one - mean_us)
        for each, one in zip(points, us, strict=True)
    )
    slope = max(0.0, together / spread)
    t0 = mean_us - slope * mean_rows
    return (t0, slope) if t0 >= 0 else (0.0, mean_us / mean_rows)
