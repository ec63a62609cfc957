"""`headrace top`: what two looks make, and how that is written."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from headrace.cli.top import draw
from headrace.cli.top_figures import ProcessFigures, figures_of
from headrace.cli.top_status import Status
from headrace.cli.top_view import Table, fit, lines, shown, tables
from tests.support.command_line import Call
from tests.support.tree import ROOT

URL = "http://127.0.0.1:8080"
Answer = dict[str, Any]
Edit = Callable[[Answer], None]


def documented() -> Answer:
    """The answer that the page about health shows."""
    text = (ROOT / "docs" / "health.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(\{\n  \"version\".*?)```", text, flags=re.DOTALL)
    return dict(msgspec.json.decode(example))


def look(edit: Edit | None = None) -> Status:
    """An answer as top reads it; `edit` changes the documented one."""
    answer = documented()
    if edit:
        edit(answer)
    return msgspec.convert(answer, Status)


def two_seconds_later(answer: Answer) -> None:
    """64 requests in 2 batches have been answered, one of them too late."""
    answer["uptime_s"] += 2.0
    totals = answer["totals"]
    totals["requests"][0]["count"] += 63
    late = {"model": "digits", "version": "1", "outcome": "expired", "code": "DEADLINE_EXCEEDED"}
    totals["requests"].append(late | {"count": 1})
    totals["batches"][0]["count"] += 1
    totals["batches"].append({"model": "digits", "reason": "idle", "count": 1})
    totals["rows"][0]["count"] += 64
    totals["times"]["request_duration"][0]["count"] += 64
    totals["times"]["request_duration"][0]["seconds"] += 0.32
    totals["times"]["compute_duration"] = [{"model": "digits", "count": 2, "seconds": 0.002}]
    answer["sources"][0]["partitions"][0]["base"] += 70


def figures(edit: Edit = two_seconds_later) -> ProcessFigures:
    """Of the documented answer, and the edited one after it."""
    return figures_of(URL, look(), look(edit))


# --- two looks ---------------------------------------------------------------------------------


def test_documented_answer_is_one_that_top_reads() -> None:
    """The example in docs/health.md has every field with the right type."""
    assert look().stages == ["ingest", "batcher", "executor", "responder"]


def test_rates_are_differences_over_the_time_between() -> None:
    """Each stage has its own rate, per second of the process's clock."""
    stages = figures().stages

    assert stages["ingest"]["read_per_s"] == 35.0
    assert stages["batcher"]["batches_per_s"] == 1.0
    assert stages["executor"]["rows_per_s"] == 32.0
    assert stages["responder"]["answers_per_s"] == 32.0
    assert stages["responder"]["expired_per_s"] == 0.5


def test_means_are_those_between_the_looks() -> None:
    """What was before the first look does not count."""
    stages = figures().stages

    assert stages["responder"]["end_to_end_s"] == pytest.approx(0.005)
    assert stages["executor"]["rows_of_a_run"] == 32.0
    assert stages["executor"]["run_s"] == pytest.approx(0.001)


def test_a_version_that_failed_has_no_rows() -> None:
    """What the other version of its model runs is not shown as its own."""

    def second(answer: Answer) -> None:
        two_seconds_later(answer)
        failed = {"name": "digits", "version": "2", "state": "failed", "reason": "no such file"}
        answer["models"].append(failed)

    first, other = figures(second).models

    assert (first.figures["answers_per_s"], first.figures["rows_per_s"]) == (32.0, 32.0)
    assert (other.figures["answers_per_s"], other.figures["rows_per_s"]) == (0.0, None)
    assert other.remarks == ["no such file"]


def test_reasons_are_shares_of_the_batches_between_the_looks() -> None:
    """One was full and one was idle."""
    assert figures().closed == {"full": 0.5, "idle": 0.5}


def test_one_look_makes_no_rates() -> None:
    """What stands is known at once, what moves is not."""
    first = figures_of(URL, None, look())

    assert first.stages["responder"]["answers_per_s"] is None
    assert first.stages["ingest"]["backlog"] == 1200


def test_a_restart_makes_no_rates() -> None:
    """Counters that begin anew would make rates below zero."""

    def restarted(answer: Answer) -> None:
        answer |= {"started_at": "2026-02-01T00:00:00.000Z", "uptime_s": 1.0}

    assert figures(restarted).stages["responder"]["answers_per_s"] is None


def test_a_new_assignment_is_no_reading() -> None:
    """A partition that comes back under another epoch begins elsewhere."""

    def reassigned(answer: Answer) -> None:
        two_seconds_later(answer)
        answer["sources"][0]["partitions"][0] |= {"epoch": 2, "base": 900_000}

    assert figures(reassigned).stages["ingest"]["read_per_s"] is None


