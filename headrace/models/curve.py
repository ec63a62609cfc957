"""S(b), how long a run of b rows takes, drawn through the sizes that are known.

Their times are made monotone by weighted isotonic regression (pool adjacent violators; Barlow et
al., 1972), since a batch of more rows is not quicker. Between the sizes S is a straight line, and
outside of them it goes on with the slope of the least-squares line S(b) = t0 + a b.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

BESIDE_US = 100
"""What a batch costs outside of its run, about: to close it, to hand it over, to share it out.
Where runs are quicker than that it decides for large batches, however uneven their times are."""
NEARLY_BEST = 0.99
"""Of the best throughput: the smallest size that reaches it is taken, since its requests wait for
fewer others, and its buffers are smaller."""


class Point(NamedTuple):
    """What is known of one size: its median in microseconds, and how much that weighs."""

    rows: int
    us: float
    weight: float


class Curve:
    """S(b) between and beyond known sizes.

    Args:
        points: at least one, in ascending order of rows.
    """

    __slots__ = ("rows", "slope_us", "t0_us", "us")

    def __init__(self, points: Sequence[Point]) -> None:
        self.rows = [each.rows for each in points]
        self.us = isotonic(points)
        self.t0_us, self.slope_us = _line(points, self.us)

    def __call__(self, rows: int) -> float:
        """In microseconds."""
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
        """The most rows, up to `limit` and at least 1, that are done within a time."""
        if self(limit) <= slack_us:
            return limit
        low, high = 1, limit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self(middle) <= slack_us else (low, middle)
        return low

    def best(self, limit: int) -> int:
        """The smallest size up to `limit` that nearly has the most rows a second, with what a
        batch costs beside its run.

        Between two known sizes rows over time only rises or only falls, so the known ones and the
        limit are all that have to be looked at. A single known size says nothing of others: then
        it is the limit.
        """
        if len(self.rows) == 1:
            return limit
        sizes = [*self.rows[: bisect_left(self.rows, limit)], limit]
        rates = [rows / (self(rows) + BESIDE_US) for rows in sizes]
        most = max(rates)
        good = [rows for rows, rate in zip(sizes, rates, strict=True) if rate >= NEARLY_BEST * most]
        return min(good)


def isotonic(points: Sequence[Point]) -> list[float]:
    """The non-decreasing sequence that is nearest to the points by weighted least squares."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many points
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
    """t0 and a of the weighted least-squares line, neither below 0.

    Of one size nothing but its time for each row is known.
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
