"""Prometheus metrics of one process.

Counters and gauges are the Prometheus client's. Histograms that see every request are our own
accumulators, filled a chunk at a time and read at a scrape: an observation must not cost a lock.

Labels are bounded: models and versions are the repository's, codes and reasons are fixed sets.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from headrace.messages import Batch, Request

_SECONDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
    *(0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class BulkHistogram(Collector):
    """A histogram without a lock, filled from one thread; `bounds` are upper, in its unit."""

    def __init__(self, name: str, documentation: str, label: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._label = label
        self._bounds = tuple(bounds)
        self._series: dict[str, tuple[list[int], list[float]]] = {}

    def observe(self, label: str, values: Iterable[float]) -> None:
        """Add observations to the series of a label value."""
        series = self._series.get(label)
        if series is None:
            series = self._series[label] = ([0] * (len(self._bounds) + 1), [0.0])
        counts, total = series
        bounds = self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total[0] += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Called by a scrape."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=[self._label])
        for label, (counts, total) in list(self._series.items()):
            cumulated = 0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
                cumulated += count
                buckets.append(("+Inf" if bound == float("inf") else repr(bound), cumulated))
            family.add_metric([label], buckets, total[0])
        yield family


class Metrics:
    """Everything that a process counts; one object, handed to those who count.

    Args:
        registry: where they are registered; a process has one, a test makes its own.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._answer_children: dict[tuple[str, str, str], Counter] = {}
        self._register_requests()
        self._register_ends()
        self._register_reading()

    def _register_requests(self) -> None:
        self._answers = self._counter(
            "answers", "Answers acknowledged, by outcome.", "model", "version", "code"
        )
        self._end_to_end = self._bulk(
            "end_to_end_seconds", "From the request record's timestamp to its answer.", _SECONDS
        )
        self._queue = self._bulk(
            "queue_seconds", "From ingest to the closing of the batch.", _SECONDS
        )
        self._compute = self._bulk("compute_seconds", "One run of a model.", _SECONDS)
        self._batch_rows = self._bulk("batch_rows", "Rows in a batch.", _ROWS)
        self._batches = self._counter(
            "batches", "Batches formed, by why they closed.", "model", "reason"
        )

    def _register_ends(self) -> None:
        self._dead_letters = self._counter("dead_letters", "Requests kept as dead letters.", "code")
        self.duplicates = self._counter("duplicates", "Results whose request was answered already.")
        self.void = self._counter("void", "Requests dropped because their partition was revoked.")
        self.bisections = self._counter("bisections", "Batches that failed and were halved.")
        self.unkept = self._counter(
            "unkept_dead_letters", "Dead letters too large for their topic."
        )
        self.unanswered = self._counter(
            "unanswered", "Requests whose answer topic takes not even an error record."
        )

    def _register_reading(self) -> None:
        self._in_flight_bytes = self._gauge("in_flight_bytes", "Bytes of requests in flight.")
        self._budget_bytes = self._gauge("in_flight_limit_bytes", "The budget for bytes in flight.")
        self._paused = self._gauge("paused", "1 while reading is paused.")
        self._assigned = self._gauge("assigned_partitions", "Partitions that are ours now.")
        self._rebalances = self._counter("rebalances", "Assignments received.")
        self._commit_seconds = Histogram(
            "headrace_commit_seconds",
            "How long a commit took, failed ones included.",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"headrace_{name}", documentation, labels, registry=self.registry)

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(f"headrace_{name}", documentation, registry=self.registry)

    def _bulk(self, name: str, documentation: str, bounds: Sequence[float]) -> BulkHistogram:
        histogram = BulkHistogram(f"headrace_{name}", documentation, "model", bounds)
        self.registry.register(histogram)
        return histogram

    def answered(self, requests: Sequence[Request], now_us: int) -> None:
        """These requests' answers are acknowledged."""
        per_outcome: dict[tuple[str, str, str], int] = {}
        latencies: dict[str, list[float]] = {}
        for request in requests:
            failure = request.failure
            # A version stands there only once the request was bound to a model that exists.
            model = request.model if request.version else ""
            outcome = (model, request.version, "ok" if failure is None else failure.code)
            per_outcome[outcome] = per_outcome.get(outcome, 0) + 1
            elapsed_s = (now_us - request.timestamp_ms * 1000) / 1e6
            latencies.setdefault(model, []).append(max(0.0, elapsed_s))
        for outcome, count in per_outcome.items():
            child = self._answer_children.get(outcome)
            if child is None:
                child = self._answer_children[outcome] = self._answers.labels(*outcome)
            child.inc(count)
        for model, values in latencies.items():
            self._end_to_end.observe(model, values)

    def formed(self, batch: Batch, now_us: int) -> None:
        """A batch has closed."""
        self._batches.labels(batch.model, batch.reason).inc()
        self._batch_rows.observe(batch.model, (batch.rows,))
        self._queue.observe(
            batch.model,
            [max(0, now_us - request.ingested_us) / 1e6 for request in batch.requests],
        )

    def computed(self, model: str, seconds: float) -> None:
        """A model has run."""
        self._compute.observe(model, (seconds,))

    def dead_letter(self, code: str) -> None:
        """A dead letter was kept."""
        self._dead_letters.labels(code).inc()

    def in_flight(self, used_bytes: int, limit_bytes: int, *, paused: bool) -> None:
        """What is in flight now, of what may be."""
        self._in_flight_bytes.set(used_bytes)
        self._budget_bytes.set(limit_bytes)
        self._paused.set(paused)

    def rebalanced(self, partitions: int) -> None:
        """The group has assigned partitions."""
        self._rebalances.inc()
        self._assigned.set(partitions)

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Time a commit."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._commit_seconds.observe(time.monotonic() - began_s)
