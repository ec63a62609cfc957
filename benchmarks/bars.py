"""A plot of throughputs as SVG: a bar for each contestant, on a logarithmic scale; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

WIDTH, ROW, LEFT, RIGHT, TOP, BOTTOM = 760, 26, 270, 90, 10, 30
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.grid { stroke: #d0d7de; stroke-width: 1 }
.loop { fill: #8c959f } .framework { fill: #bf8700 } .bare { fill: #57606a }
.headrace { fill: #0969da }
.range { stroke: #24292f; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .grid { stroke: #30363d } .range { stroke: #e6edf3 }
  .headrace { fill: #4493f8 } .loop { fill: #6e7681 }
}
"""


def bars(rows: Sequence[tuple[str, str, tuple[float, float, float]]]) -> str:
    """The plot.

    Args:
        rows: name, family (its colour), and median, lowest and highest value.
    """
    low = math.floor(math.log10(min(values[1] for _, _, values in rows)))
    high = math.ceil(math.log10(max(values[2] for _, _, values in rows)))
    high = max(high, low + 1)

    def x_of(value: float) -> float:
        part = (math.log10(value) - low) / (high - low)
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    height = TOP + ROW * len(rows) + BOTTOM
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">']
    parts.append(f"<style>{STYLE}</style>")
    for exponent in range(low, high + 1):
        rate = 10.0**exponent
        x = x_of(rate)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
            f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle">{rate:,.0f}/s</text>'
        )
    for number, row in enumerate(rows):
        parts += _bar(TOP + ROW * number, row, (x_of(row[2][0]), x_of(row[2][1]), x_of(row[2][2])))
    return "\n".join([*parts, "</svg>\n"])


def _bar(
    y: float, row: tuple[str, str, tuple[float, float, float]], at: tuple[float, float, float]
) -> Iterator[str]:
    name, family, values = row
    middle = y + ROW / 2
    yield f'<text x="{LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(name)}</text>'
    yield (
        f'<rect class="{escape(family)}" x="{LEFT}" y="{y + 4:.1f}" '
        f'width="{max(at[0] - LEFT, 1):.1f}" height="{ROW - 8}"/>'
    )
    yield (
        f'<line class="range" x1="{at[1]:.1f}" x2="{at[2]:.1f}" '
        f'y1="{middle:.1f}" y2="{middle:.1f}"/>'
    )
    yield f'<text x="{at[2] + 6:.1f}" y="{middle + 4:.1f}">{values[0]:,.0f}</text>'
