"""Plots as inline SVG: a distribution as steps, and a histogram of magnitudes. Pure.

Text and colours come from the page's style (`style`), so they fit both colour schemes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 22, 12, 38
POINTS = 200
LOWEST_EXPONENT, HIGHEST_EXPONENT = -9, 3

Values = NDArray[np.float64]


def cumulative(series: Mapping[str, Sequence[int]], title: str) -> str:
    """Plot the share of answers within a time, for each series, over microseconds
    on a log scale.
    """
    sorted_series = {
        name: np.sort(np.maximum(np.asarray(values, dtype=np.float64), 1.0))
        for name, values in series.items()
        if len(values)
    }
    if not sorted_series:
        return ""
    low = math.floor(math.log10(min(float(each[0]) for each in sorted_series.values())))
    high = math.ceil(math.log10(max(float(each[-1]) for each in sorted_series.values())))
    high = max(high, low + 1)

    def x_of(value_us: float) -> float:
        return _across((math.log10(value_us) - low) / (high - low))

    parts = [*_frame(title, "share of answers")]
    for exponent in range(low, high + 1):
        parts += _x_tick(x_of(10.0**exponent), _time_text(10.0**exponent))
    for share in (0.0, 0.5, 0.9, 1.0):
        parts += _y_tick(share, f"{share:.0%}")
    for colour, values in zip(_colours(sorted_series), sorted_series.values(), strict=True):
        parts.append(_line(_steps(values, x_of), colour))
    return _svg(title, parts) + _legend(sorted_series)


def magnitudes(series: Mapping[str, Sequence[float]], title: str, limit: float | None) -> str:
    """Plot the number of requests by size of difference, for each series; equal ones are at the
    left.
    """
    counts = {name: _bins(values) for name, values in series.items() if len(values)}
    if not counts:
        return ""
    bins = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
    highest = max(float(each.max()) for each in counts.values())
    parts = [*_frame(title, "share of requests")]
    parts += _x_tick(_across(0.5 / bins), "equal")
    for exponent in range(LOWEST_EXPONENT + 3, HIGHEST_EXPONENT, 3):
        parts += _x_tick(_across((exponent - LOWEST_EXPONENT + 1) / bins), f"1e{exponent}")
    for share in (0.0, 0.5, 1.0):
        parts += _y_tick(share, f"{share * highest:.0%}")
    width = (WIDTH - LEFT - RIGHT) / bins / (len(counts) + 0.5)
    for number, (colour, shares) in enumerate(zip(_colours(counts), counts.values(), strict=True)):
        for place, share in enumerate(shares):
            if share:
                height = (HEIGHT - TOP - BOTTOM) * float(share) / highest
                x = _across(place / bins) + number * width
                parts.append(
                    f'<rect class="{colour}" x="{x:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" '
                    f'width="{width:.1f}" height="{height:.1f}"/>'
                )
    if limit is not None and limit > 0:
        decade = min(max(math.log10(limit) - LOWEST_EXPONENT + 1, 0), bins)
        x = _across(decade / bins)
        parts.append(
            f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text x="{x - 4:.1f}" y="{TOP + 10}" text-anchor="end">allowed</text>'
        )
    return _svg(title, parts) + _legend(counts)


def _bins(values: Sequence[float]) -> Values:
    """Return the share of zeros, and of values per decade from the lowest exponent on."""
    found = np.asarray(values, dtype=np.float64)
    counts = np.zeros(HIGHEST_EXPONENT - LOWEST_EXPONENT + 1)
    counts[0] = np.count_nonzero(found == 0)
    rest = found[found != 0]
    clipped = np.clip(rest, 10.0**LOWEST_EXPONENT, 10.0**HIGHEST_EXPONENT * 0.99)
    decades = np.floor(np.log10(clipped)).astype(int)
    np.add.at(counts, decades - LOWEST_EXPONENT + 1, 1)
    shares: Values = counts / found.size
    return shares


def _steps(values: Values, x_of: Callable[[float], float]) -> list[tuple[float, float]]:
    places = np.unique(np.linspace(0, values.size - 1, min(POINTS, values.size)).astype(int))
    return [(x_of(float(values[place])), _up((int(place) + 1) / values.size)) for place in places]


def _across(part: float) -> float:
    return LEFT + part * (WIDTH - LEFT - RIGHT)


def _up(part: float) -> float:
    return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{colour}" points="{path}"/>'


def _colours(names: Iterable[str]) -> list[str]:
    """Assign colours; the candidate has the same one in every plot."""
    return ["s2" if name == "candidate" else f"s{number}" for number, name in enumerate(names)]


def _frame(title: str, y_title: str) -> Iterator[str]:
    yield (
        f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">'
        f"{escape(title)}</text>"
        f'<text transform="translate(10 {HEIGHT / 2 - 12}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_title)}</text>"
    )


def _x_tick(x: float, text: str) -> Iterator[str]:
    yield (
        f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{text}</text>'
    )


def _y_tick(part: float, text: str) -> Iterator[str]:
    y = _up(part)
    yield (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _svg(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg>"
    )


def _legend(names: Mapping[str, object]) -> str:
    entries = "".join(
        f'<span><i class="{colour}"></i>{escape(name)}</span>'
        for colour, name in zip(_colours(names), names, strict=True)
    )
    return f'<p class="legend">{entries}</p>'


def _time_text(value_us: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if value_us >= size:
            return f"{value_us / size:g} {unit}"
    return f"{value_us:g} µs"
