"""How long a run of a model takes, learned from its runs: S(b), by shape class and rows.

Of each batch size a class keeps its last runs, and takes their median, so that one run that was
held up changes nothing. A machine that others use as well is fast in one second and slow in the
next, and sizes are rarely run in the same second. So each run is kept as long as it would have
taken at one common slowness, for which the runs right before and after it are the measure: what
is compared of two sizes is how they did beside each other. A prediction is for the slowness of
the last runs, and follows a change within a few.

All of it is synchronous, and knows neither a clock nor I/O. One object belongs to one version of a
model; ingest, batcher and executor of a process share it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from headrace.models.curve import Curve, Point

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
NEIGHBOURS = 3
"""Runs before and as many after one that tell how slow the machine was during it. In simulated
minutes of magika on a machine whose speed changes by a fifth every two seconds, 97 % of the best
throughput was missed in 3 % of 200 seeds; without looking beside a run it was 66 %."""
MOST_SLOWNESS = 2.0
"""Above this, or below its inverse, what is kept is scaled: or else many small errors of the one
and of the other would take both out of all bounds."""


def bucket_of(rows: int) -> int:
    """The size under which a run of so many rows is kept, a little larger for large ones."""
    if rows <= EXACT_ROWS:
        return rows
    step = 1 << ((rows - 1).bit_length() - 5)
    return -(-rows // step) * step


class _Size:
    """The last runs of one size: when they were, counted in runs of the class, and how long."""

    __slots__ = ("ordered_us", "runs")

    def __init__(self) -> None:
        self.runs: deque[tuple[int, float]] = deque()
        self.ordered_us: list[float] = []

    def add(self, number: int, us: float) -> None:
        runs = self.runs
        while runs and (len(runs) >= WINDOW or runs[0][0] < number - FORGET_AFTER):
            _, old_us = runs.popleft()
            del self.ordered_us[bisect_left(self.ordered_us, old_us)]
        runs.append((number, us))
        insort(self.ordered_us, us)

    def scale(self, factor: float) -> None:
        """All runs have taken so many times as long."""
        self.runs = deque((number, us * factor) for number, us in self.runs)
        self.ordered_us = sorted(us for _, us in self.runs)

    def point(self, rows: int, number: int) -> Point:
        """Of an even number of runs the lower middle: what goes wrong makes a run longer."""
        median_us = self.ordered_us[(len(self.ordered_us) - 1) // 2]
        age = number - self.runs[-1][0]
        weight = max(_LEAST_WEIGHT, len(self.runs) * 0.5 ** (age / HALVE_AFTER))
        return Point(rows, median_us, weight)


class _Run(NamedTuple):
    """A run that has just been: how long it took, also over what is kept of its size.

    Attributes:
        slowness: 0 for the first of a size, which there was nothing to compare with.
    """

    bucket: int
    us: float
    slowness: float


class _Class:
    """What is known of one shape class.

    Attributes:
        slowness: how many times as long as is kept of them runs take at the moment.
    """

    __slots__ = ("_best", "_curve", "_drawn", "_last", "runs", "sizes", "slowness", "volume")

    def __init__(self, shape_class: ShapeClass) -> None:
        self.volume = _volume(shape_class)
        self.sizes: dict[int, _Size] = {}
        self.runs = 0
        self.slowness = 1.0
        self._last: deque[_Run] = deque(maxlen=2 * NEIGHBOURS + 1)
        self._drawn = 0
        self._curve: Curve | None = None
        self._best: dict[int, int] = {}

    def observe(self, rows: int, us: int) -> None:
        """The first run of a size is kept at once, and each other one with those after it."""
        self.runs += 1
        bucket = bucket_of(rows)
        if bucket in self.sizes:
            self._last.append(_Run(bucket, us, us / self.curve()(bucket)))
            self.slowness = _middle(run.slowness for run in self._last) or 1.0
        else:
            self._last.append(_Run(bucket, us, 0.0))
            self.sizes[bucket] = _Size()
            self.sizes[bucket].add(self.runs, us / self.slowness)
            self._curve = None
        self._keep()
        if self.runs - self._drawn >= REFIT_AFTER or self.runs < REFIT_AFTER:
            self._curve = None

    def _keep(self) -> None:
        """Keep the run that now has as many after it as before it."""
        last = self._last
        if len(last) < 2 * NEIGHBOURS + 1 or not last[NEIGHBOURS].slowness:
            return
        bucket, us, _ = last[NEIGHBOURS]
        beside = (run.slowness for place, run in enumerate(last) if place != NEIGHBOURS)
        self.sizes[bucket].add(self.runs, us / (_middle(beside) or self.slowness))

    def _rescale(self) -> None:
        """Keep all as it is at the moment, which changes no prediction."""
        factor, self.slowness = self.slowness, 1.0
        for size in self.sizes.values():
            size.scale(factor)
        for place, run in enumerate(self._last):
            self._last[place] = run._replace(slowness=run.slowness / factor)

    def predict_us(self, rows: int) -> float:
        """As slow as the machine is now."""
        return self.curve()(bucket_of(rows)) * self.slowness

    def curve(self) -> Curve:
        """Of what is kept, as of the last runs, or of a few before them."""
        if self._curve is None:
            if not 1 / MOST_SLOWNESS <= self.slowness <= MOST_SLOWNESS:
                self._rescale()
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
        return None if known is None else max(1, round(known.predict_us(rows)))

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
        if slack_us is None or known.predict_us(best) <= slack_us:
            return best
        return known.curve().most_within(best, slack_us / known.slowness)

    def rows_per_s(self, shape_class: ShapeClass, limit: int) -> float | None:
        """What one instance does at the best size up to `limit`; None while nothing is known."""
        known = self._like(shape_class)
        if known is None:
            return None
        best = known.best(limit)
        return best / known.predict_us(best) * 1e6

    def table(self) -> list[dict[str, Any]]:
        """For people: of the classes seen last the line t0 + a b, the size with the best
        throughput among those seen, and S in microseconds of each of them.
        """
        latest = list(self._classes.items())[: -SHOWN_CLASSES - 1 : -1]
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
    """Their median, without those that are 0; 0 where that leaves none.

    Of an even number it is the geometric mean of the middle two, as befits factors.
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
