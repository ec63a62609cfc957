"""Writing of the tables and plots of docs/performance.md."""

from __future__ import annotations

from pathlib import Path

from benchmarks.plots import plot_bars, write_plot
from benchmarks.results import Results
from benchmarks.tables import render

PAGE = Path("docs/performance.md")
IMAGES = Path("docs/images")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def with_tables(page: str, tables: str) -> str:
    """Return the page with the tables between its marks replaced. Raises `ValueError` without
    marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"page: expected the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def write_page(results: Results) -> None:
    """Write the tables between the marks of the page, and the plots beside it."""
    PAGE.write_text(
        with_tables(PAGE.read_text(encoding="utf-8"), render(results)), encoding="utf-8"
    )
    for subject in results.subjects:
        rows = [
            (contest.name, contest.family, spread)
            for contest in subject.contests
            if (spread := contest.spread("per_s")) is not None
        ]
        if rows:
            write_plot(IMAGES / f"performance-{subject.name}.svg", plot_bars(rows))
