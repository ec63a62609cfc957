"""Headers of copies."""

from __future__ import annotations

import pytest

from headrace.log.port import Headers
from headrace.tools.replay.sinks import Marking
from tests.support.recordings import START_MS, recorded

MARKS = [("x-replay-of", b"recorded/1/0"), ("x-replay-run", b"run")]
LATER_MS = START_MS + 10_001  # of a record that came a millisecond after the start


def copied(headers: Headers, marking: Marking | None = None) -> list[tuple[str, bytes | None]]:
    """The headers of the copy of a record with these."""
    copy = (marking or Marking("run")).copy_of(recorded(1, headers=headers), LATER_MS)
    return list(copy.headers)


def test_replayed_copy_keeps_key_value_and_headers() -> None:
    """The copy is stamped by the log, and says whose copy it is; all else is the original's."""
    original = recorded(1, headers=(("kafka_correlationId", b"1"), ("own", None), ("own", b"b")))
    copy = Marking("run").copy_of(original, LATER_MS)
    assert copy == (original.key, original.value, [*original.headers, *MARKS], None)


def test_replayed_copy_replaces_headers_of_earlier_replay() -> None:
    """A copy of a copy names what it was read from, once."""
    assert copied([("x-replay-of", b"a/0/0"), ("x-replay-run", b"first"), ("b", b"")]) == [
        ("b", b""),
        *MARKS,
    ]


def test_replayed_copy_of_redriven_request_names_no_dead_letter() -> None:
    """A redrive after a killed one would take it for its own copy, and the letter for done."""
    assert copied([("x-replay-letter", b"headrace.dead-letters/1/4"), ("b", b"")]) == [
        ("b", b""),
        *MARKS,
    ]


@pytest.mark.parametrize(
    ("deadline", "moved"),
    [
        (b"%d" % (START_MS + 501), b"%d" % (START_MS + 10_501)),
        (b"%d" % (START_MS - 99), b"%d" % (START_MS + 9_901)),
        (b"soon", b"soon"),
        (b"9" * 5000, b"9" * 5000),
        (b"-5", b"-5"),
        (None, None),
    ],
)
def test_replayed_deadlines_move_by_elapsed_time(
    deadline: bytes | None, moved: bytes | None
) -> None:
    """The copy has as long as its original had; what cannot be read stays."""
    assert copied([("x-deadline-ms", deadline)]) == [("x-deadline-ms", moved), *MARKS]


def test_replayed_deadline_without_timestamp_is_unchanged() -> None:
    """There is nothing to measure from."""
    original = recorded(1, timestamp=-1, headers=(("x-deadline-ms", b"5"),))
    assert Marking("run").copy_of(original, LATER_MS).headers[0] == ("x-deadline-ms", b"5")


REPLY = [("kafka_replyTopic", b"theirs"), ("kafka_replyPartition", b"\0\0\0\1")]


@pytest.mark.parametrize(
    ("marking", "kept"),
    [
        (Marking("run"), []),
        (Marking("run", keep_reply=True), REPLY),
        (Marking("run", reply_to="mine"), [("kafka_replyTopic", b"mine")]),
        (Marking("run", keep_reply=True, reply_to="mine"), [("kafka_replyTopic", b"mine")]),
    ],
)
def test_replayed_copy_drops_reply_headers(marking: Marking, kept: Headers) -> None:
    """Reply topic and partition are dropped, unless they are to be kept or replaced."""
    assert copied(REPLY, marking) == [*kept, *MARKS]
