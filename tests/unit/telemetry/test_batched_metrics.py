"""Counters and histograms that are filled in bulk, as a scrape sees them."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry

from headrace.telemetry.metric_specs import MetricSpec
from headrace.telemetry.metrics import BatchedCounter, BatchedHistogram
from tests.support.scrapes import scrape_openmetrics

WAITS = MetricSpec("headrace_test_wait_seconds", "histogram", ("model",), "A wait.")
THINGS = MetricSpec("headrace_test_things", "counter", ("model", "kind"), "Things.")


def scraped(
    collector: BatchedCounter | BatchedHistogram,
) -> list[tuple[str, dict[str, str], float]]:
    """The samples that a parser of OpenMetrics finds, timestamps of creation left out."""
    registry = CollectorRegistry()
    registry.register(collector)
    return [
        (sample.name, sample.labels, sample.value)
        for family in scrape_openmetrics(registry).values()
        for sample in family.samples
    ]


def test_batched_histogram_counts_repeated_values() -> None:
    """Buckets are cumulative and inclusive; the sum counts each time."""
    histogram = BatchedHistogram(WAITS, (0.1, 1.0))
    histogram.observe(("m",), 0.1, 3)
    histogram.observe(("m",), 0.5)
    histogram.observe(("m",), 7.0, 2)
    name, labels = "headrace_test_wait_seconds", {"model": "m"}
    assert scraped(histogram) == [
        (f"{name}_bucket", {**labels, "le": "0.1"}, 3),
        (f"{name}_bucket", {**labels, "le": "1.0"}, 4),
        (f"{name}_bucket", {**labels, "le": "+Inf"}, 6),
        (f"{name}_count", labels, 6),
        (f"{name}_sum", labels, 0.1 * 3 + 0.5 + 7.0 * 2),
    ]


def test_histogram_bucket_shows_its_last_exemplar() -> None:
    """The last trace of a bucket stands there, with its value and time."""
    histogram = BatchedHistogram(WAITS, (0.1, 1.0))
    histogram.observe(("m",), 0.5, 2)
    histogram.set_exemplar(("m",), 0.4, "a" * 32, 1000.0)
    histogram.set_exemplar(("m",), 0.5, "b" * 32, 1001.0)
    registry = CollectorRegistry()
    registry.register(histogram)
    (family,) = scrape_openmetrics(registry).values()
    found = {sample.labels["le"]: sample.exemplar for sample in family.samples if sample.exemplar}
    assert list(found) == ["1.0"]
    exemplar = found["1.0"]
    assert exemplar is not None
    assert (exemplar.labels, exemplar.value) == ({"trace_id": "b" * 32}, 0.5)


def test_histogram_without_observations_has_no_samples() -> None:
    """A model that nobody asked does not show up."""
    assert scraped(BatchedHistogram(WAITS, (1.0,))) == []


def test_batched_counter_adds_up_by_labels() -> None:
    """In a scrape and in `/status` alike."""
    counter = BatchedCounter(THINGS)
    counter.add(("m", "a"), 3)
    counter.add(("m", "a"))
    counter.add(("m", "b"), 2)
    assert scraped(counter) == [
        ("headrace_test_things_total", {"model": "m", "kind": "a"}, 4),
        ("headrace_test_things_total", {"model": "m", "kind": "b"}, 2),
    ]
    assert counter.totals() == [
        {"model": "m", "kind": "a", "count": 4},
        {"model": "m", "kind": "b", "count": 2},
    ]


def test_metric_names_of_totals_contain_unit() -> None:
    """A mean is `seconds` over `count`."""
    histogram = BatchedHistogram(WAITS, (1.0,))
    histogram.observe(("m",), 0.25, 4)
    (total,) = histogram.totals()
    assert (total["model"], total["count"]) == ("m", 4)
    assert math.isclose(total["seconds"], 1.0)
