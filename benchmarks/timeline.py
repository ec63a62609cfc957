"""A plot of rates over time as SVG, with a level that they are held against; pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 300, 70, 20, 30, 40
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.grid { stroke: #d0d7de; stroke-width: 1 }
polyline { fill: none; stroke-width: 2 }
.good { stroke: #0969da } .refused { stroke: #bf8700 } .expired { stroke: #cf222e }
.level { stroke: #24292f; stroke-width: 1; stroke-dasharray: 5 4 }
text.good { fill: #0969da; stroke: none } text.refused { fill: #bf8700; stroke: none }
text.expired { fill: #cf222e; stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .grid { stroke: #30363d } .level { stroke: #e6edf3 }
}
"""


class Line(NamedTuple):
    """One line: what it is called, its class in the style, and a value for each moment."""

    name: str
    family: str
    values: Sequence[float]


def timeline(seconds: Sequence[float], lines: Sequence[Line], level: float) -> str:
    """The plot.

    Args:
        seconds: the moments, ascending.
        lines: at least one.
        level: drawn across, such as a capacity.
    """
    highest = 1.1 * max(level, *(max(line.values) for line in lines))
    last = max(seconds[-1], 1e-9)

    def x_of(second: float) -> float:
        return LEFT + second / last * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - value / highest * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        f"<style>{STYLE}</style>",
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y, x, rate = y_of(share * highest), x_of(share * last), share * highest
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{rate:,.0f}/s</text>'
            f'<text x="{x:.1f}" y="{HEIGHT - 18}" text-anchor="middle">{share * last:.0f} s</text>'
        )
    y = y_of(level)
    parts.append(
        f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{WIDTH - RIGHT}" y="{y - 6:.1f}" text-anchor="end">capacity</text>'
    )
    for number, line in enumerate(lines):
        points = " ".join(
            f"{x_of(second):.1f},{y_of(value):.1f}"
            for second, value in zip(seconds, line.values, strict=True)
        )
        parts.append(
            f'<polyline class="{line.family}" points="{points}"/>'
            f'<text class="{line.family}" x="{LEFT + 160 * number}" y="18">'
            f"{escape(line.name)}</text>"
        )
    return "\n".join([*parts, "</svg>\n"])
