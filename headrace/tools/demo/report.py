"""Output of the demo: the live view while it runs, and the final report as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry

from headrace.tools.demo.questions import INVALID
from headrace.tools.demo.tally import (
    BatchResult,
    ErrorResult,
    ExampleRequest,
    GroupResult,
    LiveStats,
    Result,
)

Reasons = Mapping[str, Mapping[str, int]]
"""Number of batches by model and closing reason."""

_METRIC = "headrace_batches"


def closing_reasons(registry: CollectorRegistry) -> Reasons:
    """Read the closing reasons of batches from a process's metrics."""
    reasons: dict[str, dict[str, int]] = {}
    for family in registry.collect():
        if family.name != _METRIC:
            continue
        for sample in family.samples:
            if sample.name == f"{_METRIC}_total" and sample.value:
                model = reasons.setdefault(sample.labels["model"], {})
                model[sample.labels["reason"]] = int(sample.value)
    return reasons


def report(result: Result, reasons: Reasons) -> list[str]:
    """Return the whole summary."""
    parts = (
        _groups(result.groups),
        _batches(result.batches, reasons),
        _errors(result.errors),
        _trace(result.trace) if result.trace else [],
        _verdict(result),
    )
    return [line for part in parts if part for line in ("", *part)]


def _groups(groups: Sequence[GroupResult]) -> list[str]:
    head = f"{'Requests':22}{'sent':>8}{'answered':>10}{'right':>17}"
    lines = [f"{head}{'p50':>10}{'p90':>9}{'p99':>9}{'max':>9}  ms"]
    for group in groups:
        right = f"{group.right:,} of {group.rows:,}"
        line = f"  {group.group:20}{group.sent:8,}{group.answered:10,}{right:>17}"
        if group.latency:
            line += f"{group.latency.p50_ms:10.1f}" + "".join(
                f"{value:9.1f}" for value in group.latency[1:]
            )
        lines.append(line)
    return lines


def _batches(batches: Sequence[BatchResult], reasons: Reasons) -> list[str]:
    lines = ["Batches"] if batches else []
    for each in batches:
        largest = max(each.sizes)
        closed = ", ".join(
            f"{count:,} {reason}" for reason, count in sorted(reasons.get(each.model, {}).items())
        )
        lines.append(
            f"  {each.model:20}{each.batches:,} with {each.mean_rows:.1f} rows on average, "
            f"{largest} at most" + (f"; closed: {closed}" if closed else "")
        )
        lines.append(f"  {'':20}by rows: {_spread(each.sizes)}")
    return lines


def _spread(sizes: Mapping[int, int]) -> str:
    """Format the numbers of batches with 1, 2, 3 to 4, 5 to 8 rows, and so on."""
    bins: dict[tuple[int, int], int] = {}
    for size, batches in sizes.items():
        high = 1 << (size - 1).bit_length()
        bounds = (high // 2 + 1, high)
        bins[bounds] = bins.get(bounds, 0) + batches
    return ", ".join(
        f"{low}–{high}: {batches:,}" if low < high else f"{high}: {batches:,}"
        for (low, high), batches in sorted(bins.items())
    )


def _errors(errors: Sequence[ErrorResult]) -> list[str]:
    lines = ["Expected errors"] if errors else []
    for each in errors:
        kept = f", dead letters: {each.dead_letters}" if each.dead_letters else ""
        lines.append(f"  {each.subject:35}{each.answers} × {each.code}{kept}")
        lines.append(f"    {each.message}")
    return lines


def _trace(trace: ExampleRequest) -> list[str]:
    answer = trace.answer
    queued_ms, batched_ms = answer.queue_us / 1000, answer.batch_us / 1000
    compute_ms = answer.compute_us / 1000
    rest_ms = trace.total_ms - queued_ms - batched_ms - compute_ms
    rows = "alone" if answer.batch_size == 1 else f"{answer.batch_size} rows together"
    return [
        f"One request: {trace.question.subject}, to {trace.question.model} ({answer.request})",
        f"  {rest_ms:8.2f} ms  producer to ingest, responder to consumer",
        f"  {queued_ms:8.2f} ms  batcher: until its batch closed",
        f"  {compute_ms:8.2f} ms  executor: the run of the model, {rows}",
        f"  {batched_ms:8.2f} ms  the rest in its batch: waiting for the run, split, encoded",
        f"  {trace.total_ms:8.2f} ms  from when it was due to its answer: "
        f"{', '.join(answer.labels)}",
    ]


def _verdict(result: Result) -> list[str]:
    if result.faults:
        return ["Faults", *(f"  {fault}" for fault in result.faults)]
    answers = sum(group.answered for group in result.groups)
    expected = sum(group.answered for group in result.groups if group.group == INVALID)
    return [
        f"Every request was answered once: {answers:,} answers, {expected} of them expected errors."
    ]


# --- the live view ----------------------------------------------------------------------------


def live_line(stats: LiveStats) -> str:
    """Return a line with the current figures."""
    return "  ".join(f"{name} {value}" for name, value in _live_figures(stats))


def _live_figures(stats: LiveStats) -> list[tuple[str, str]]:
    """Return the displayed figures, by name."""
    return [
        ("time", f"{stats.elapsed_s:5.1f} s"),
        ("sent", f"{stats.sent:7,}"),
        ("answered", f"{stats.answered:7,}"),
        ("in flight", f"{stats.in_flight:4,}"),
        ("answers/s", f"{stats.answers_per_s:6,.0f}"),
        ("batch mean", f"{stats.batch_mean:4.1f}"),
        ("max", f"{stats.batch_max:3}"),
        ("queue", f"{stats.queue_ms:6.2f} ms"),
        ("p50", f"{stats.p50_ms:6.2f} ms"),
        ("p99", f"{stats.p99_ms:6.2f} ms"),
    ]
