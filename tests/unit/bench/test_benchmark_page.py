"""The tables and plots that `make bench` makes of its results."""

from __future__ import annotations

import tempfile
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from benchmarks.contestants import (
    ALL_CORES,
    BARE,
    FASTSTREAM,
    FOUR,
    FUSED,
    LEARNING,
    OVERLAPPED,
    TRACED,
)
from benchmarks.page import BEGIN, END, with_tables
from benchmarks.plots import Line, plot_bars, plot_over_time, write_plot
from benchmarks.processes import without_directories
from benchmarks.results import (
    BusyCores,
    Contest,
    OpenLoopLatency,
    Results,
    Saturated,
    Stages,
    SubjectResults,
    Unloaded,
)
from benchmarks.soak import rise_mib
from benchmarks.stages import rows_per_run, stages_between
from benchmarks.tables import EXACTLY_ONCE, budgets, ratio, render


def contest(name: str, *per_s: float, failure: str = "") -> Contest:
    """Return a contest with a run for each rate."""
    runs = [Saturated(each, 10.0, 1.0, 100.0) for each in per_s]
    return Contest(name, "loop", runs, [failure] if failure else [])


def results(subject: SubjectResults) -> Results:
    """Return the results of one model."""
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
        contest(TRACED, 40.0, 80.0, 40.0),
        contest(FASTSTREAM, 5.0, 10.0, 5.0),
        contest(FOUR, 10.0),
    ],
    unloaded=Unloaded(1.0, 2.0, 0.5, 2.4, 9.0),
)


def test_benchmark_ratios_are_of_same_round() -> None:
    """The median over the rounds of one rate in the other, and not the ratio of medians."""
    assert ratio(DIGITS, FUSED, OVERLAPPED) == pytest.approx(0.6)
    assert ratio(DIGITS, EXACTLY_ONCE, FUSED) is None


def test_benchmark_budgets_are_judged() -> None:
    """A throughput must reach its share, a latency must not pass its factor."""
    found = budgets(DIGITS, 2)
    verdicts = [budget.row().split(" | ")[-1].strip(" |") for budget in found]

    assert [budget.found and round(budget.found, 2) for budget in found] == [
        *(0.6, 0.4, 8.0, None, 1.0, None, 1.6)
    ]
    assert verdicts == ["holds", "**missed**", "holds", "", "holds", "", "**missed**"]


COMPUTING = SubjectResults(
    "resnet50",
    "bound by computing",
    8,
    threads=1,
    contests=[
        contest(BARE, 100.0),
        contest(BARE + ALL_CORES, 200.0),
        contest(FUSED, 98.0),
        contest(LEARNING, 96.0),
        contest(FUSED + ALL_CORES, 180.0),
    ],
)


def test_benchmark_compares_computing_with_equal_threads() -> None:
    """The bare model with every core is only for who has every core; the broker's part is told."""
    found = budgets(COMPUTING, 2)

    assert [each.found for each in found] == pytest.approx([0.98, 0.96, 0.9, None])
    assert "batches of 8, 1 thread each" in found[0].name
    assert "takes 0.0%" in found[2].name


def test_benchmark_latency_parts_add_up() -> None:
    """Time that no stage accounts for is shown as the way of the answer to its reader."""
    latency = OpenLoopLatency(
        *(0.2, 100.0, 100.0, 5.0, 9.0, 9.9, 1.0, 0),
        mean_ms=6.0,
        late_mean_ms=0.5,
        stages=Stages(1.0, 1.5, 0.5, 1.0),
        cores=BusyCores(0.5, 0.4, 0.3, 0.2),
    )
    subject = SubjectResults("digits", "", 32, latencies=[latency])

    text = render(results(subject))
    assert "| 20% | 6.0 | 0.5 | 1.0 | 1.5 | 0.5 | 1.0 | 1.5 | 0.50 | 0.40 | 0.30 | 0.20 |" in text


