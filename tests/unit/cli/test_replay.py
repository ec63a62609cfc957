"""Questions, output and refusals of `headrace replay`, which reads capture files here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import Exit
from headrace.cli.selection_options import parse_header, parse_offsets, parse_time_ms
from headrace.tools.replay.capture import CaptureWriter, read_contents
from tests.support.command_line import Call
from tests.support.models import add_version, digits
from tests.support.recordings import START_MS, recorded


@pytest.fixture
def capture(tmp_path: Path) -> str:
    """Write ten records in two partitions, ten milliseconds apart."""
    path = tmp_path / "requests.capture"
    with CaptureWriter(path, "recorded") as writer:
        writer.add([recorded(number, spacing_ms=10) for number in range(10)])
    return str(path)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1700000000000", 1_700_000_000_000),
        ("0", 0),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000),
        ("2023-11-14T22:13:20.5", 1_700_000_000_500),
        ("2023-11-14 23:13:20+01:00", 1_700_000_000_000),
    ],
)
def test_replay_times_are_iso_or_epoch_milliseconds(text: str, ms: int) -> None:
    """An ISO time without an offset is in UTC."""
    assert parse_time_ms(text) == ms


def test_replay_offsets_are_for_all_or_one_partition() -> None:
    """Both forms may be given together."""
    assert parse_offsets(("7", "2:9")) == {None: 7, 2: 9}


@pytest.mark.parametrize("texts", [("x",), ("1:",), (":1",), ("a:1",), ("-1",), ("1:2", "1:3")])
def test_invalid_replay_offsets_are_refused(texts: tuple[str, ...]) -> None:
    """The error names the expected form."""
    with pytest.raises(ValueError, match="expected"):
        parse_offsets(texts)


def test_replay_header_is_split_at_first_equals_sign() -> None:
    """Values may have further ones."""
    assert parse_header("a=b=c") == ("a", b"b=c")


def test_replay_count_is_by_partition(call: Call, capture: str) -> None:
    """Records, bytes, offsets and time, of what is selected, and in all."""
    result = call("replay", "count", "--file", capture, "--limit", "5")
    lines = result.stdout.splitlines()
    assert result.exit_code == Exit.DONE
    assert lines[0].startswith("recorded/0: 3 records, ")
    assert "offsets 0 to 1, 0.020 s from 2023-11-14T22:13:20.010Z" in lines[1]
    assert lines[2].startswith("in all: 5 records, ")


def test_replay_count_shows_timestamps_that_are_no_dates(call: Call, tmp_path: Path) -> None:
    """A producer that stamps its records in microseconds is a common fault."""
    path = tmp_path / "requests.capture"
    with CaptureWriter(path, "recorded") as writer:
        writer.add([recorded(0, timestamp=START_MS * 1000)])
    result = call("replay", "count", "--file", str(path))
    assert result.exit_code == Exit.DONE, result.stderr
    assert f"from {START_MS * 1000} ms since 1970" in result.stdout


def test_replay_key_that_is_not_utf8_selects_by_its_bytes(call: Call, tmp_path: Path) -> None:
    """Keys are bytes, as the shell passes them."""
    path = tmp_path / "requests.capture"
    with CaptureWriter(path, "recorded") as writer:
        writer.add([recorded(0, key=b"\xff"), recorded(1)])
    result = call("replay", "count", "--file", str(path), "--key", "\udcff")
    assert result.exit_code == Exit.DONE, result.stderr
    assert "in all: 1 records" in result.stdout


def test_replay_count_escapes_control_characters(call: Call, tmp_path: Path) -> None:
    """A capture file may come from elsewhere, and has the topics' names."""
    path = tmp_path / "requests.capture"
    with CaptureWriter(path, "recorded") as writer:
        writer.add([recorded(0, topic="bell\x07")])
    result = call("replay", "count", "--file", str(path))
    assert "bell\\x07/0: 1 records" in result.stdout
    assert "\x07" not in result.stdout


def test_replay_count_prints_json(call: Call, capture: str) -> None:
    """The same for a program."""
    result = call("replay", "count", "--file", capture, "--partition", "1", "--json")
    (row,) = json.loads(result.stdout)
    assert (row["topic"], row["partition"], row["records"]) == ("recorded", 1, 5)
    assert (row["first_ms"], row["last_ms"]) == (START_MS + 10, START_MS + 90)


