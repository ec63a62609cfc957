"""The options of `headrace dlq`, and what it prints."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import click
import pytest

from headrace.cli.dlq import POSITION, WHEN, Newest, Position, counts_lines, table, tally_lines
from headrace.cli.outcome import Exit
from headrace.tools.dead_letters import DeadLetterSelection, RedriveJob, RedriveResult
from headrace.tools.dead_letters.dead_letter import RecordIdentity
from tests.support.command_line import Call


@pytest.mark.parametrize(
    ("text", "place"),
    [("1/7", Position(None, 1, 7)), ("a.dead-letters/0/12", Position("a.dead-letters", 0, 12))],
)
def test_letter_place_is_read_with_and_without_topic(text: str, place: Position) -> None:
    """The place has the form that lists print."""
    assert POSITION.convert(text, None, None) == place


@pytest.mark.parametrize("text", ["7", "a/b", "x/1/2/3", "1/-7", ""])
def test_invalid_letter_place_is_refused(text: str) -> None:
    """The error names the expected form."""
    with pytest.raises(click.BadParameter, match="PARTITION/OFFSET"):
        POSITION.convert(text, None, None)


@pytest.mark.parametrize(
    "text",
    ["1769860800000", "2026-01-31T12:00:00Z", "2026-01-31T13:00+01:00", "2026-01-31T12:00:00"],
)
def test_letter_time_is_read_in_all_forms(text: str) -> None:
    """A time without a zone is UTC."""
    assert WHEN.convert(text, None, None) == 1_769_860_800_000


def test_letter_time_accepts_duration_ago() -> None:
    """The duration is of seconds, minutes, hours or days."""
    then = datetime.fromtimestamp(WHEN.convert("2h", None, None) / 1000, UTC)

    assert timedelta(0) <= datetime.now(UTC) - then - timedelta(hours=2) < timedelta(minutes=1)


@pytest.mark.parametrize(
    ("text", "said"),
    [("yesterday", "2026-05-01T12:00:00Z.*2h"), ("1769860800", "1769860800, .* a time of 1970")],
)
def test_invalid_letter_time_is_refused(text: str, said: str) -> None:
    """The error gives an example; seconds are taken for no milliseconds."""
    with pytest.raises(click.BadParameter, match=said):
        WHEN.convert(text, None, None)


def test_letter_list_columns_fit_their_content() -> None:
    """Long messages are cut, line breaks taken out."""
    row = {
        "letter": "t/0/1",
        "time": "-",
        "code": "TOO_LARGE",
        "model": "",
        "stage": "ingest",
        "attempt": 1,
        "redriven": True,
        "message": "first\nsecond " + "x" * 80,
    }

    heading, line = table([row])

    assert heading.index("code") == line.index("TOO_LARGE")
    assert line.endswith("yes       first second " + "x" * 46 + "…")


def test_letter_list_escapes_control_characters() -> None:
    """A caller's model name or message must not move the cursor."""
    names = ("letter", "time", "code", "model", "stage", "attempt", "redriven", "message")

    _, line = table([dict.fromkeys(names, "a\x1b[2Jb")])

    assert line.split("  ") == [r"a\x1b[2Jb"] * len(names)


def test_newest_letters_are_kept_in_order_of_time() -> None:
    """The order does not depend on that in which partitions are read."""
    newest = Newest(3)
    for time_ms in (50, 10, 40, 20, 50):
        newest.add(time_ms, {"time": time_ms})

    assert [row["time"] for row in newest.rows()] == [40, 50, 50]


def test_letters_are_counted_by_code() -> None:
    """The summary says how many letters are not shown."""
    (line,) = counts_lines(Counter(TOO_LARGE=3, INVALID_TENSOR=1), shown=2)

    assert line == "4 dead letters: TOO_LARGE 3, INVALID_TENSOR 1; 2 not shown"


def test_redrive_prints_outcome_of_letters() -> None:
    """Nothing that was left out goes unsaid."""
    tally = RedriveResult(Counter(TOO_LARGE=2), 1, 3, 2, [(RecordIdentity("t", 0, 4), "too large")])

    assert list(tally_lines(tally, RedriveJob(dry_run=True))) == [
        "2 would be sent: TOO_LARGE 2",
        "1 passed over: redriven before",
        "3 left where they are: transform gave None",
        "2 without their x-deadline-ms, which has passed",
        "refused t/0/4: too large",
    ]


def test_discarding_says_nothing_of_deadlines() -> None:
    """No request was sent, with or without one."""
    lines = tally_lines(RedriveResult(Counter(TOO_LARGE=1), 0, 0, 1), RedriveJob(discard=True))

    assert list(lines) == ["1 discarded: TOO_LARGE 1"]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, ["1 of the positions given have no dead letter that is selected"]), (1, [])],
)
def test_redrive_says_how_many_positions_have_no_letter(
    limit: int | None, expected: list[str]
) -> None:
    """A mistyped position would seem to be done. A limit leaves some that are there."""
    selection = DeadLetterSelection(positions=frozenset({(0, 1), (0, 2), (7, 3)}))
    tally = RedriveResult(Counter(TOO_LARGE=1), done_before=1)

    lines = list(tally_lines(tally, RedriveJob(selection, limit=limit)))

    assert lines[2:] == expected


@pytest.mark.parametrize("command", ["list", "redrive", "export"])
def test_letter_code_that_no_letter_has_is_refused(call: Call, command: str) -> None:
    """A mistyped code would select nothing, which looks as if there were no dead letters."""
    result = call("dlq", command, "--code", "TO_LARGE")

    assert result.exit_code == Exit.USAGE
    assert "TOO_LARGE" in result.stderr


def test_dead_letters_with_embedded_log_are_refused(call: Call) -> None:
    """The embedded log's end with its process, which is told."""
    result = call("dlq", "list")

    assert result.exit_code == Exit.USAGE
    assert "kafka.bootstrap_servers" in result.stderr


def test_letter_of_another_topic_is_refused(call: Call) -> None:
    """Its offset would mean another letter here."""
    result = call("dlq", "show", "other/0/1")

    assert result.exit_code == Exit.USAGE
    assert "expected a dead letter of headrace.dead-letters, got one of other" in result.stderr


@pytest.mark.parametrize("command", ["list", "redrive", "export"])
def test_period_that_ends_before_it_begins_is_refused(call: Call, command: str) -> None:
    """It selected nothing, which looks as if there were no dead letters."""
    result = call("dlq", command, "--since", "5m", "--until", "1h")

    assert result.exit_code == Exit.USAGE
    assert "--until: expected a time after --since" in result.stderr


def test_export_to_output_and_capture_is_refused(call: Call) -> None:
    """One of the files would not be written."""
    result = call("dlq", "export", "--output", "a.jsonl", "--capture", "b.capture")

    assert result.exit_code == Exit.USAGE
    assert "give either --output or --capture" in result.stderr


def test_discard_and_transform_together_are_refused(call: Call) -> None:
    """Nothing is sent that could be transformed."""
    result = call("dlq", "redrive", "--discard", "--transform", __file__)

    assert result.exit_code == Exit.USAGE
    assert "--discard" in result.stderr