@pytest.mark.parametrize(("late_ms", "on_time"), [(1.0, True), (20.0, False)])
def test_benchmark_load_sent_late_is_too_large(late_ms: float, on_time: bool) -> None:
    """A load sent late measures its own queue; answers that pile up do not make it late."""
    assert OpenLoopLatency(0.8, 100.0, 50.0, 1, 1, 1, late_ms, 0).on_time is on_time


def test_benchmark_stage_times_are_between_two_scrapes() -> None:
    """Means of what was counted meanwhile; the run is what the other stages leave of the whole."""

    def scraped(count: float, *sums: float) -> dict[str, float]:
        names = ("request_duration", "log_wait", "queue_wait", "answer_duration")
        found = {f"headrace_{name}_seconds_count": count for name in names}
        pairs = zip(names, sums, strict=True)
        return found | {f"headrace_{name}_seconds_sum": each for name, each in pairs}

    before = scraped(10, 1.0, 0.5, 0.1, 0.1)
    after = scraped(20, 1.1, 0.52, 0.13, 0.14)

    found = msgspec.structs.astuple(stages_between(before, after))
    assert found == pytest.approx((2.0, 3.0, 1.0, 4.0))
    assert stages_between(after, after) == Stages(0, 0, 0, 0)


def test_benchmark_rows_are_between_two_scrapes() -> None:
    """Nothing ran: none."""
    before = {"headrace_runs_total": 10.0, "headrace_rows_total": 100.0}
    after = {"headrace_runs_total": 20.0, "headrace_rows_total": 180.0}

    assert rows_per_run(before, after) == 8
    assert rows_per_run(after, after) == 0


def test_benchmark_table_has_row_for_every_contestant() -> None:
    """Each row has its range; a contestant that failed has its reason on one line."""
    text = render(results(DIGITS))

    assert f"| {FUSED} | 0.60 | 70.0 (60.0–100) |" in text
    assert f"| {EXACTLY_ONCE} | | it / ended | | | |" in text


def test_benchmark_tables_are_written_between_markers() -> None:
    """Text around the tables stays as it is; a page without marks is refused."""
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"

    assert with_tables(page, "new") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    with pytest.raises(ValueError, match="expected the marks"):
        with_tables("no marks", "new")


def test_benchmark_plots_show_every_contestant_and_capacity(tmp_path: Path) -> None:
    """Names and values are text of a well-formed file."""
    rows = [("a & b", "loop", (10.0, 10.0, 10.0)), ("c", "headrace", (1000.0, 900.0, 1100.0))]
    line = Line("answered in time", "good", [1.0, 2.0])
    texts = []
    for figure in (plot_bars(rows), plot_over_time([0.0, 1.0], [line], 5.0)):
        write_plot(tmp_path / "plot.svg", figure)
        root = ElementTree.fromstring((tmp_path / "plot.svg").read_text(encoding="utf-8"))
        texts.append({each.text for each in root.iter("{http://www.w3.org/2000/svg}text")})

    assert {"a & b", "c", "1,000"} <= texts[0]
    assert {"answered in time", "capacity"} <= texts[1]


def test_benchmark_finds_rise_of_memory() -> None:
    """The rise counts only samples after the warm-up."""
    steady = [(float(second), 500.0 if second < 100 else 100.0) for second in range(0, 1000, 10)]
    rising = [(float(second), 100.0 + second / 100) for second in range(0, 1000, 10)]

    assert rise_mib(steady) == pytest.approx(0.0, abs=1e-6)
    assert rise_mib(rising) == pytest.approx(6.0)


def test_benchmark_failures_name_no_machine_path() -> None:
    """Directories of the repository, the home and temporary files are left out of results."""
    text = f"{Path.cwd()}/a.py, {Path.home()}/b and {tempfile.gettempdir()}/c failed"

    assert without_directories(text) == "a.py, b and c failed"
