"""How long a run of a model takes, learned from its runs: S(b), by shape class and rows.

Of each batch size a class keeps its last runs, and takes their median, so that one run that was
held up changes nothing and a real change is followed within a few runs. Medians are made monotone
by weighted isotonic regression (pool adjacent violators; Barlow et al., 1972), since a batch of
more rows is not quicker: a size that was seen rarely, or long ago, yields to its neighbours.
Between the sizes that were seen S is a straight line, and outside of them it goes on with the
slope of the least-squares line S(b) = t0 + a b.

All of it is synchronous, and knows neither a clock nor I/O. One object belongs to one version of a
model; ingest, batcher and executor of a process share it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

ShapeClass = tuple[int, ...]

WINDOW = 15
"""Runs of one size that its median is taken of."""
FORGET_AFTER = 1024
"""A run is forgotten when a class has had so many since, and the size is seen again."""
HALVE_AFTER = 256
"""The weight of a size against its neighbours halves for so many runs of other sizes."""
REFIT_AFTER = 16
"""Runs until the curve is drawn anew; a class that has had fewer is drawn after each."""
EXACT_ROWS = 64
"""Sizes up to this one are told apart; larger ones in sixteen steps for each doubling."""
MAX_CLASSES = 64
"""The class that was seen longest ago makes room for another one."""
_LEAST_WEIGHT = 1e-6
SHOWN_CLASSES = 8
SLIPS = 64
"""Batches that the margin is taken of."""
BESIDE_US = 100
"""What a batch costs outside of its run, about: to close it, to hand it over, to share it out.
Where runs are quicker than that it decides for large batches, however uneven their times are."""
NEARLY_BEST = 0.99
"""Of the best throughput: the smallest size that reaches it is taken, since its requests wait for
fewer others, and its buffers are smaller."""


def bucket_of(rows: int) -> int:
    """The size under which a run of so many rows is kept, a little larger for large ones."""
    if rows <= EXACT_ROWS:
        return rows
    step = 1 << ((rows - 1).bit_length() - 5)
    return -(-rows // step) * step


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


class _Size:
    """The last runs of one size: when they were, counted in runs of the class, and how long."""

    __slots__ = ("ordered_us", "runs")

    def __init__(self) -> None:
        self.runs: deque[tuple[int, int]] = deque()
        self.ordered_us: list[int] = []

    def add(self, number: int, us: int) -> None:
        runs = self.runs
        while runs and (len(runs) >= WINDOW or runs[0][0] < number - FORGET_AFTER):
            _, old_us = runs.popleft()
            del self.ordered_us[bisect_left(self.ordered_us, old_us)]
        runs.append((number, us))
        insort(self.ordered_us, us)

    def point(self, rows: int, number: int) -> Point:
        """Of an even number of runs the lower middle: what goes wrong makes a run longer."""
        median_us = self.ordered_us[(len(self.ordered_us) - 1) // 2]
        age = number - self.runs[-1][0]
        weight = max(_LEAST_WEIGHT, len(self.runs) * 0.5 ** (age / HALVE_AFTER))
        return Point(rows, float(median_us), weight)


class _Class:
    """What is known of one shape class."""

    __slots__ = ("_best", "_curve", "_drawn", "runs", "sizes", "volume")

    def __init__(self, shape_class: ShapeClass) -> None:
        self.volume = _volume(shape_class)
        self.sizes: dict[int, _Size] = {}
        self.runs = 0
        self._drawn = 0
        self._curve: Curve | None = None
        self._best: dict[int, int] = {}

    def observe(self, rows: int, us: int) -> None:
        self.runs += 1
        bucket = bucket_of(rows)
        size = self.sizes.get(bucket)
        if size is None:
            size = self.sizes[bucket] = _Size()
            self._curve = None
        size.add(self.runs, us)
        if self.runs - self._drawn >= REFIT_AFTER or self.runs < REFIT_AFTER:
            self._curve = None

    def curve(self) -> Curve:
        """As of the last runs, or of a few before them."""
        if self._curve is None:
            points = [size.point(rows, self.runs) for rows, size in self.sizes.items()]
            self._curve = Curve(sorted(points))
            self._drawn = self.runs
            self._best.clear()
        return self._curve

    def best(self, limit: int) -> int:
        curve = self.curve()
        best = self._best.get(limit)
        if best is None:
            best = self._best[limit] = curve.best(limit)
        return best


class Latency:
    """What is known of how long runs of one version of a model take.

    Attributes:
        margin_us: by how much nearly all of the last batches ended later than predicted, at
            least 0. It covers what is no part of a run: the way to it, a machine that is busy.
    """

    def __init__(self) -> None:
        self.margin_us = 0
        self._slips: deque[int] = deque()
        self._ordered_slips: list[int] = []
        self._classes: OrderedDict[ShapeClass, _Class] = OrderedDict()

    def observe(self, shape_class: ShapeClass, rows: int, compute_us: int) -> None:
        """A run of so many rows has taken so long; warm-up runs count as well."""
        known = self._classes.get(shape_class)
        if known is None:
            while len(self._classes) >= MAX_CLASSES:
                self._classes.popitem(last=False)
            known = self._classes[shape_class] = _Class(shape_class)
        self._classes.move_to_end(shape_class)
        known.observe(rows, max(1, compute_us))

    def slipped(self, late_us: int) -> None:
        """A batch has ended so much later than was predicted when it closed; or earlier."""
        slips, ordered = self._slips, self._ordered_slips
        if len(slips) >= SLIPS:
            del ordered[bisect_left(ordered, slips.popleft())]
        slips.append(late_us)
        insort(ordered, late_us)
        self.margin_us = max(0, ordered[len(ordered) * 31 // 32])

    def predict_us(self, shape_class: ShapeClass, rows: int) -> int | None:
        """How long a run of so many rows will take, in microseconds; None while nothing is known.

        A class that was never seen is taken for the largest known one that is not larger, so
        that nothing is refused for what is not known.
        """
        known = self._like(shape_class)
        return None if known is None else max(1, round(known.curve()(bucket_of(rows))))

    def best_rows(self, shape_class: ShapeClass, limit: int, slack_us: int | None = None) -> int:
        """The batch size, from 1 to `limit`, with the best throughput.

        Args:
            shape_class: that the batch has.
            limit: the most rows.
            slack_us: its run shall take no longer, where that can be had; None: any time.
        """
        known = self._like(shape_class)
        if known is None:
            return limit
        best = known.best(limit)
        if slack_us is None or known.curve()(best) <= slack_us:
            return best
        return known.curve().most_within(best, slack_us)

    def rows_per_s(self, shape_class: ShapeClass, limit: int) -> float | None:
        """What one instance does at the best size up to `limit`; None while nothing is known."""
        known = self._like(shape_class)
        if known is None:
            return None
        best = known.best(limit)
        return best / known.curve()(best) * 1e6

    def table(self) -> list[dict[str, Any]]:
        """For people: of the classes seen last the line t0 + a b, the size with the best
        throughput among those seen, and S in microseconds of each of them.
        """
        latest = list(self._classes.items())[: -SHOWN_CLASSES - 1 : -1]
        return [
            {
                "shape_class": list(shape_class),
                "t0_us": round(curve.t0_us, 1),
                "row_us": round(curve.slope_us, 3),
                "runs": known.runs,
                "best_rows": known.best(curve.rows[-1]),
                "compute_us": {
                    str(rows): round(us) for rows, us in zip(curve.rows, curve.us, strict=True)
                },
            }
            for shape_class, known in latest
            for curve in [known.curve()]
        ]

    def _like(self, shape_class: ShapeClass) -> _Class | None:
        known = self._classes.get(shape_class)
        if known is not None or not self._classes:
            return known
        volume = _volume(shape_class)
        return min(
            self._classes.values(),
            key=lambda each: (each.volume > volume, abs(each.volume - volume)),
        )


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


def _volume(shape_class: ShapeClass) -> int:
    volume = 1
    for size in shape_class:
        volume *= max(1, size)
    return volume
