"""Rules of dead letters, without I/O: how they are read, selected, redriven and remembered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.delivery.acked_offsets import AckedOffsets, UnknownMetadata
from headrace.errors import ConfigurationError
from headrace.log.port import Committed, NewRecord, Record, TopicPartition
from headrace.protocol.codec import encode_request
from headrace.tools.dead_letters.copies import copy_of, load_transform, marked
from headrace.tools.dead_letters.dead_letter import (
    DeadLetter,
    DeadLetterSelection,
    RecordIdentity,
    paragraphs,
    parse_dead_letter,
    time_text,
)
from headrace.tools.dead_letters.reading import OffsetRange
from headrace.tools.dead_letters.redrive_state import (
    MemoryFull,
    committable,
    count_copies,
    done_letters,
    require_room,
)
from tests.support.dead_letters import letter_headers
from tests.support.tree import ROOT

NOW_MS = 1_700_000_000_000
LETTERS = TopicPartition("t.dead-letters", 1)
DIGITS = encode_request("application/msgpack", "digits", {"x": np.ones((1, 2), np.float32)})


def _letter(
    value: bytes | None = DIGITS, *headers: tuple[str, bytes], **changed: Any
) -> DeadLetter:
    ours = letter_headers("t.requests", 3, 9, **changed)
    return parse_dead_letter(Record(*LETTERS, 5, NOW_MS, b"k", value, [*headers, *ours.items()]))


def test_dead_letter_has_error_stage_and_attempts() -> None:
    """All from the headers that it was given, and the model from its body."""
    letter = _letter(attempt=b"2")

    assert letter.origin == RecordIdentity("t.requests", 3, 9)
    assert (letter.code, letter.stage, letter.attempt) == ("TOO_LARGE", "ingest", 2)
    assert (letter.model, str(letter.identity)) == ("digits", "t.dead-letters/1/5")


@pytest.mark.parametrize("value", [None, b"", b"\xc1", b"\x93\x01"])
def test_dead_letter_without_headers_is_read(value: bytes | None) -> None:
    """An absent header leaves its field empty, or at its default."""
    letter = parse_dead_letter(Record(*LETTERS, 5, -1, None, value, []))

    assert letter == (letter.record, None, "", "", "", 1, "", "")


def test_dead_letter_of_impossible_time_is_shown() -> None:
    """No record keeps the others from being listed."""
    assert time_text(1_700_000_000_000_000) == "1700000000000000 ms since 1970"


@pytest.mark.parametrize(
    ("selection", "taken"),
    [
        (DeadLetterSelection(), True),
        (DeadLetterSelection(codes=frozenset({"TOO_LARGE", "OTHER"})), True),
        (DeadLetterSelection(codes=frozenset({"OTHER"})), False),
        (DeadLetterSelection(models=frozenset({"digit"})), False),
        (DeadLetterSelection(stages=frozenset({"executor"})), False),
        (DeadLetterSelection(since_ms=NOW_MS, until_ms=NOW_MS + 1), True),
        (DeadLetterSelection(since_ms=NOW_MS + 1), False),
        (DeadLetterSelection(until_ms=NOW_MS), False),
        (DeadLetterSelection(positions=frozenset({(1, 5)})), True),
        (DeadLetterSelection(positions=frozenset({(1, 6)})), False),
    ],
)
def test_dead_letter_selection_joins_its_filters_by_and(
    selection: DeadLetterSelection, taken: bool
) -> None:
    """An empty filter leaves all dead letters in."""
    assert selection.takes(_letter()) is taken


def test_redriven_copy_has_no_dead_letter_headers() -> None:
    """Key, value and the caller's headers are untouched, repeated ones in their order."""
    theirs = [("kafka_correlationId", b"c"), ("a", b"1"), ("a", b"2")]

    copy = copy_of(_letter(b"v", *theirs), NOW_MS)

    assert copy.record == NewRecord(b"k", b"v", theirs)


