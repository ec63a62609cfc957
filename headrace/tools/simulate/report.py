"""Results of a simulation: as a table, as plain values, and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.tools.pages import COLOURS, as_data_url, new_plot, render_page
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
        f"{outcome.rate_per_s:.0f}",
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


# --- the HTML page ----------------------------------------------------------------------------

PLOTTED = dict(zip((0.5, 0.9, 0.99), COLOURS.values(), strict=True))
PLOTTED_SIZES = 64


def report(
    source: str, outcomes: Sequence[ScenarioResult], times: Mapping[str, ServiceTime]
) -> str:
    """Return the page. It needs the packages of the extra `report`.

    Args:
        source: description of the recording.
        outcomes: in the order of the rows.
        times: S(b) by model.
    """
    return render_page(
        "simulate.html",
        source=source,
        latencies=_latencies(outcomes),
        headings=HEADINGS,
        rows=[cells(each) for each in outcomes],
        service_times=[
            (model, str(service_time), _service_time(service_time))
            for model, service_time in sorted(times.items())
        ],
    )


def _latencies(outcomes: Sequence[ScenarioResult]) -> str:
    """Plot the percentiles of each scenario; empty if no request was completed."""
    completed = [each for each in outcomes if each.latencies_ms]
    if not completed:
        return ""
    names = [scenario_name(each.scenario) for each in completed]
    figure, axes = new_plot(8.5, 1 + 0.3 * len(completed))
    low_ms, high_ms = ([each.latency_ms(share) for each in completed] for share in (0.5, 0.99))
    axes.hlines(names, low_ms, high_ms, color="#d5dde4", linewidth=3, zorder=1)
    for share, colour in PLOTTED.items():
        found = [each.latency_ms(share) for each in completed]
        axes.scatter(found, names, color=colour, label=f"p{share * 100:g}", zorder=2)
    axes.set_xscale("log")
    axes.set_xlabel("latency, ms")
    axes.invert_yaxis()
    axes.legend()
    return as_data_url(figure)


def _service_time(service_time: ServiceTime) -> str:
    """Plot S over the batch size, with the known points."""
    largest = max((each.rows for each in service_time.points), default=32)
    steps = min(PLOTTED_SIZES, largest)
    sizes = sorted({round(1 + step * (largest - 1) / steps) for step in range(steps + 1)})
    figure, axes = new_plot()
    axes.plot(sizes, [service_time(size) / 1000 for size in sizes], color=COLOURS["again"])
    points = [(each.rows, each.us / 1000) for each in service_time.points]
    if points:
        axes.scatter(*zip(*points, strict=True), color=COLOURS["candidate"])
    axes.set_xlabel("rows in a batch")
    axes.set_ylabel("S(b), ms")
    axes.set_ylim(bottom=0)
    return as_data_url(figure)