def test_only_the_stages_of_the_process_are_shown() -> None:
    """A process with an executor says nothing of answers."""

    def executor_only(answer: Answer) -> None:
        answer |= {"stages": ["executor"], "waiting": None}

    assert list(figures_of(URL, None, look(executor_only)).stages) == ["executor"]


@pytest.mark.parametrize(
    ("change", "condition"),
    [
        ({}, "ready"),
        ({"ready": {"ready": False, "reason": "no broker"}}, "not ready: no broker"),
        ({"live": {"live": False, "reason": "reader: 61 s"}}, "ready, stuck: reader: 61 s"),
        ({"phase": "draining", "ready": {"ready": False, "reason": ""}}, "draining"),
    ],
)
def test_condition_says_what_is_wrong(change: Answer, condition: str) -> None:
    """The phase, and beside it what keeps the process from being live and ready."""
    assert figures_of(URL, None, look(lambda answer: answer.update(change))).condition == condition


# --- the view ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("answers_per_s", 70_512.4, "70,512/s"),
        ("rows_of_a_run", 4.666, "4.67"),
        ("queue_wait_s", 0.0, "0"),
        ("queue_wait_s", 0.000_25, "250 µs"),
        ("queue_wait_s", 0.0125, "12.5 ms"),
        ("nearest_deadline_s", -0.5, "-500 ms"),
        ("uptime_s", 90, "90 s"),
        ("uptime_s", 5400, "90 min"),
        ("uptime_s", 86_400, "24 h"),
        ("in_flight_bytes", 0, "0 B"),
        ("in_flight_bytes", 1536, "1.50 KiB"),
        ("limit_bytes", 268_435_456, "256 MiB"),
        ("backlog", None, "–"),
    ],
)
def test_figures_are_written_in_their_unit(name: str, value: float | None, text: str) -> None:
    """The end of a figure's name says what it is."""
    assert shown(name, value) == text


def test_processes_with_a_stage_stand_in_one_table() -> None:
    """Two processes are two rows; one that does not answer says why."""
    gone = ProcessFigures(url="http://127.0.0.1:8081", fault="no answer within 5 s")
    made = {table.title: table for table in tables([figures(), figures(), gone])}

    assert len(made["responder"].rows) == 2
    assert [row[0] for row in made["headrace top"].rows] == [URL, URL, gone.url]
    assert made["headrace top"].rows[2][1] == gone.fault


def test_every_row_has_a_cell_for_each_head() -> None:
    """No table is ragged."""
    for table in tables([figures()]):
        assert {len(row) for row in table.rows} == {len(table.heads)}


def test_the_newest_errors_come_first_and_rule_no_terminal() -> None:
    """Escape sequences in a message are shown as what they are not."""

    def failing(answer: Answer) -> None:
        entry = answer["last_errors"][0]
        newer = {"time": "2026-02-01T00:00:00.000Z", "reason": "\x1b[2Jgone\n", "trace_id": None}
        answer["last_errors"].append(entry | newer)

    (table,) = [one for one in tables([figures(failing)]) if one.title == "last errors"]

    assert table.rows[0][4] == r"\x1b[2Jgone\n"
    assert table.rows[1][5] == "4bf92f3577b34da6a3ce929d0e0e4736"


def test_error_of_a_request_is_shown_by_code_and_place() -> None:
    """Its message may quote the caller, and is in no log."""
    (table,) = [one for one in tables([figures()]) if one.title == "last errors"]

    assert table.rows[0][4] == "INVALID_TENSOR 0/4711"


@pytest.mark.parametrize("height", [24, 40, 60, 200])
def test_six_processes_fit_the_screen(height: int) -> None:
    """Drawn by rich, line by line, even where each process has all stages."""
    processes = [replace(figures(), url=f"http://10.0.0.{number}:8080") for number in range(6)]
    console = Console(width=100, height=height, file=io.StringIO())

    drawn = console.render_lines(draw(fit(tables(processes), height)), pad=False)

    assert len(drawn) <= height
    text = "\n".join("".join(part.text for part in line) for line in drawn)
    assert text.count(":8080") >= min(6, height // 5)
    assert ("more" in text) == (height < 60)
    assert all(head in text for head in ("responder", "models", "reading", "last errors"))


def test_columns_of_plain_lines_stand_under_each_other() -> None:
    """Numbers are set to the right, text to the left."""
    table = Table(
        "title", ("name", "rate"), [("a", "1/s"), ("long name", "1,000/s")], frozenset({1})
    )

    assert lines([table]) == [
        "title",
        "  name          rate",
        "  a              1/s",
        "  long name  1,000/s",
    ]


# --- the command -------------------------------------------------------------------------------


def test_an_address_that_is_none_is_refused(call: Call) -> None:
    """A wrong --url is wrong usage, and says what was expected."""
    ended = call("top", "--once", "--url", "127.0.0.1:8080")

    assert ended.exit_code == 2
    assert "expected http://HOST:PORT, got '127.0.0.1:8080'" in ended.stderr