@pytest.mark.parametrize(
    ("deadline", "dropped"),
    [
        (b"%d" % NOW_MS, True),
        (b"%d" % (NOW_MS + 1), False),
        (b"tomorrow", False),
    ],
)
def test_redriven_copy_drops_passed_deadline(deadline: bytes, dropped: bool) -> None:
    """One that is to come, or that cannot be read, stays."""
    copy = copy_of(_letter(b"v", ("x-deadline-ms", deadline)), NOW_MS)

    assert copy.deadline_dropped is dropped
    assert (copy.record.headers == []) is dropped


def test_redriven_copy_names_first_request() -> None:
    """The letter before it may be that of an earlier copy."""
    first = marked(copy_of(_letter(b"v"), NOW_MS).record, _letter(b"v"), "run-1")
    headers = [(name, value) for name, value in first.headers if value is not None]
    again = _letter(b"v", *headers, attempt=b"2")

    second = marked(copy_of(again, NOW_MS).record, again, "run-2")

    assert second.headers == [
        ("x-replay-of", b"t.requests/3/9"),
        ("x-replay-letter", b"t.dead-letters/1/5"),
        ("x-replay-run", b"run-2"),
        ("x-attempt", b"3"),
    ]


def test_redrive_progress_survives_commit_and_retention() -> None:
    """Below the first offset that is still held, all is done."""
    progress = AckedOffsets(0)
    progress.mark_acked(3, 7)
    committed = committable({LETTERS: progress})

    done = done_letters(committed, {LETTERS: OffsetRange(2, 20)})

    assert done[LETTERS] == AckedOffsets(2, [(4, 8)])


def test_redrive_progress_of_recreated_topic_is_empty() -> None:
    """Brokers delete what groups have committed together with the topic."""
    assert done_letters({LETTERS: None}, {LETTERS: OffsetRange(0, 20)})[LETTERS] == AckedOffsets(0)


@pytest.mark.parametrize(
    ("progress", "left"),
    [
        (AckedOffsets(30), AckedOffsets(20)),
        (AckedOffsets(5, [(8, 9), (15, 30), (40, 50)]), AckedOffsets(5, [(8, 9), (15, 20)])),
    ],
)
def test_redrive_progress_of_lost_end_is_forgotten_and_no_more(
    progress: AckedOffsets, left: AckedOffsets
) -> None:
    """Letters before it stay done; those that will have its offsets are others."""
    committed = committable({LETTERS: progress})
    assert done_letters(committed, {LETTERS: OffsetRange(0, 20)})[LETTERS] == left


def test_foreign_commit_of_redrive_group_is_refused() -> None:
    """To ignore it could send letters twice; the error names the partition."""
    with pytest.raises(UnknownMetadata, match=f"{LETTERS}: committed metadata: expected forms"):
        done_letters({LETTERS: Committed(3, "whose?")}, {LETTERS: OffsetRange(0, 20)})


def test_redriven_copies_among_requests_count_as_done() -> None:
    """Each once; what names no letter of ours is passed over."""
    names = [b"t.dead-letters/1/4", b"t.dead-letters/1/4", b"other/1/2", b"no position", b"a/b/c"]
    records = [
        Record("r", 0, number, 0, None, None, [("x-replay-letter", name)])
        for number, name in enumerate(names)
    ]
    done = {LETTERS: AckedOffsets(0)}

    assert count_copies(records, done) == 1
    assert done[LETTERS] == AckedOffsets(0, [(4, 5)])


def test_redrive_stops_at_progress_that_fits_metadata() -> None:
    """Ranges that fit neither form of the metadata would be forgotten, and sent again."""
    progress = AckedOffsets(0, [(n * 100, n * 100 + 1) for n in range(1, 1700)])

    with pytest.raises(MemoryFull, match=r"redrive or discard the dead letters from 0 on"):
        require_room(progress, LETTERS, [(2 * 10**6 - 1, 2 * 10**6)])