def test_replay_count_of_nothing_prints_note(call: Call, capture: str) -> None:
    """No record that fits is a result, not an error."""
    result = call("replay", "count", "--file", capture, "--key", "none")
    assert (result.exit_code, result.stdout) == (Exit.DONE, "in all: 0 records, 0 bytes\n")


def test_capture_of_capture_file_keeps_selected_records(
    call: Call, capture: str, tmp_path: Path
) -> None:
    """Filters make a smaller file of a larger one."""
    saved = tmp_path / "smaller.capture"
    result = call("replay", "save", str(saved), "--file", capture, "--key-regex", "[13]$")
    assert (result.exit_code, read_contents(saved).records) == (Exit.DONE, 2)


def test_truncated_capture_file_is_reported(call: Call, capture: str) -> None:
    """The whole records are used, and stderr says that the end is missing."""
    path = Path(capture)
    path.write_bytes(path.read_bytes()[:-5])
    result = call("replay", "count", "--file", capture)
    assert result.exit_code == Exit.DONE
    assert "its end is missing or damaged; 10 whole records" in result.stderr


def test_replay_into_embedded_pipeline_is_answered(
    call: Call, capture: str, tmp_path: Path
) -> None:
    """No broker is needed; answers are counted by status."""
    add_version(tmp_path / "models", "digits", 1, digits())
    result = call("replay", "models", str(tmp_path / "models"), "--file", capture, "--rate", "1000")
    assert result.exit_code == Exit.DONE, result.stderr
    assert result.stdout.startswith("10 records, ")
    assert "spacing error: median" in result.stdout
    assert result.stdout.endswith("ok: 10\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["send"], "give either --to or --to-requests"),
        (["send", "--to-requests", "--to", "t"], "give either --to or --to-requests"),
        (["send", "--to", "t", "--speed", "2", "--rate", "5"], "give either --speed or --rate"),
        (["send", "--to", "t", "--speed", "0"], "expected a positive factor, or max, got '0'"),
        (["send", "--to", "t", "--rate", "inf"], "expected a finite number, got 'inf'"),
        (["send", "--to", "t", "--keep-reply", "--reply-to", "u"], "give either --keep-reply"),
        (["send", "--to", "t"], "expected a broker"),
        (["count", "--checkpoint", "c"], "No such option"),
        (["count", "--topic", "t"], "give either --topic or --file"),
        (["count", "--from", "yesterday"], "expected epoch milliseconds or an ISO time"),
        (["count", "--from", "1769860800"], "got 1769860800, which is a time of 1970"),
        (["count", "--from", "20260501"], "got 20260501, which is a time of 1970"),
        (["count", "--from", "2026-05-02", "--until", "2026-05-01"], "a time after --from"),
        (["count", "--from-offset", "a:b"], "expected OFFSET or PARTITION:OFFSET"),
        (["count", "--from-offset", "7", "--until-offset", "6"], "at least --from-offset 7, got 6"),
        (
            ["count", "--from-offset", "7", "--until-offset", "1:6"],
            "at least --from-offset 7 for partition 1, got 6",
        ),
        (["count", "--status", "OK"], "expected one of ok, INVALID_REQUEST, "),
        (["count", "--header", "a"], "expected NAME=VALUE"),
        (["count", "--key-regex", "("], "expected a regular expression"),
        (["count", "--trace-id", "1"], "expected 32 hexadecimal digits"),
    ],
)
def test_wrong_replay_usage_is_refused(
    call: Call, capture: str, arguments: list[str], said: str
) -> None:
    """The error says what was expected, before anything is read."""
    result = call("replay", *arguments, "--file", capture)
    assert result.exit_code == Exit.USAGE
    assert said in " ".join(result.stderr.split())


def test_replay_of_topic_needs_broker(call: Call) -> None:
    """The embedded log has no past to be replayed."""
    result = call("replay", "count")
    assert result.exit_code == Exit.USAGE
    assert "expected a broker" in result.stderr


def test_foreign_capture_file_is_refused_in_one_line(call: Call, tmp_path: Path) -> None:
    """A file that is not a capture file is refused by name."""
    path = tmp_path / "file"
    path.write_text("hello")
    result = call("replay", "count", "--file", str(path))
    assert result.exit_code == Exit.USAGE
    assert result.stderr == f"headrace: {path}: expected a capture file, got something else\n"


def test_damaged_capture_file_fails(call: Call, capture: str) -> None:
    """Exit code 1, and the place of the damage."""
    path = Path(capture)
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)
    result = call("replay", "count", "--file", capture)
    assert result.exit_code == Exit.FAILED
    assert "expected CRC-32" in result.stderr
