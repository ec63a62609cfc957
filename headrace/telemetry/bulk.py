"""Counters and histograms for the hot path: no lock, and many events in one call.

The Prometheus client's own take a lock for every event. These are filled from one thread, the event
loop's, with the count of each value; scrapes read them on the event loop as well.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, Exemplar, HistogramMetricFamily
from prometheus_client.registry import Collector

from headrace.telemetry.catalogue import Spec


def _nothing() -> None:
    pass


class BatchedCounter(Collector):
    """A counter that is incremented in bulk, from one thread.

    Attributes:
        counts: by label values.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.counts: dict[tuple[str, ...], int] = {}

    def add(self, labels: tuple[str, ...], times: int = 1) -> None:
        """Increment by `times`."""
        self.counts[labels] = self.counts.get(labels, 0) + times

    def totals(self) -> list[dict[str, Any]]:
        """Return one entry for each series, for `/status`."""
        names = self._spec.labels
        return [
            {**dict(zip(names, labels, strict=True)), "count": count}
            for labels, count in self.counts.items()
        ]

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Called at registration."""
        yield self._family()

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Called by a scrape."""
        family = self._family()
        for labels, count in self.counts.items():
            family.add_metric(labels, count)
        yield family

    def _family(self) -> CounterMetricFamily:
        spec = self._spec
        return CounterMetricFamily(spec.name, spec.meaning, labels=spec.labels)


class _Series:
    __slots__ = ("counts", "exemplars", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.exemplars: dict[int, Exemplar] = {}
        self.total = 0.0


class BatchedHistogram(Collector):
    """A histogram that is filled in bulk, from one thread.

    Args:
        spec: its name, labels and meaning.
        bounds: upper bounds of the buckets, inclusive, in the histogram's unit.
    """

    def __init__(self, spec: Spec, bounds: Sequence[float]) -> None:
        self._spec = spec
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], _Series] = {}
        self._before_reading: Callable[[], None] = _nothing

    def before_reading(self, fill: Callable[[], None]) -> None:
        """Call `fill` before every read of the histogram, to add values that are still buffered."""
        self._before_reading = fill

    def observe(self, labels: tuple[str, ...], value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        series = self._series.get(labels) or self._add(labels)
        series.counts[bisect_left(self._bounds, value)] += times
        series.total += value * times

    def observe_all(self, labels: tuple[str, ...], values: NDArray[np.float64]) -> None:
        """Count each of many values once."""
        if not len(values):
            return
        series = self._series.get(labels) or self._add(labels)
        places = np.searchsorted(self._bounds, values, side="left")
        for place, count in enumerate(np.bincount(places).tolist()):
            series.counts[place] += count
        series.total += float(values.sum())

    def show(self, labels: tuple[str, ...], value: float, trace_id: str, at_s: float) -> None:
        """Keep a value that was counted as the exemplar of its bucket.

        Args:
            labels: as for `observe`.
            value: as for `observe`.
            trace_id: a trace that shows how the value came about.
            at_s: its time, in seconds since the epoch.
        """
        series = self._series.get(labels) or self._add(labels)
        exemplar = Exemplar({"trace_id": trace_id}, value, at_s)
        series.exemplars[bisect_left(self._bounds, value)] = exemplar

    def totals(self) -> list[dict[str, Any]]:
        """Return count and sum of every series, for `/status`."""
        self._before_reading()
        names = self._spec.labels
        return [
            {
                **dict(zip(names, labels, strict=True)),
                "count": sum(series.counts),
                self._spec.unit: series.total,
            }
            for labels, series in self._series.items()
        ]

    def _add(self, labels: tuple[str, ...]) -> _Series:
        series = self._series[labels] = _Series(len(self._bounds) + 1)
        return series

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """Called at registration."""
        yield self._family()

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Called by a scrape."""
        self._before_reading()
        family = self._family()
        for labels, series in self._series.items():
            cumulated = 0
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            for place, (bound, count) in enumerate(
                zip((*self._bounds, inf), series.counts, strict=True)
            ):
                cumulated += count
                name = "+Inf" if bound == inf else repr(bound)
                exemplar = series.exemplars.get(place)
                buckets.append(
                    (name, cumulated) if exemplar is None else (name, cumulated, exemplar)
                )
            family.add_metric(labels, buckets, series.total)
        yield family

    def _family(self) -> HistogramMetricFamily:
        spec = self._spec
        return HistogramMetricFamily(spec.name, spec.meaning, labels=spec.labels, unit=spec.unit)
