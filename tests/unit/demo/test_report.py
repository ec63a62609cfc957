"""Output of the demo, while it runs and at its end."""

from __future__ import annotations

from headrace.tools.demo.report import live_line, report
from headrace.tools.demo.tally import LiveStats, Tally
from tests.unit.demo.examples import answer, count, question, wrong_question

STATS = LiveStats(3.0, 1234, 1230, 4, 410.4, 5.25, 32, 1.5, 2.25, 9.75)


def _counted() -> Tally:
    tally = Tally()
    for _ in range(4):
        count(tally, question(), answer(batch_size=4, queue_us=1500), 0.010)
    wrong = wrong_question("UNKNOWN_MODEL")
    count(tally, wrong, answer(status="UNKNOWN_MODEL"), 0.010)
    tally.dead_letter(wrong, "UNKNOWN_MODEL")
    return tally


def test_report_ends_with_verdict() -> None:
    """When all is well, the last line says so."""
    assert report(_counted().result())[-1] == (
        "Every request was answered once: 5 answers, 1 of them expected errors."
    )


def test_report_ends_with_faults() -> None:
    """Each fault has a line."""
    tally = _counted()
    tally.send(question())
    assert report(tally.result())[-2:] == [
        "Faults",
        "  requests without an answer: 1",
    ]


def test_report_shows_expected_error_with_message() -> None:
    """Subject, code, dead letters and message are there."""
    lines = report(_counted().result())
    at = next(at for at, line in enumerate(lines) if "UNKNOWN_MODEL" in line)
    assert "dead letters: 1" in lines[at]
    assert lines[at + 1].strip() == "what was wrong"


def test_report_of_empty_run_is_written() -> None:
    """Nothing sent, nothing answered, no division by zero."""
    assert report(Tally().result())


def test_live_line_shows_current_figures() -> None:
    """Names and values in one line."""
    assert " ".join(live_line(STATS).split()) == (
        "time 3.0 s sent 1,234 answered 1,230 in flight 4 answers/s 410 batch mean 5.2 max 32 "
        "queue 1.50 ms p50 2.25 ms p99 9.75 ms"
    )
