"""Run durations of a model, learned from its runs: S(b), by shape class and rows.

For each batch size a class keeps the last runs and uses their median, so that a single delayed run
changes nothing. A shared machine is fast in one second and slow in the next, and different sizes
are rarely run in the same second. So each duration is normalized to a common slowness, which is
measured by the runs right before and after it; sizes are thus compared under equal conditions. A
prediction assumes the slowness of the last runs, and follows a change within a few runs.

Everything is synchronous, without clock and I/O. One object belongs to one model version; ingest,
batcher and executor of a process share it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from headrace.models.profiling.curve import Curve, Point
from headrace.tuning import TUNING, ModelTuning

ShapeClass = tuple[int, ...]


def bucket_of(rows: int, exact_rows: int) -> int:
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
        slowness: 0 for the first run of a size, which cannot be compared with anything.
    """

    bucket: int
    us: float
    slowness: float


class _Class:
    """Learned durations of one shape class.

    Attributes:
        slowness: ratio of current durations to the stored, normalized ones.
    """

    __slots__ = (
        "_best",
        "_curve",
        "_drawn",
        "_last",
        "_tuning",
        "runs",
        "sizes",
        "slowness",
        "volume",
    )

    def __init__(self, shape_class: ShapeClass, tuning: ModelTuning) -> None:
        self._tuning = tuning
        self.volume = _volume(shape_class)
        self.sizes: dict[int, _Size] = {}
        self.runs = 0
        self.slowness = 1.0
        self._last: deque[_Run] = deque(maxlen=2 * tuning.neighbour_runs + 1)
        self._drawn = 0
        self._curve: Curve | None = None
        self._best: dict[int, int] = {}

    def observe(self, rows: int, us: int) -> None:
        """Record a run. The first of a size is stored at once, others after their successors."""
        self.runs += 1
        bucket = bucket_of(rows, self._tuning.exact_rows)
        if bucket in self.sizes:
            self._last.append(_Run(bucket, us, us / self.curve()(bucket)))
            self.slowness = _middle(run.slowness for run in self._last) or 1.0
        else:
            self._last.append(_Run(bucket, us, 0.0))
            self.sizes[bucket] = _Size(self._tuning)
            self.sizes[bucket].add(self.runs, us / self.slowness)
            self._curve = None
        self._keep()
        refit_after_runs = self._tuning.refit_after_runs
        if self.runs - self._drawn >= refit_after_runs or self.runs < refit_after_runs:
            self._curve = None

    def _keep(self) -> None:
        """Store the middle one of the last runs, normalized by the runs around it."""
        last, middle = self._last, self._tuning.neighbour_runs
        if len(last) < 2 * middle + 1 or not last[middle].slowness:
            return
        bucket, us, _ = last[middle]
        beside = (run.slowness for place, run in enumerate(last) if place != middle)
        self.sizes[bucket].add(self.runs, us / (_middle(beside) or self.slowness))

    def _rescale(self) -> None:
        """Fold the current slowness into the stored durations; predictions do not change."""
        factor, self.slowness = self.slowness, 1.0
        for size in self.sizes.values():
            size.scale(factor)
        for place, run in enumerate(self._last):
            self._last[place] = run._replace(slowness=run.slowness / factor)

    def predict_us(self, rows: int) -> float:
        """Return the predicted duration at the current slowness."""
        return self.curve()(bucket_of(rows, self._tuning.exact_rows)) * self.slowness

    def curve(self) -> Curve:
        """Return the curve of the stored durations; it may lag by a few runs."""
        if self._curve is None:
            max_slowness = self._tuning.max_slowness
            if not 1 / max_slowness <= self.slowness <= max_slowness:
                self._rescale()
            points = [size.point(rows, self.runs) for rows, size in self.sizes.items()]
            self._curve = Curve(sorted(points), self._tuning)
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
        self._slips: deque[int] = deque()
        self._ordered_slips: list[int] = []
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

    def slipped(self, late_us: int) -> None:
        """Record by how much a batch ended later than predicted when it closed; may be negative."""
        slips, ordered = self._slips, self._ordered_slips
        if len(slips) >= self._tuning.margin_batches:
            del ordered[bisect_left(ordered, slips.popleft())]
        slips.append(late_us)
        insort(ordered, late_us)
        self.margin_us = max(0, ordered[int(len(ordered) * self._tuning.margin_quantile)])

    def predict_us(self, shape_class: ShapeClass, rows: int) -> int | None:
        """Predict the duration of a run in microseconds; None as long as no run is known.

        For an unknown class, the largest known class that is not larger is used, so that nothing is
        refused for lack of data.
        """
        known = self._like(shape_class)
        return None if known is None else max(1, round(known.predict_us(rows)))

    def best_rows(self, shape_class: ShapeClass, limit: int, slack_us: int | None = None) -> int:
        """Return the batch size, from 1 to `limit`, with the best throughput.

        Args:
            shape_class: of the batch.
            limit: maximum number of rows.
            slack_us: limit of the run's duration, kept if possible; None: no limit.
        """
        known = self._like(shape_class)
        if known is None:
            return limit
        best = known.best(limit)
        if slack_us is None or known.predict_us(best) <= slack_us:
            return best
        return known.curve().most_within(best, slack_us / known.slowness)

    def rows_per_s(self, shape_class: ShapeClass, limit: int) -> float | None:
        """Return one instance's throughput at its best size up to `limit`; None if unknown."""
        known = self._like(shape_class)
        if known is None:
            return None
        best = known.best(limit)
        return best / known.predict_us(best) * 1e6

    def table(self) -> list[dict[str, Any]]:
        """Return a table for display: for each of the most recent classes the line t0 + a b, the
        known size with the best throughput, and S in microseconds for each known size.
        """
        latest = list(self._classes.items())[: -self._tuning.shown_shape_classes - 1 : -1]
        return [
            {
                "shape_class": list(shape_class),
                "t0_us": round(curve.t0_us * known.slowness, 1),
                "row_us": round(curve.slope_us * known.slowness, 3),
                "runs": known.runs,
                "best_rows": known.best(curve.rows[-1]),
                "compute_us": {
                    str(rows): round(us * known.slowness)
                    for rows, us in zip(curve.rows, curve.us, strict=True)
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


def _middle(slownesses: Iterable[float]) -> float:
    """Return the median of the non-zero values; 0 if there are none.

    For an even number it is the geometric mean of the middle two, since the values are factors.
    """
    known = sorted(slowness for slowness in slownesses if slowness)
    if not known:
        return 0.0
    half, is_odd = divmod(len(known), 2)
    return known[half] if is_odd else math.sqrt(known[half - 1] * known[half])


def _volume(shape_class: ShapeClass) -> int:
    volume = 1
    for size in shape_class:
        volume *= max(1, size)
    return volume
