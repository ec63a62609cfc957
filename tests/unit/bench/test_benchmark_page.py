"""The tables and plots that `make bench` makes of its results."""

from __future__ import annotations

import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.bars import bars
from benchmarks.contestants import BARE, FUSED, OVERLAPPED
from benchmarks.page import BEGIN, END, with_tables
from benchmarks.processes import without_directories
from benchmarks.results import Contest, Results, Saturated, SubjectResults, Unloaded
from benchmarks.soak import rise_mib
from benchmarks.tables import EXACTLY_ONCE, budgets, ratio, render


def contest(name: str, *per_s: float, failure: str = "") -> Contest:
    """With a run for each rate."""
    runs = [Saturated(each, 10.0, 1.0, 100.0) for each in per_s]
    return Contest(name, "loop", runs, [failure] if failure else [])


def results(subject: SubjectResults) -> Results:
    """Of one model."""
    machine = {
        "commit": "abc",
        "cores": 2,
        "cpu": "a processor",
        "memory_gib": 4,
        "kernel": "6",
        "python": "3.11",
        "packages": {"numpy": "2"},
    }
    return Results("2026-01-01", machine, 3, 5.0, (0.1, 0.2), [subject])


DIGITS = SubjectResults(
    "digits",
    "bound by overhead",
    32,
    contests=[
        contest(BARE, 1e6, 1e6, 1e6),
        contest(OVERLAPPED, 100.0, 200.0, 100.0),
        contest(FUSED, 60.0, 100.0, 70.0),
        contest(EXACTLY_ONCE, failure="it | ended\nwith 1"),
    ],
    unloaded=Unloaded(1.0, 2.0, 0.5, 2.4, 9.0),
)


def test_ratios_are_of_the_same_round() -> None:
    """The median over the rounds of one rate in the other, and not the ratio of medians."""
    assert ratio(DIGITS, FUSED, OVERLAPPED) == pytest.approx(0.6)
    assert ratio(DIGITS, EXACTLY_ONCE, FUSED) is None


def test_budgets_are_judged() -> None:
    """A throughput must reach its share, a latency must not pass its factor."""
    rows = [budget.row() for budget in budgets(DIGITS)]

    assert ["holds" in row for row in rows] == [True, False, False]
    assert "not measured" in rows[1]
    assert "**missed**" in rows[2]


def test_every_contestant_has_its_row() -> None:
    """With its range; one that failed says why, in the one line that a cell has."""
    text = render(results(DIGITS))

    assert f"| {FUSED} | 0.60 | 70.0 (60.0–100) |" in text
    assert f"| {EXACTLY_ONCE} | | it / ended | | | |" in text


def test_tables_go_between_the_marks() -> None:
    """What stands around them stays; a page without marks is refused."""
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"

    assert with_tables(page, "new") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    with pytest.raises(ValueError, match="expected the marks"):
        with_tables("no marks", "new")


def test_bars_are_well_formed_and_as_long_as_their_values() -> None:
    """On a logarithmic scale, one for each contestant, names escaped."""
    rows = [("a & b", "loop", (10.0, 10.0, 10.0)), ("c", "headrace", (1000.0, 900.0, 1100.0))]
    root = ElementTree.fromstring(bars(rows))
    widths = [float(each.get("width", "0")) for each in root.iter() if each.tag.endswith("rect")]

    assert len(widths) == 2
    assert widths[0] < widths[1]
    assert "a & b" in "".join(root.itertext())


def test_a_rise_of_memory_is_found() -> None:
    """By what comes after the warm-up alone."""
    steady = [(float(second), 500.0 if second < 100 else 100.0) for second in range(0, 1000, 10)]
    rising = [(float(second), 100.0 + second / 100) for second in range(0, 1000, 10)]

    assert rise_mib(steady) == pytest.approx(0.0, abs=1e-6)
    assert rise_mib(rising) == pytest.approx(6.0)


def test_failures_name_nothing_of_the_machine() -> None:
    """Where the repository, the home and temporary files are is left out of results."""
    text = f"{Path.cwd()}/a.py, {Path.home()}/b and {tempfile.gettempdir()}/c failed"

    assert without_directories(text) == "a.py, b and c failed"
