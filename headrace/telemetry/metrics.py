"""The counters of a process, as methods named by what happened.

The names, types and labels are in `headrace.telemetry.catalogue`. Events of every request or batch
are counted in bulk, a chunk at a time; rare ones use the Prometheus client. Gauges are not kept
here: they are read from their sources at each scrape, see `headrace.telemetry.state`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from headrace.errors import Code, Retriable
from headrace.log.errors import Fenced
from headrace.log.port import Gap
from headrace.protocol.messages import Batch, Request
from headrace.telemetry.bulk import BatchedCounter, BatchedHistogram
from headrace.telemetry.catalogue import CATALOGUE, ROWS, SECONDS
from headrace.telemetry.request_times import RequestTimes
from headrace.tuning import TUNING, RuntimeTuning

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
        duplicates, revoked, bisections, unkept, unanswered, skipped, heap_trimmed: counters without
            labels.
        rebound: likewise, of requests that were bound to another version.
        attempts, condemned, transaction_timeouts: likewise; suspects, known_executors: gauges.
        trace_spans, trace_spans_dropped, trace_links_dropped, trace_export_failures: likewise.
        traces_rate_limited: by `sampled_by`, see `headrace.telemetry.sampling`.
        loop_lag: see `headrace.telemetry.loop_lag`.
    """

    def __init__(self, registry: CollectorRegistry, tuning: RuntimeTuning = TUNING.runtime) -> None:
        self.registry = registry
        self._requests = self._bulk_counter("requests")
        self._batches = self._bulk_counter("batches")
        self._runs = self._bulk_counter("runs")
        self._rows = self._bulk_counter("rows")
        self._durations = {name: self._bulk(f"{name}_seconds", SECONDS) for name in _TIMES}
        self._times = RequestTimes(
            self._durations["request_duration"],
            self._durations["log_wait"],
            self._durations["queue_wait"],
            self._bulk("answer_slack_seconds", SECONDS),
            tuning.request_times_buffered,
        )
        self._batch_rows = self._bulk("batch_rows", ROWS)
        self._commit = self._bulk("commit_duration_seconds", SECONDS)
        self.loop_lag = self._bulk("event_loop_lag_seconds", SECONDS)
        self._register_rare()

    def _register_rare(self) -> None:
        self._expired = self._counter("expired_requests")
        self._refused = self._counter("refused_requests")
        self._dead_letters = self._counter("dead_letters")
        self._retries = self._counter("retries")
        self._cancellations = self._counter("cancellations")
        self._comparisons = self._counter("batch_comparisons")
        self._commit_failures = self._counter("commit_failures")
        self._rebalances = self._counter("rebalances")
        self.duplicates = self._counter("duplicates")
        self.revoked = self._counter("void")
        self.bisections = self._counter("bisections")
        self.rebound = self._counter("rebound_requests")
        self.unkept = self._counter("unkept_dead_letters")
        self.unanswered = self._counter("unanswered")
        self.transaction_timeouts = self._counter("transaction_timeouts")
        self.skipped = self._counter("skipped")
        self._unreadable = self._counter("unreadable")
        self.heap_trimmed = self._counter("heap_trimmed_bytes")
        self.known_executors = self._gauge("known_executors")
        self.suspects = self._gauge("suspects")
        self.attempts = self._counter("suspect_attempts")
        self.condemned = self._counter("condemned")
        self.trace_spans = self._counter("trace_spans")
        self.trace_spans_dropped = self._counter("trace_spans_dropped")
        self.trace_links_dropped = self._counter("trace_links_dropped")
        self.trace_export_failures = self._counter("trace_export_failures")
        self.traces_rate_limited = self._counter("traces_rate_limited")

    def _counter(self, name: str) -> Counter:
        spec = CATALOGUE[f"headrace_{name}"]
        return Counter(spec.name, spec.meaning, spec.labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        spec = CATALOGUE[f"headrace_{name}"]
        return Gauge(spec.name, spec.meaning, spec.labels, registry=self.registry)

    def _bulk_counter(self, name: str) -> BatchedCounter:
        counter = BatchedCounter(CATALOGUE[f"headrace_{name}"])
        self.registry.register(counter)
        return counter

    def _bulk(self, name: str, bounds: Sequence[float]) -> BatchedHistogram:
        histogram = BatchedHistogram(CATALOGUE[f"headrace_{name}"], bounds)
        self.registry.register(histogram)
        return histogram

    def passed_over(self, gap: Gap) -> None:
        """Count a gap in the log that cannot be read."""
        self._unreadable.labels(gap.code).inc(gap.end - gap.first)

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
        for model, of_model in _by_model(requests, counts).items():
            self._times.note(model, of_model, now_us)
            self._durations["answer_duration"].observe((model,), answer_s, len(of_model))
        for request in [each for each in requests if each.trace is not None]:
            self._show(request, now_us)

    def _failed(self, requests: Sequence[Request]) -> None:
        for request in requests:
            failure = request.failure
            assert failure is not None
            model, outcome = _known_model(request), outcome_of(failure.code)
            self._requests.add((model, request.version, outcome, failure.code))
            if outcome == "expired":
                self._expired.labels(failure.stage).inc()
            elif outcome == "refused":
                self._refused.labels(failure.stage, failure.code).inc()

    def _show(self, request: Request, now_us: int) -> None:
        """Make a sampled request the exemplar of its buckets."""
        assert request.trace is not None
        labels, trace_id = (_known_model(request),), f"{request.trace.trace_id:032x}"
        at_s, written_us = now_us / 1e6, request.timestamp_ms * 1000
        self._durations["request_duration"].show(
            labels, max(0, now_us - written_us) / 1e6, trace_id, at_s
        )
        if request.formed_us:
            queued_s = max(0, request.formed_us - request.ingested_us) / 1e6
            self._durations["queue_wait"].show(labels, queued_s, trace_id, at_s)
            self._durations["compute_duration"].show(
                labels, request.compute_us / 1e6, trace_id, at_s
            )

    def formed(self, batch: Batch) -> None:
        """Count a closed batch."""
        self._batches.add((batch.model, batch.reason))
        self._batch_rows.observe((batch.model,), batch.rows)

    def ran(
        self, model: tuple[str, str], rows: int, *, wait_us: int, copy_us: int, compute_us: int
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
        labels = model[:1]
        self._durations["batch_wait"].observe(labels, max(0, wait_us) / 1e6)
        self._durations["copy_duration"].observe(labels, max(0, copy_us) / 1e6)
        self._durations["compute_duration"].observe(labels, compute_us / 1e6)

    def totals(self) -> dict[str, Any]:
        """Return the totals since the start, for `/status`."""
        return {
            "requests": self._requests.totals(),
            "batches": self._batches.totals(),
            "runs": self._runs.totals(),
            "rows": self._rows.totals(),
            "times": {name: each.totals() for name, each in self._durations.items()},
        }

    # --- rare events ----------------------------------------------------------------------------

    def dead_letter(self, code: str) -> None:
        """Count a dead letter."""
        self._dead_letters.labels(code).inc()

    def tried_together(self, model: str, outcome: str) -> None:
        """Count a batch-safety comparison of a model: agreed, differed or inconclusive."""
        self._comparisons.labels(model, outcome).inc()

    def cancelled(self, records: int, ended: int) -> None:
        """Count cancelling records, and the waiting requests that they ended."""
        self._cancellations.labels("ended").inc(ended)
        self._cancellations.labels("none").inc(max(0, records - ended))

    def retried(self, operation: str, times: int = 1) -> None:
        """Count retries of an operation: `send` (per record), `run` or `commit`."""
        self._retries.labels(operation).inc(times)

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


def _known_model(request: Request) -> str:
    """Return the model; empty while the request has no version, and so may name an unknown one."""
    return request.model if request.version else ""


def _tally(requests: Sequence[Request]) -> dict[tuple[str, str], int]:
    """Count the requests of each model and version; neighbours mostly have the same."""
    counts: dict[tuple[str, str], int] = {}
    key = ("", "")
    began = 0
    for place, request in enumerate(requests):
        if request.version != key[1] or request.model != key[0]:
            if place:
                counts[key] = counts.get(key, 0) + place - began
            key, began = (request.model, request.version), place
    if requests:
        counts[key] = counts.get(key, 0) + len(requests) - began
    return counts


def _by_model(
    requests: Sequence[Request], counts: Mapping[tuple[str, str], int]
) -> dict[str, Sequence[Request]]:
    """Group requests by the model that they are counted under; most chunks have only one.

    Args:
        requests: a chunk.
        counts: the number of requests that have not failed, by model and version.
    """
    if len(counts) == 1:
        (((model, _), count),) = counts.items()
        if count == len(requests):
            return {model: requests}
    found: dict[str, list[Request]] = {}
    for request in requests:
        found.setdefault(_known_model(request), []).append(request)
    return dict(found)
