"""Results of a simulation: as a table, and as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.tools.simulate.scenarios import Scenario, ScenarioResult
from headrace.tools.simulate.service_times import ServiceTime

HEADINGS = (
    *("scenario", "requests/s", "load", "p50 ms", "p90 ms", "p99 ms"),
    *("batches", "mean rows", "expired", "late", "busy", "closed because"),
)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines; the first and last columns are text, the others are numbers."""
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    for row in (HEADINGS, *rows):
        cells = [
            cell.rjust(width) if 0 < place < len(row) - 1 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def scenario_name(scenario: Scenario) -> str:
    """Describe the changes of a scenario."""
    parts = []
    if scenario.rate_factor != 1:
        parts.append(f"rate x{scenario.rate_factor:g}")
    if scenario.instances is not None:
        parts.append(f"{scenario.instances} instance{'s' * (scenario.instances > 1)}")
    if scenario.max_batch_size is not None:
        parts.append(f"batch {scenario.max_batch_size}")
    if scenario.max_queue_delay_ms is not None:
        parts.append(f"delay {scenario.max_queue_delay_ms:g} ms")
    return ", ".join(parts) or "present"


def cells(outcome: ScenarioResult) -> list[str]:
    """Return the cells of one row."""
    latencies = [f"{outcome.latency_ms(share):.3f}" for share in (0.5, 0.9, 0.99)]
    reasons = " ".join(
        f"{reason} {count / outcome.batches:.0%}" for reason, count in outcome.reasons.items()
    )
    return [
        scenario_name(outcome.scenario),
        f"{outcome.rate_per_s:.{0 if outcome.rate_per_s >= 10 else 2}f}",
        f"{outcome.load:.0%}",
        *latencies,
        str(outcome.batches),
        f"{outcome.mean_batch:.2f}",
        str(outcome.expired),
        str(outcome.late),
        f"{outcome.utilisation:.0%}",
        reasons,
    ]


def curve(service_time: ServiceTime) -> dict[str, Any]:
    """Return S(b) in JSON's types."""
    return {
        "t0_us": service_time.t0_us,
        "a_us": service_time.a_us,
        "points": [each._asdict() for each in service_time.points],
    }
