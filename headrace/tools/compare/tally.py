"""Totals over all requests: counts, extremes and means of the differences, and latencies. Pure.

One number per request and float output is kept for the plots, but no arrays.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.tools.compare.differences import (
    OK,
    AnswerDifference,
    ArrayDifference,
    TimedAnswer,
    is_float,
    resolution,
)

# --- latencies -----------------------------------------------------------------------------------


KINDS = ("queue", "compute", "end_to_end")
"""Kinds of latency: waiting for a batch, the model's run, and from request to answer."""


class Distribution(NamedTuple):
    """Distribution of one kind of latency, in microseconds."""

    answers: int
    mean_us: float
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float


class Latencies:
    """All latencies of one side, for the requests that it answered with outputs."""

    def __init__(self) -> None:
        self._values = {kind: array("q") for kind in KINDS}

    def add(self, answer: TimedAnswer) -> None:
        """Add one answer's timings."""
        if answer.code != OK:
            return
        times = (answer.queue_us, answer.compute_us, answer.end_to_end_us)
        for kind, value in zip(KINDS, times, strict=True):
            if value is not None:
                self._values[kind].append(value)

    def values_us(self, kind: str) -> array[int]:
        """Return the values of one kind, in the order of the answers."""
        return self._values[kind]

    def distribution(self, kind: str) -> Distribution | None:
        """Return the distribution of one kind; None if there are no values."""
        values = np.asarray(self._values[kind], dtype=np.int64)
        if not values.size:
            return None
        p50, p90, p99 = (float(each) for each in np.percentile(values, (50, 90, 99)))
        return Distribution(values.size, float(values.mean()), p50, p90, p99, float(values.max()))


def ratio_of_medians(other: Distribution | None, reference: Distribution | None) -> float | None:
    """Return the ratio; a median below 1 µs counts as 1 µs. None without values."""
    if other is None or reference is None:
        return None
    return max(other.p50_us, 1.0) / max(reference.p50_us, 1.0)


# --- differences ---------------------------------------------------------------------------------


WORST_KEPT = 10


class OutputTally:
    """One output over all requests that both sides answered.

    Attributes:
        count: number of pairs; `exact` of them are equal, `comparable` are floats of one shape,
            `mismatched` are neither.
        max_abs, mean_abs, cosine_min, cosine_mean: over the comparable pairs; a mean weighs all
            requests equally.
        top1, topk: the mean share, see `ArrayDifference`; None if undefined.
        scale: the largest absolute value of the references.
        resolution: of the dtype; 0 for non-floats.
        largest: the largest difference of each comparable pair.
    """

    def __init__(self) -> None:
        self.count = self.exact = self.comparable = self.mismatched = 0
        self.max_abs = self.scale = self.resolution = 0.0
        self.cosine_min = 1.0
        self.largest = array("d")
        self._abs_sum = self._cosine_sum = self._top1_sum = self._topk_sum = 0.0
        self._ranked = 0

    def add(self, difference: ArrayDifference, dtype: np.dtype[Any] | None) -> None:
        """Count one pair; `dtype` is the reference's."""
        self.count += 1
        self.exact += difference.exact
        if not difference.comparable:
            self.mismatched += not difference.exact
            return
        self.comparable += 1
        self.max_abs = max(self.max_abs, difference.max_abs)
        self.scale = max(self.scale, difference.scale)
        self.cosine_min = min(self.cosine_min, difference.cosine)
        self._abs_sum += difference.mean_abs
        self._cosine_sum += difference.cosine
        self.largest.append(difference.max_abs)
        if dtype is not None and is_float(dtype):
            self.resolution = max(self.resolution, resolution(dtype))
        if difference.top1 is not None and difference.topk is not None:
            self._ranked += 1
            self._top1_sum += difference.top1
            self._topk_sum += difference.topk

    @property
    def mismatched_share(self) -> float:
        """Share of pairs that differ without a numeric distance: labels, texts, other shapes."""
        return self.mismatched / self.count if self.count else 0.0

    @property
    def mean_abs(self) -> float:
        return self._abs_sum / self.comparable if self.comparable else 0.0

    @property
    def cosine_mean(self) -> float:
        return self._cosine_sum / self.comparable if self.comparable else 1.0

    @property
    def top1(self) -> float | None:
        return self._top1_sum / self._ranked if self._ranked else None

    @property
    def topk(self) -> float | None:
        return self._topk_sum / self._ranked if self._ranked else None


class PairTally:
    """One side against the reference, over all requests.

    Attributes:
        count: number of requests; `exact` of them without any difference.
        codes: counts of (the reference's code, this side's code), equal ones included.
        outputs: by name.
    """

    def __init__(self) -> None:
        self.count = self.exact = 0
        self.codes: Counter[tuple[str, str]] = Counter()
        self.outputs: dict[str, OutputTally] = {}

    def add(self, difference: AnswerDifference, reference: TimedAnswer) -> None:
        """Count one request."""
        self.count += 1
        self.exact += difference.exact
        self.codes[difference.codes] += 1
        for name, each in difference.outputs.items():
            output = reference.outputs.get(name)
            dtype = None if output is None else output.dtype
            self.outputs.setdefault(name, OutputTally()).add(each, dtype)

    @property
    def code_changes(self) -> dict[tuple[str, str], int]:
        """Return the pairs of different codes with their counts."""
        return {codes: count for codes, count in self.codes.items() if codes[0] != codes[1]}

    @property
    def changed_share(self) -> float:
        """Share of requests that ended with another code."""
        return sum(self.code_changes.values()) / self.count if self.count else 0.0

    @property
    def compared(self) -> int:
        """Number of requests that both sides answered with outputs."""
        return self.codes[OK, OK]

    @property
    def reference_ok(self) -> int:
        """Number of requests that the reference answered with outputs."""
        return sum(count for codes, count in self.codes.items() if codes[0] == OK)


class WorstCase(NamedTuple):
    """One of the requests whose answers differ most."""

    topic: str
    partition: int
    offset: int
    model: str
    difference: AnswerDifference
    reference: TimedAnswer
    other: TimedAnswer


class WorstCases:
    """The few requests whose answers differ most, in bounded memory."""

    def __init__(self, kept: int = WORST_KEPT) -> None:
        self._kept = kept
        self._heap: list[tuple[tuple[int, float], int, WorstCase]] = []
        self._numbers = itertools.count()

    def add(self, case: WorstCase) -> None:
        """Keep a case if it is one of the worst; a case without difference is ignored."""
        if case.difference.exact:
            return
        # Of two equally bad cases, the earlier one stays.
        entry = (case.difference.badness, -next(self._numbers), case)
        if len(self._heap) < self._kept:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    def sorted(self) -> Sequence[WorstCase]:
        """Return the cases, worst first."""
        return [case for _, _, case in sorted(self._heap, key=lambda entry: entry[:2])[::-1]]
