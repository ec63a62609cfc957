"""Plots of the pages, as SVG files: throughputs as bars, and rates over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    **{"loop": "#8c959f", "framework": "#bf8700", "bare": "#57606a", "headrace": "#0969da"},
    **{"good": "#0969da", "refused": "#bf8700", "expired": "#cf222e"},
}


class Line(NamedTuple):
    """A line of a plot over time: its name, the key of its colour, and its values."""

    name: str
    family: str
    values: Sequence[float]


def plot_bars(rows: Sequence[tuple[str, str, tuple[float, float, float]]]) -> Figure:
    """Plot rates on a log scale.

    Args:
        rows: name, family (its colour), and median, lowest and highest value.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.6 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    names = [name for name, _, _ in rows]
    medians = [values[0] for _, _, values in rows]
    ranges = [[value - low for _, _, (value, low, _) in rows]]
    ranges.append([high - value for _, _, (value, _, high) in rows])
    colours = [COLOURS[family] for _, family, _ in rows]
    bars = axes.barh(names, medians, xerr=ranges, color=colours, log=True)
    axes.bar_label(bars, [f"{median:,.0f}" for median in medians], padding=6)
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xlabel("requests per second")
    return figure


def plot_over_time(seconds: Sequence[float], lines: Sequence[Line], level: float) -> Figure:
    """Plot rates over time, and the capacity `level`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for line in lines:
        axes.plot(seconds, line.values, color=COLOURS[line.family], label=line.name)
    axes.axhline(level, color="#24292f", linestyle="--", linewidth=1, label="capacity")
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests per second")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def write_plot(path: Path, figure: Figure) -> None:
    """Write an SVG file; equal figures give equal files."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "headrace"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
