"""Outcomes of a simulation as one HTML page: no script, no outside resource. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from headrace.tools.compare.style import STYLE
from headrace.tools.simulate.scenarios import Outcome, Scenario
from headrace.tools.simulate.service_times import ServiceTime

_WIDTH, _ROW, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 22, 250, 40, 8, 34
_CURVE_WIDTH, _CURVE_HEIGHT = 460, 240
_CURVE_STEPS = 64
_SHOWN = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
_ABOUT = (
    "The batcher's own rules on recorded arrivals, in simulated time; no model was run. What is "
    "simulated is the wait for a batch and the batch's time."
)
_STYLE = """
td:not(:first-child):not(:last-child), th:not(:first-child):not(:last-child) { text-align: right; }
svg .bar { stroke: var(--line); stroke-width: 3; }
svg .p50 { fill: var(--s0); } svg .p90 { fill: var(--s1); } svg .p99 { fill: var(--s2); }
polyline.curve { stroke: var(--s1); } svg .point { fill: var(--s2); }
"""


def report(
    source: str,
    outcomes: Sequence[Outcome],
    times: Mapping[str, ServiceTime],
    table: tuple[Sequence[str], Iterable[Sequence[str]]],
) -> str:
    """Return the page.

    Args:
        source: description of the recording.
        outcomes: in the order of the table's rows.
        times: S(b) by model.
        table: headings, and cells of each outcome; the first names the scenario.
    """
    headings, rows = table[0], [list(row) for row in table[1]]
    names = [row[0] for row in rows]
    body = [
        "<h1>Simulated batching</h1>",
        f'<p class="about">{escape(source)}. {_ABOUT}</p>',
        "<h2>Latency</h2>",
        *_latencies(names, outcomes),
        "<h2>All figures</h2>",
        *_table(headings, rows),
        "<h2>Service time S(b)</h2>",
    ]
    for model, service_time in sorted(times.items()):
        body.append(f"<h3>{escape(model or 'all models')}</h3>")
        body.append(f"<p>{escape(str(service_time))}</p>")
        body += _curve(service_time)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>headrace replay simulate</title>\n<style>{STYLE}{_STYLE}</style>\n"
        "</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield '<div class="wide"><table>'
    yield from _row("th", headings)
    for row in rows:
        yield from _row("td", row)
    yield "</table></div>"


def _row(tag: str, cells: Iterable[str]) -> Iterator[str]:
    yield "<tr>" + "".join(f"<{tag}>{escape(each)}</{tag}>" for each in cells) + "</tr>"


def _latencies(names: Sequence[str], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a row for each scenario: its percentiles as dots on a log scale."""
    found = [each.latency_ms(share) for each in outcomes for share, _ in _SHOWN]
    known = [max(each, 1e-3) for each in found if math.isfinite(each)]
    if not known:
        yield "<p>No request was done in time.</p>"
        return
    low = math.floor(math.log10(min(known)))
    high = max(math.ceil(math.log10(max(known))), low + 1)
    height = _TOP + _ROW * len(outcomes) + _BOTTOM

    def across(value_ms: float) -> float:
        part = (math.log10(max(value_ms, 1e-3)) - low) / (high - low)
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    yield _svg(_WIDTH, height, "Latency percentiles of each scenario, in milliseconds")
    for exponent in range(low, high + 1):
        yield from _x_tick(across(10.0**exponent), height, f"{10.0**exponent:g} ms")
    for place, (name, outcome) in enumerate(zip(names, outcomes, strict=True)):
        yield from _dots(name, outcome, _TOP + _ROW * (place + 0.5), across)
    yield "</svg>"
    legend = "".join(
        f'<span><i class="s{place}"></i>{name}</span>' for place, (_, name) in enumerate(_SHOWN)
    )
    yield f'<p class="legend">{legend}</p>'


def _dots(name: str, outcome: Outcome, y: float, across: Callable[[float], float]) -> Iterator[str]:
    yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>'
    if not outcome.latencies_ms:
        return
    first, last = (across(outcome.latency_ms(share)) for share in (0.5, 0.99))
    yield f'<line class="bar" x1="{first:.1f}" x2="{last:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
    for share, label in _SHOWN:
        value_ms = outcome.latency_ms(share)
        yield (
            f'<circle class="{label}" cx="{across(value_ms):.1f}" cy="{y:.1f}" r="5">'
            f"<title>{label} {value_ms:.3g} ms</title></circle>"
        )


def _curve(service_time: ServiceTime) -> Iterator[str]:
    """Plot S over the batch size, with the known points."""
    largest = max((each.rows for each in service_time.points), default=32)
    sizes = sorted({1 + round(step * (largest - 1) / _CURVE_STEPS) for step in range(65)})
    highest = max(service_time(size) for size in (*sizes, largest)) * 1.05

    def place(rows: float, us: float) -> tuple[float, float]:
        x = 60 + (rows / largest) * (_CURVE_WIDTH - 60 - _RIGHT)
        return x, _TOP + (1 - us / highest) * (_CURVE_HEIGHT - _TOP - _BOTTOM)

    yield _svg(_CURVE_WIDTH, _CURVE_HEIGHT, "Service time over batch size")
    for rows in sorted({1, largest // 2 or 1, largest}):
        yield from _x_tick(place(rows, 0)[0], _CURVE_HEIGHT, f"{rows} rows")
    for part in (0.0, 0.5, 1.0):
        y = place(0, highest * part)[1]
        text = f"{highest * part / 1000:.3g} ms"
        yield f'<line class="grid" x1="60" x2="{_CURVE_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="54" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    path = " ".join("{:.1f},{:.1f}".format(*place(size, service_time(size))) for size in sizes)
    yield f'<polyline class="curve" points="{path}"/>'
    for each in service_time.points:
        x, y = place(each.rows, each.us)
        yield (
            f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="4">'
            f"<title>{each.rows} rows: {each.us:.0f} us, {each.seen} times</title></circle>"
        )
    yield "</svg>"


def _x_tick(x: float, height: float, text: str) -> Iterator[str]:
    bottom = height - _BOTTOM
    yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
    yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'


def _svg(width: float, height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'


# --- the table -----------------------------------------------------------------------------------


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


def cells(outcome: Outcome) -> list[str]:
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
