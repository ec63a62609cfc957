"""Run durations of a model, learned from its runs: S(b), by shape class and rows.

For each batch size a class keeps the last runs and uses their median, so that a single delayed run
changes nothing. A shared machine is fast in one second and slow in the next, and different sizes
are rarely run in the same second. So each duration is normalized to a common slowdown, which is
measured by the runs right before and after it; sizes are thus compared under equal conditions. A
prediction assumes the slowdown of the last runs, and follows a change within a few runs.

S(b) is interpolated from the sizes that have run. Their durations are made monotone by weighted
isotonic regression (pool adjacent violators; Barlow et al., 1972), since a batch of more rows is
not faster. S is linear between known sizes, and continues outside of them with the slope of the
least-squares line S(b) = t0 + a b.

Everything is synchronous, without clock and I/O. One object belongs to one model version; ingest,
batcher and executor of a process share it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

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


ShapeClass = tuple[int, ...]


def round_up_rows(rows: int, exact_rows: int) -> int:
    """Return the size under which a run of `rows` rows is stored; large ones are rounded up."""
    if rows <= exact_rows:
        return rows
    step = 1 << ((rows - 1).bit_length() - 5)
    return -(-rows // step) * step


class _Size:
    """Last runs of one size: their numbers within the class, and their durations."""

    __slots__ = ("_tuning", "ordered_us", "runs")

    def __init__(self, tuning: ModelTuning) -> None:
        self._tuning = tuning
        self.runs: deque[tuple[int, float]] = deque()
        self.ordered_us: list[float] = []

    def add(self, number: int, us: float) -> None:
        runs, oldest = self.runs, number - self._tuning.forget_after_runs
        while runs and (len(runs) >= self._tuning.window_runs or runs[0][0] < oldest):
            _, old_us = runs.popleft()
            del self.ordered_us[bisect_left(self.ordered_us, old_us)]
        runs.append((number, us))
        insort(self.ordered_us, us)

    def scale(self, factor: float) -> None:
        """Multiply all durations by `factor`."""
        self.runs = deque((number, us * factor) for number, us in self.runs)
        self.ordered_us = sorted(us for _, us in self.runs)

    def point(self, rows: int, number: int) -> Point:
        """Return the lower median and its weight: outliers are slow runs, never fast ones."""
        median_us = self.ordered_us[(len(self.ordered_us) - 1) // 2]
        age = number - self.runs[-1][0]
        weight = len(self.runs) * 0.5 ** (age / self._tuning.weight_half_life_runs)
        weight = max(self._tuning.least_weight, weight)
        return Point(rows, median_us, weight)


class _Run(NamedTuple):
    """A recent run: its duration, absolute and relative to the curve.

    Attributes:
        slowdown: 0 for the first run of a size, which cannot be compared with anything.
    """

    bucket: int
    us: float
    slowdown: float


class _Class:
    """Learned durations of one shape class.

    Attributes:
        slowdown: ratio of current durations to the stored, normalized ones.
    """

    __slots__ = (
        "_best",
        "_curve",
        "_drawn",
        "_last",
        "_tuning",
        "runs",
        "sizes",
        "slowdown",
        "volume",
    )

    def __init__(self, shape_class: ShapeClass, tuning: ModelTuning) -> None:
        self._tuning = tuning
        self.volume = _class_volume(shape_class)
        self.sizes: dict[int, _Size] = {}
        self.runs = 0
        self.slowdown = 1.0
        self._last: deque[_Run] = deque(maxlen=2 * tuning.neighbour_runs + 1)
        self._drawn = 0
        self._curve: Curve | None = None
        self._best: dict[int, int] = {}

    def observe(self, rows: int, us: int) -> None:
        """Record a run. The first of a size is stored at once, others after their successors."""
        self.runs += 1
        bucket = round_up_rows(rows, self._tuning.exact_rows)
        size = self.sizes.get(bucket)
        slowdown = 0.0 if size is None else us / (self._curve or self.curve())(bucket)
        self._last.append(_Run(bucket, us, slowdown))
        slowdowns = [run.slowdown for run in self._last]
        if size is None:
            size = self.sizes[bucket] = _Size(self._tuning)
            size.add(self.runs, us / self.slowdown)
            self._curve = None
        else:
            self.slowdown = _median_slowdown(slowdowns) or 1.0
        self._store_middle_run(slowdowns)
        refit_after_runs = self._tuning.refit_after_runs
        if self.runs - self._drawn >= refit_after_runs or self.runs < refit_after_runs:
            self._curve = None

    def _store_middle_run(self, slowdowns: Sequence[float]) -> None:
        """Store the middle one of the last runs, normalized by the slowdowns of the others."""
        last, middle = self._last, self._tuning.neighbour_runs
        if len(last) < 2 * middle + 1 or not last[middle].slowdown:
            return
        bucket, us, _ = last[middle]
        beside = [*slowdowns[:middle], *slowdowns[middle + 1 :]]
        self.sizes[bucket].add(self.runs, us / (_median_slowdown(beside) or self.slowdown))

    def _rescale(self) -> None:
        """Fold the current slowdown into the stored durations; predictions do not change."""
        factor, self.slowdown = self.slowdown, 1.0
        for size in self.sizes.values():
            size.scale(factor)
        for place, run in enumerate(self._last):
            self._last[place] = run._replace(slowdown=run.slowdown / factor)

    def predict_us(self, rows: int) -> float:
        """Return the predicted duration at the current slowdown."""
        curve = self._curve or self.curve()
        return curve(round_up_rows(rows, self._tuning.exact_rows)) * self.slowdown

    def curve(self) -> Curve:
        """Return the curve of the stored durations; it may lag by a few runs."""
        if self._curve is None:
            max_slowdown = self._tuning.max_slowdown
            if not 1 / max_slowdown <= self.slowdown <= max_slowdown:
                self._rescale()
            points = [size.point(rows, self.runs) for rows, size in self.sizes.items()]
            self._curve = Curve(sorted(points), self._tuning)
            self._drawn = self.runs
            self._best.clear()
        return self._curve

    def best(self, limit: int) -> int:
        curve = self._curve or self.curve()
        best = self._best.get(limit)
        if best is None:
            best = self._best[limit] = curve.best(limit)
        return best


class Latency:
    """Learned run durations of one model version.

    Args:
        tuning: sizes of the windows and caches.

    Attributes:
        margin_us: by how much nearly all of the last batches ended later than predicted, at least
            0. It covers what is not part of a run: dispatch, and a busy machine.
    """

    def __init__(self, tuning: ModelTuning = TUNING.models) -> None:
        self._tuning = tuning
        self.margin_us = 0
        self._lateness_us: deque[int] = deque()
        self._ordered_lateness_us: list[int] = []
        self._classes: OrderedDict[ShapeClass, _Class] = OrderedDict()

    def observe(self, shape_class: ShapeClass, rows: int, compute_us: int) -> None:
        """Record the duration of a run; warm-up runs count as well."""
        known = self._classes.get(shape_class)
        if known is None:
            while len(self._classes) >= self._tuning.shape_classes:
                self._classes.popitem(last=False)
            known = self._classes[shape_class] = _Class(shape_class, self._tuning)
        self._classes.move_to_end(shape_class)
        known.observe(rows, max(1, compute_us))

    def observe_lateness(self, late_us: int) -> None:
        """Record by how much a batch ended later than predicted when it closed; may be negative."""
        lateness_us, ordered = self._lateness_us, self._ordered_lateness_us
        if len(lateness_us) >= self._tuning.margin_batches:
            del ordered[bisect_left(ordered, lateness_us.popleft())]
        lateness_us.append(late_us)
        insort(ordered, late_us)
        self.margin_us = max(0, ordered[int(len(ordered) * self._tuning.margin_quantile)])

    def predict_us(self, shape_class: ShapeClass, rows: int) -> int | None:
        """Predict the duration of a run in microseconds; None as long as no run is known.

        For an unknown class, the largest known class that is not larger is used, so that nothing is
        refused for lack of data.
        """
        known = self._classes.get(shape_class) or self._closest_class(shape_class)
        return None if known is None else max(1, round(known.predict_us(rows)))

    def best_rows(self, shape_class: ShapeClass, limit: int, slack_us: int | None = None) -> int:
        """Return the batch size, from 1 to `limit`, with the best throughput.

        Args:
            shape_class: shape class of the batch.
            limit: maximum number of rows.
            slack_us: limit of the run's duration, kept if possible; None: no limit.
        """
        known = self._classes.get(shape_class) or self._closest_class(shape_class)
        if known is None:
            return limit
        best = known.best(limit)
        if slack_us is None or known.predict_us(best) <= slack_us:
            return best
        return known.curve().most_within(best, slack_us / known.slowdown)

    def table(self) -> list[dict[str, Any]]:
        """Return a table for display: for each of the most recent classes the line t0 + a b, the
        known size with the best throughput, and S in microseconds for each known size.
        """
        latest = list(self._classes.items())[: -self._tuning.shown_shape_classes - 1 : -1]
        return [
            {
                "shape_class": list(shape_class),
                "t0_us": round(curve.t0_us * known.slowdown, 1),
                "row_us": round(curve.slope_us * known.slowdown, 3),
                "runs": known.runs,
                "best_rows": known.best(curve.rows[-1]),
                "compute_us": {
                    str(rows): round(us * known.slowdown)
                    for rows, us in zip(curve.rows, curve.us, strict=True)
                },
            }
            for shape_class, known in latest
            for curve in [known.curve()]
        ]

    def _closest_class(self, shape_class: ShapeClass) -> _Class | None:
        known = self._classes.get(shape_class)
        if known is not None or not self._classes:
            return known
        volume = _class_volume(shape_class)
        return min(
            self._classes.values(),
            key=lambda each: (each.volume > volume, abs(each.volume - volume)),
        )


def _median_slowdown(slowdowns: Sequence[float]) -> float:
    """Return the median of the non-zero values; 0 if there are none.

    For an even number it is the geometric mean of the middle two, since the values are factors.
    """
    known = sorted(filter(None, slowdowns))
    if not known:
        return 0.0
    half, is_odd = divmod(len(known), 2)
    return known[half] if is_odd else math.sqrt(known[half - 1] * known[half])


def _class_volume(shape_class: ShapeClass) -> int:
    volume = 1
    for size in shape_class:
        volume *= max(1, size)
    return volume
