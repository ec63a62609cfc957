"""Time per stage, from Headrace's own metrics before and after a load."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.results import Stages

TOTAL = "headrace_request_duration_seconds"
IN_LOG = "headrace_log_wait_seconds"
QUEUED = "headrace_queue_wait_seconds"
ANSWERING = "headrace_answer_duration_seconds"
_TIMEOUT_S = 5.0

Scrape = Mapping[str, float]
"""Sums over all labels, by sample name."""


def scrape(port: int) -> Scrape:
    """Return the metrics of a process on this machine, without histogram buckets."""
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        text = answer.read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def stages_between(before: Scrape, after: Scrape) -> Stages:
    """Return the mean time of each stage for the requests answered between two scrapes."""

    def mean_ms(name: str) -> float:
        count = after.get(f"{name}_count", 0.0) - before.get(f"{name}_count", 0.0)
        total_s = after.get(f"{name}_sum", 0.0) - before.get(f"{name}_sum", 0.0)
        return 1e3 * total_s / count if count else 0.0

    in_log, queued, answering = mean_ms(IN_LOG), mean_ms(QUEUED), mean_ms(ANSWERING)
    running = max(0.0, mean_ms(TOTAL) - in_log - queued - answering)
    return Stages(in_log, queued, running, answering)


def rows_per_run(before: Scrape, after: Scrape) -> float:
    """Return the mean batch size."""
    runs = after.get("headrace_runs_total", 0.0) - before.get("headrace_runs_total", 0.0)
    rows = after.get("headrace_rows_total", 0.0) - before.get("headrace_rows_total", 0.0)
    return rows / runs if runs else 0.0