def test_readable_dead_letter_is_shown_by_its_tensors() -> None:
    """With the error, and with numbers where headers hold numbers."""
    shown = "\n".join(paragraphs(_letter(), redriven=False))

    assert "error    TOO_LARGE in ingest: value: expected less" in shown
    assert "kafka_dlt-original-offset: 9" in shown
    assert "input x FP32 [1, 2]" in shown
    assert "[1., 1.]" in shown


def test_binary_value_of_dead_letter_is_dumped_beside_reason() -> None:
    """Offset, bytes and characters of each line, as `hexdump -C` writes them."""
    shown = list(paragraphs(_letter(b"\xc1not \x00msgpack at all"), redriven=True))

    assert "20 bytes that cannot be read as a request: INVALID_REQUEST" in shown[-3]
    assert shown[-2:] == [
        "  00000000  c1 6e 6f 74 20 00 6d 73 67 70 61 63 6b 20 61 74  |.not .msgpack at|",
        "  00000010  20 61 6c 6c                                      | all|",
    ]


@pytest.mark.parametrize(
    ("value", "lines", "hidden_bytes"),
    [
        (b"\xc1" * 515, 16, 515 - 256),
        (b"\xc3\xa9\n" * 400, 171, 1200 - 512),
    ],
    ids=["binary", "text cut within a character"],
)
def test_beginning_of_long_unreadable_request_is_shown(
    value: bytes, lines: int, hidden_bytes: int
) -> None:
    """The rest is counted."""
    shown = list(paragraphs(_letter(value), redriven=True))
    begin = next(at for at, line in enumerate(shown) if "cannot be read" in line)

    assert shown[-1] == f"  and {hidden_bytes} bytes more"
    assert len(shown[begin + 1 : -1]) == lines


def test_text_of_several_lines_in_dead_letter_is_shown_as_text() -> None:
    """Indented JSON or CSV, and the header of a stack trace, which stays on one line."""
    letter = _letter(b'{\n  "a": 1\n}', ("trace", b"at a\nat b"))
    shown = list(paragraphs(letter, redriven=True))

    assert shown[-3:] == ["  {", '    "a": 1', "  }"]
    assert r"  trace: at a\nat b" in shown


def test_long_binary_header_of_dead_letter_is_shown_by_its_beginning() -> None:
    """Kilobytes in hexadecimal hid the rest of the dead letter."""
    shown = list(paragraphs(_letter(DIGITS, ("raw", b"\xff" * 70)), redriven=True))

    assert f"  raw: 0x{'ff' * 64} and 6 bytes more" in shown


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("return 1 / 0", "ZeroDivisionError"),
        ("return b'bytes'", "expected a record"),
        ("return record._replace(value='text')", "expected a record"),
        ("return record._replace(headers=[('a', 'text')])", "expected a record"),
        ("return record._replace(timestamp_ms=1.7e12)", "expected a record"),
        ("return record._replace(timestamp_ms=2**63)", "expected a record"),
    ],
)
def test_failing_redrive_transform_is_named(tmp_path: Path, body: str, fault: str) -> None:
    """Before anything wrong is sent."""
    script = tmp_path / "fix.py"
    script.write_text(f"def transform(record):\n    {body}\n")

    with pytest.raises(ConfigurationError, match=f"fix.py: transform: {fault}"):
        load_transform(script)(NewRecord(None, b"v"))


def test_redrive_transform_of_page_corrects_name_of_model(tmp_path: Path) -> None:
    """The example can be copied: all but the misspelled name is as it was, in valid MessagePack."""
    page = (ROOT / "docs" / "dead-letters.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    script = tmp_path / "fix.py"
    script.write_text(example)
    inputs = {"x": np.ones((1, 2), np.float32)}
    misspelled = encode_request("application/msgpack", "digit", inputs)

    fixed = load_transform(script)(NewRecord(None, misspelled))

    assert fixed == NewRecord(None, DIGITS)
