"""The counters of a process, as methods named by what happened.

The names, types and labels are in `headrace.telemetry.metric_specs`. Events of every request or
batch are counted in bulk, a chunk at a time; rare ones use the Prometheus client. Gauges are not
kept here: they are read from their sources at each scrape, see `headrace.telemetry.status`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, Exemplar, HistogramMetricFamily
from prometheus_client.registry import Collector

from headrace.access.tls import Certificates
from headrace.errors import Code, Retriable
from headrace.log.errors import Fenced
from headrace.log.port import Gap
from headrace.protocol.messages import Batch, Request
from headrace.telemetry.metric_specs import METRIC_SPECS, ROWS, SECONDS, MetricSpec
from headrace.tuning import TUNING, RuntimeTuning

VersionKey: TypeAlias = tuple[str, str]
"""A model's name and version: the first two labels of all metrics that are counted by version."""

_FAILED = frozenset({Code.MODEL_FAILED, Code.INTERNAL})

_TIMES = (
    *("request_duration", "log_wait", "queue_wait", "batch_wait"),
    *("copy_duration", "compute_duration", "answer_duration"),
)


def outcome_of(code: str) -> str:
    """Return the outcome that a code belongs to: `ok`, `expired`, `refused` or `failed`."""
    if code == "ok":
        return "ok"
    if code == Code.DEADLINE_EXCEEDED:
        return "expired"
    return "failed" if code in _FAILED else "refused"


