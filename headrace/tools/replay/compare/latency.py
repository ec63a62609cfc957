"""Latency distributions of answers, in microseconds. Pure."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from headrace.tools.replay.compare.answers import OK, Measured

KINDS = ("queue", "compute", "end_to_end")
"""Waiting for a batch; the model's run; from request to answer."""


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

    def add(self, answer: Measured) -> None:
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
