"""Output of the demo: the live view while it runs, and the final report as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.tools.demo.questions import INVALID
from headrace.tools.demo.tally import (
    BatchResult,
    ErrorResult,
    GroupResult,
    LiveStats,
    Result,
)


def report(result: Result) -> list[str]:
    """Return the whole summary."""
    parts = (
        _groups(result.groups),
        _batches(result.batches),
        _errors(result.errors),
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
    lines.append("  right: rows that got their true label; the digits model itself misses 2 of 100")
    return lines


def _batches(batches: Sequence[BatchResult]) -> list[str]:
    lines = ["Batches"] if batches else []
    for each in batches:
        largest = max(each.sizes)
        lines.append(
            f"  {each.model:20}{each.batches:,} with {each.mean_rows:.1f} rows on average, "
            f"{largest} at most"
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
    return (
        f"time {stats.elapsed_s:5.1f} s  sent {stats.sent:7,}  answered {stats.answered:7,}"
        f"  in flight {stats.in_flight:4,}  answers/s {stats.answers_per_s:6,.0f}"
        f"  batch mean {stats.batch_mean:4.1f}  max {stats.batch_max:3}"
        f"  queue {stats.queue_ms:6.2f} ms  p50 {stats.p50_ms:6.2f} ms  p99 {stats.p99_ms:6.2f} ms"
    )