class Metrics:
    """All counters of a process; one object, passed to all components that count.

    Args:
        registry: the registry of the counters; one for a process, and one for each test.
        tuning: tuning values.

    Attributes:
        duplicates, revoked, bisections, dead_letters_dropped, unanswered, skipped, heap_trimmed:
            counters without labels.
        rebound: likewise, of requests that were bound to another version.
        source_values: by outcome, see `headrace.transport.source_values`; source_value_bytes.
        shared_values: by outcome, see `headrace.transport.shared_values`; shared_values_bytes.
        isolated_crashes, poisoned, transaction_timeouts: likewise.
        quarantined, known_executors: gauges.
        trace_spans, trace_spans_dropped, trace_links_dropped, trace_export_failures: likewise.
        traces_rate_limited: by `sampled_by`, see `headrace.telemetry.tracing`.
        loop_lag: see `headrace.telemetry.watchdog`.
    """

    def __init__(self, registry: CollectorRegistry, tuning: RuntimeTuning = TUNING.runtime) -> None:
        self.registry = registry
        self._requests = self._bulk_counter("requests")
        self._batches = self._bulk_counter("batches")
        self._runs = self._bulk_counter("runs")
        self._rows = self._bulk_counter("rows")
        self._comparisons = self._bulk_counter("batch_comparisons")
        self._model_loads = self._bulk_counter("model_loads")
        self._model_load_failures = self._bulk_counter("model_load_failures")
        self._model_unloads = self._bulk_counter("model_unloads")
        self._durations = {name: self._bulk(f"{name}_seconds", SECONDS) for name in _TIMES}
        self._slack = self._bulk("answer_slack_seconds", SECONDS)
        self._counted: dict[VersionKey, int] = {}
        self._times = RequestTimes(
            self._durations["request_duration"],
            self._durations["log_wait"],
            self._durations["queue_wait"],
            self._slack,
            tuning.request_times_buffered,
        )
        self._batch_rows = self._bulk("batch_rows", ROWS)
        self._commit = self._bulk("commit_duration_seconds", SECONDS)
        self.loop_lag = self._bulk("event_loop_lag_seconds", SECONDS)
        self._transform_duration = self._bulk("transform_duration_seconds", SECONDS)
        self._postprocess_duration = self._bulk("postprocess_duration_seconds", SECONDS)
        self._transform_bytes = self._bulk_counter("transform_bytes")
        self._gateway_requests = self._bulk_counter("gateway_requests")
        self._gateway_duration = self._bulk("gateway_duration_seconds", SECONDS)
        self._broker_requests = self._bulk_counter("broker_requests")
        self._register_rare()

    def _register_rare(self) -> None:
        self._schema_requests = self._counter("schema_requests")
        self.transforms_waiting = self._gauge("transforms_waiting")
        self.transforms_waiting_bytes = self._gauge("transforms_waiting_bytes")
        self._transform_restarts = self._counter("transform_restarts")
        self._claims = self._counter("claims")
        self._claim_bytes = self._counter("claim_bytes")
        self._claim_seconds = self._counter("claim_seconds")
        self.claim_waiting_answer_bytes = self._gauge("claim_waiting_answer_bytes")
        self._expired = self._counter("expired_requests")
        self._refused = self._counter("refused_requests")
        self._dead_letters = self._counter("dead_letters")
        self._retries = self._counter("retries")
        self._cancellations = self._counter("cancellations")
        self._commit_failures = self._counter("commit_failures")
        self._rebalances = self._counter("rebalances")
        self.duplicates = self._counter("duplicate_results")
        self.revoked = self._counter("revoked_requests")
        self.bisections = self._counter("bisections")
        self.rebound = self._counter("rebound_requests")
        self.dead_letters_dropped = self._counter("dead_letters_dropped")
        self.unanswered = self._counter("unanswerable_requests")
        self.transaction_timeouts = self._counter("transaction_timeouts")
        self.skipped = self._counter("skipped_records")
        self.source_values = self._counter("source_values")
        self.source_value_bytes = self._counter("source_value_bytes")
        self.shared_values = self._counter("shared_values")
        self.shared_values_bytes = self._gauge("shared_values_bytes")
        self._unreadable = self._counter("unreadable_records")
        for code in (Code.TOO_LARGE, Code.INVALID_REQUEST):
            self._unreadable.labels(code)  # at 0, so that an alert sees the first ones
        self.heap_trimmed = self._counter("heap_trimmed_bytes")
        self.known_executors = self._gauge("known_executors")
        self.quarantined = self._gauge("quarantined_records")
        self._certificate_expiry = self._gauge("certificate_expiry_timestamp_seconds")
        self.isolated_crashes = self._counter("isolated_crashes")
        self.poisoned = self._counter("poisoned_requests")
        self.trace_spans = self._counter("trace_spans")
        self.trace_spans_dropped = self._counter("trace_spans_dropped")
        self.trace_links_dropped = self._counter("trace_links_dropped")
        self.trace_export_failures = self._counter("trace_export_failures")
        self.traces_rate_limited = self._counter("traces_rate_limited")

    def _counter(self, name: str) -> Counter:
        spec = METRIC_SPECS[f"headrace_{name}"]
        return Counter(spec.name, spec.meaning, spec.labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        spec = METRIC_SPECS[f"headrace_{name}"]
        return Gauge(spec.name, spec.meaning, spec.labels, registry=self.registry)

    def _bulk_counter(self, name: str) -> BatchedCounter:
        counter = BatchedCounter(METRIC_SPECS[f"headrace_{name}"])
        self.registry.register(counter)
        return counter

    def _bulk(self, name: str, bounds: Sequence[float]) -> BatchedHistogram:
        histogram = BatchedHistogram(METRIC_SPECS[f"headrace_{name}"], bounds)
        self.registry.register(histogram)
        return histogram

    def show_expiry(self, server: str, certificates: Certificates) -> None:
        """Show from now on when the certificates in use by a server expire."""
        expiry = self._certificate_expiry.labels(server)
        expiry.set_function(lambda: certificates.current().expires_at_s)

    def unreadable(self, gap: Gap) -> None:
        """Count a gap in the log that cannot be read."""
        self._unreadable.labels(gap.code).inc(gap.end - gap.first)

    def sent_to_broker(self, api: str) -> None:
        """Count a request to a broker."""
        self._broker_requests.add((api,), 1)

    def ended_at_door(self, door: str, status: str, duration_s: float) -> None:
        """Count a request that a gateway ended, with the status that its caller got."""
        counts, labels = self._gateway_requests.counts, (door, status)
        counts[labels] = counts.get(labels, 0) + 1
        self._gateway_duration.observe((door,), duration_s)

    # --- requests and batches -------------------------------------------------------------------

    def answered(self, requests: Sequence[Request], began_us: int, now_us: int) -> None:
        """Count requests whose answers were acknowledged.

        Args:
            requests: a chunk.
            began_us: when the responder began with them, in epoch microseconds.
            now_us: when they were acknowledged.
        """
        fine = [request for request in requests if request.failure is None]
        counts = _tally(fine)
        for (model, version), count in counts.items():
            self._requests.add((model, version, "ok", "ok"), count)
        if len(fine) != len(requests):
            self._failed([each for each in requests if each.failure is not None])
        answer_s = max(0, now_us - began_us) / 1e6
        for key, of_version in _by_version(requests, counts).items():
            self._times.record(key, of_version, now_us)
            self._durations["answer_duration"].observe(key, answer_s, len(of_version))
        for request in [each for each in requests if each.trace is not None]:
            self._set_exemplars(request, now_us)

    def _failed(self, requests: Sequence[Request]) -> None:
        for request in requests:
            failure = request.failure
            assert failure is not None
            outcome = outcome_of(failure.code)
            self._requests.add((*_known_version(request), outcome, failure.code))
            if outcome == "expired":
                self._expired.labels(failure.stage).inc()
            elif outcome == "refused":
                self._refused.labels(failure.stage, failure.code).inc()

    def _set_exemplars(self, request: Request, now_us: int) -> None:
        """Make a sampled request the exemplar of its buckets."""
        assert request.trace is not None
        labels, trace_id = _known_version(request), f"{request.trace.trace_id:032x}"
        at_s, written_us = now_us / 1e6, request.timestamp_ms * 1000
        began_us = written_us if written_us >= 0 else request.ingested_us
        self._durations["request_duration"].set_exemplar(
            labels, max(0, now_us - began_us) / 1e6, trace_id, at_s
        )
        if request.batch.formed_us:
            queued_s = max(0, request.batch.formed_us - request.ingested_us) / 1e6
            self._durations["queue_wait"].set_exemplar(labels, queued_s, trace_id, at_s)
            self._durations["compute_duration"].set_exemplar(
                labels, request.batch.compute_us / 1e6, trace_id, at_s
            )

    def formed(self, batch: Batch) -> None:
        """Count a closed batch."""
        self._batches.add((batch.model, batch.version, batch.reason))
        self._batch_rows.observe((batch.model, batch.version), batch.rows)

    def ran(
        self, model: VersionKey, rows: int, *, wait_us: int, copy_us: int, compute_us: int
    ) -> None:
        """Count a model run.

        Args:
            model: its name and version.
            rows: how many.
            wait_us: from the closing of the batch until the executor began with it.
            copy_us: gathering the inputs.
            compute_us: the run itself.
        """
        self._runs.add(model)
        self._rows.add(model, rows)
        self._durations["batch_wait"].observe(model, max(0, wait_us) / 1e6)
        self._durations["copy_duration"].observe(model, max(0, copy_us) / 1e6)
        self._durations["compute_duration"].observe(model, compute_us / 1e6)

    def totals(self) -> dict[str, Any]:
        """Return the totals since the start, for `/status`."""
        return {
            "requests": self._requests.totals(),
            "batches": self._batches.totals(),
            "runs": self._runs.totals(),
            "rows": self._rows.totals(),
            "times": {name: each.totals() for name, each in self._durations.items()},
        }

    def forget_versions(self, keep: Callable[[VersionKey], bool]) -> None:
        """Remove the series of versions that have not been counted between two calls of this.

        Args:
            keep: returns whether a version stays in any case, because it is loaded.
        """
        self._times.count()
        by_version: tuple[BatchedCounter | BatchedHistogram, ...] = (
            *(self._requests, self._batches, self._runs, self._rows, self._comparisons),
            *(self._durations.values()),
            *(self._slack, self._batch_rows),
            *(self._model_loads, self._model_load_failures, self._model_unloads),
        )
        totals: dict[VersionKey, int] = {}
        for each in by_version:
            for key, count in each.counted():
                totals[key] = totals.get(key, 0) + count
        for key, total in totals.items():
            if key[1] and not keep(key) and self._counted.get(key) == total:
                for each in by_version:
                    each.forget(key)
                del self._counted[key]
            else:
                self._counted[key] = total

    def gateway_totals(self) -> dict[str, Any]:
        """Return the totals of a gateway since the start, for `/status`."""
        return {
            "ended": self._gateway_requests.totals(),
            "durations": self._gateway_duration.totals(),
        }

    # --- rare events ----------------------------------------------------------------------------

    def dead_letter(self, code: str) -> None:
        """Count a dead letter."""
        self._dead_letters.labels(code).inc()

    def tried_together(self, model: str, version: str, outcome: str) -> None:
        """Count a batch-safety comparison of a version: agreed, differed or inconclusive."""
        self._comparisons.add((model, version, outcome))

    def model_loaded(self, model: str, version: str, reason: str) -> None:
        """Count a version that was loaded: `added`, `requested` after it was unloaded, or
        `restored` since its successor failed.
        """
        self._model_loads.add((model, version, reason))

    def model_failed_to_load(self, model: str, version: str) -> None:
        """Count a load, or a trial load, that failed."""
        self._model_load_failures.add((model, version))

    def model_unloaded(self, model: str, version: str, reason: str) -> None:
        """Count a version that was unloaded: `removed`, idle while `memory` was short, or for a
        `swap`.
        """
        self._model_unloads.add((model, version, reason))

    def cancelled(self, records: int, ended: int) -> None:
        """Count cancelling records, and the waiting requests that they ended."""
        self._cancellations.labels("ended").inc(ended)
        self._cancellations.labels("none").inc(max(0, records - ended))

    def retried(self, operation: str, times: int = 1) -> None:
        """Count retries of an operation: `send` (per record), `run` or `commit`."""
        self._retries.labels(operation).inc(times)

    def schema_requested(self, outcome: str) -> None:
        """Count a request to the schema registry: `ok`, `refused` or `unavailable`."""
        self._schema_requests.labels(outcome).inc()

    def transformed(self, model: str, took_s: float, size_bytes: int) -> None:
        """Count a payload that a transform worker has ended, and the inputs that it made."""
        self._transform_duration.observe((model,), took_s)
        self._transform_bytes.add((model,), size_bytes)

    def postprocessed(self, model: str, took_s: float) -> None:
        """Record the time of a worker for the postprocess of one request."""
        self._postprocess_duration.observe((model,), took_s)

    def transform_restarted(self, reason: str) -> None:
        """Count a child process of transforms that is replaced: `crash`, `hang` or `start`.

        Any thread may do this.
        """
        self._transform_restarts.labels(reason).inc()

    def claimed(self, operation: str, outcome: str, size_bytes: int, took_s: float) -> None:
        """Count an object that a claim refers to, see `headrace.claims`."""
        self._claims.labels(operation, outcome).inc()
        self._claim_bytes.labels(operation).inc(size_bytes)
        self._claim_seconds.labels(operation).inc(took_s)

    def rebalanced(self) -> None:
        """Count an assignment of partitions by the group."""
        self._rebalances.inc()

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Time a commit; if it fails, count the failure, which means that it is retried."""
        began_s = time.monotonic()
        try:
            yield
        except Retriable as error:
            reason = "fenced" if isinstance(error, Fenced) else "unavailable"
            self._commit_failures.labels(reason).inc()
            self.retried("commit")
            raise
        finally:
            self._commit.observe((), time.monotonic() - began_s)


def _known_version(request: Request) -> VersionKey:
    """Return model and version; both empty while there is no version, so that the model may not
    exist.
    """
    return (request.model, request.version) if request.version else ("", "")


def _tally(requests: Sequence[Request]) -> dict[VersionKey, int]:
    """Count the requests of each model and version; neighbours mostly have the same."""
    counts: dict[VersionKey, int] = {}
    key = ("", "")
    began = 0
    for index, request in enumerate(requests):
        if request.version != key[1] or request.model != key[0]:
            if index:
                counts[key] = counts.get(key, 0) + index - began
            key, began = (request.model, request.version), index
    if requests:
        counts[key] = counts.get(key, 0) + len(requests) - began
    return counts


def _by_version(
    requests: Sequence[Request], counts: Mapping[VersionKey, int]
) -> dict[VersionKey, Sequence[Request]]:
    """Group requests by the version that they are counted under; most chunks have only one.

    Args:
        requests: a chunk.
        counts: the number of requests that have not failed, by model and version.
    """
    if len(counts) == 1:
        ((key, count),) = counts.items()
        if count == len(requests):
            return {key: requests}
    found: dict[VersionKey, list[Request]] = {}
    for request in requests:
        found.setdefault(_known_version(request), []).append(request)
    return dict(found)


# --- batched counters and histograms -------------------------------------------------------------
#
# Without a lock, and with many events in one call: the Prometheus client's own take a lock for each
# event. These are filled from one thread, the event loop's, and scrapes read them there as well.


def _do_nothing() -> None:
    pass


class BatchedCounter(Collector):
    """A counter that is incremented in bulk, from one thread.

    Attributes:
        counts: by label values.
    """

    def __init__(self, spec: MetricSpec) -> None:
        self._spec = spec
        self.counts: dict[tuple[str, ...], int] = {}

    def add(self, labels: tuple[str, ...], times: int = 1) -> None:
        """Increment by `times`."""
        self.counts[labels] = self.counts.get(labels, 0) + times

    def counted(self) -> Iterator[tuple[VersionKey, int]]:
        """Return the events of each series, whose first two labels are model and version."""
        for labels, count in self.counts.items():
            yield (labels[0], labels[1]), count

    def forget(self, key: VersionKey) -> None:
        """Remove the series of a version."""
        for labels in [labels for labels in self.counts if labels[:2] == key]:
            del self.counts[labels]

    def totals(self) -> list[dict[str, Any]]:
        """Return one entry for each series, for `/status`."""
        names = self._spec.labels
        return [
            {**dict(zip(names, labels, strict=True)), "count": count}
            for labels, count in self.counts.items()
        ]

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Return the family without samples, for its registration."""
        yield self._family()

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return the current samples, for a scrape."""
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

    def __init__(self, spec: MetricSpec, bounds: Sequence[float]) -> None:
        self._spec = spec
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], _Series] = {}
        self._before_reading: Callable[[], None] = _do_nothing

    def before_reading(self, fill: Callable[[], None]) -> None:
        """Call `fill` before every read of the histogram, to add values that are still buffered."""
        self._before_reading = fill

    def observe(self, labels: tuple[str, ...], value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        series = self._series.get(labels) or self._add(labels)
        series.counts[bisect_left(self._bounds, value)] += times
        series.total += value * times

    def counted(self) -> Iterator[tuple[VersionKey, int]]:
        """Return the values of each series, whose labels are model and version."""
        for labels, series in self._series.items():
            yield (labels[0], labels[1]), sum(series.counts)

    def forget(self, key: VersionKey) -> None:
        """Remove the series of a version."""
        self._series.pop(key, None)

    def observe_all(self, labels: tuple[str, ...], values: NDArray[np.float64]) -> None:
        """Count each of many values once."""
        if not len(values):
            return
        series = self._series.get(labels) or self._add(labels)
        places = np.searchsorted(self._bounds, values, side="left")
        for place, count in enumerate(np.bincount(places).tolist()):
            series.counts[place] += count
        series.total += float(values.sum())

    def set_exemplar(
        self, labels: tuple[str, ...], value: float, trace_id: str, at_s: float
    ) -> None:
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
        """Return the family without samples, for its registration."""
        yield self._family()

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Return the current samples, for a scrape."""
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


# --- times of requests ---------------------------------------------------------------------------


_LAST_MS = int(np.iinfo(np.int64).max) // 1000
"""The latest timestamp that is within 64 bits in microseconds; any as late is in the future."""


class _TimeColumns(NamedTuple):
    """Columns; a row of the first three is a request.

    Attributes:
        answered_us: the time at which each group of them was answered.
        slack_us: the time left until the deadline, for requests that have one.
    """

    timestamp_ms: list[int]
    ingested_us: list[int]
    formed_us: list[int]
    answered_us: list[tuple[int, int]]
    slack_us: list[int]


class RequestTimes:
    """Fills four histograms, each by model and version, with the times of answered requests.

    Recording a request stores three integers. NumPy sorts them into buckets once there are a few
    thousand, or when the histograms are read.

    Args:
        total: from the record's timestamp until the answer; without a timestamp, from ingest.
        in_log: from the record's timestamp until ingest, and 0 without one.
        queued: from ingest until the batch closed, for requests that joined one.
        slack: from the answer until the deadline, for requests that have one.
        max_buffered: after this many requests of a version, their times are counted.
    """

    def __init__(
        self,
        total: BatchedHistogram,
        in_log: BatchedHistogram,
        queued: BatchedHistogram,
        slack: BatchedHistogram,
        max_buffered: int,
    ) -> None:
        self._total = total
        self._in_log = in_log
        self._queued = queued
        self._slack = slack
        self._max_buffered = max_buffered
        self._buffered: dict[VersionKey, _TimeColumns] = {}
        for histogram in (total, in_log, queued, slack):
            histogram.before_reading(self.count)

    def record(self, key: VersionKey, requests: Sequence[Request], now_us: int) -> None:
        """Record requests that were answered now."""
        columns = self._buffered.get(key)
        if columns is None:
            columns = self._buffered[key] = _TimeColumns([], [], [], [], [])
        timestamps_ms, ingested_us, formed_us, answered_us, slack_us = columns
        timestamps_ms += [request.timestamp_ms for request in requests]
        ingested_us += [request.ingested_us for request in requests]
        formed_us += [request.batch.formed_us for request in requests]
        answered_us.append((now_us, len(requests)))
        slack_us += [
            deadline_ms * 1000 - now_us
            for request in requests
            if (deadline_ms := request.envelope.deadline_ms)
        ]
        if len(timestamps_ms) >= self._max_buffered:
            self.count()

    def count(self) -> None:
        """Move the recorded times into the histograms."""
        pending, self._buffered = self._buffered, {}
        for labels, columns in pending.items():
            timestamp_ms = np.minimum(_column(columns.timestamp_ms), _LAST_MS)
            ingested_us, formed_us = _column(columns.ingested_us), _column(columns.formed_us)
            written_us = np.where(timestamp_ms < 0, ingested_us, timestamp_ms * 1000)
            moments_us, counts = np.array(columns.answered_us, np.int64).T
            self._total.observe_all(labels, _seconds(np.repeat(moments_us, counts) - written_us))
            self._in_log.observe_all(labels, _seconds(ingested_us - written_us))
            formed = formed_us > 0
            self._queued.observe_all(labels, _seconds((formed_us - ingested_us)[formed]))
            self._slack.observe_all(labels, _seconds(_column(columns.slack_us)))


def _column(numbers: list[int]) -> NDArray[np.int64]:
    return np.fromiter(numbers, np.int64, len(numbers))


def _seconds(microseconds: NDArray[np.int64]) -> NDArray[np.float64]:
    """Convert to seconds; negative times count as 0, since the clocks of machines differ."""
    return np.maximum(microseconds, 0) / 1e6
