"""The request that is made of a dead letter: a rule without I/O.

Key, value and the caller's headers stay, the reply topic and the correlation id among them, so
that the answer goes to where the first one was wanted. What Headrace added to make it a letter
goes. Three headers of the `x-replay-*` family, which travel to no answer, say where it is from.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.log.port import NewRecord
from headrace.tools.dead_letters.letter import Letter

DEADLINE = "x-deadline-ms"

REPLAY_OF = "x-replay-of"
"""The request that failed first, as `topic/partition/offset`."""

REPLAY_LETTER = "x-replay-letter"
"""The letter that this copy is made of, as `topic/partition/offset`."""

REPLAY_RUN = "x-replay-run"
"""Which run of the command sent the copy."""

_REPLACED = frozenset({"x-stage", "x-attempt", REPLAY_OF, REPLAY_LETTER, REPLAY_RUN})


class Copy(NamedTuple):
    """A letter as a request again.

    Attributes:
        deadline_dropped: its `x-deadline-ms` had passed and was left out.
    """

    record: NewRecord
    deadline_dropped: bool


def copy_of(letter: Letter, now_ms: int) -> Copy:
    """The request without what made it a letter; `marked` adds where it comes from.

    A deadline that has passed would only make the next error; one that cannot be read stays, and
    a timeout (`x-timeout-ms`) stays, since it counts from the new record's timestamp.
    """
    kept: list[tuple[str, bytes | None]] = []
    dropped = False
    for name, value in letter.record.headers:
        if name.startswith("kafka_dlt-") or name in _REPLACED:
            continue
        if name == DEADLINE and _has_passed(value, now_ms):
            dropped = True
            continue
        kept.append((name, value))
    return Copy(NewRecord(letter.record.key, letter.record.value, kept), dropped)


def marked(record: NewRecord, letter: Letter, run_id: str) -> NewRecord:
    """The copy with its identities, and its number of attempts, whatever a transform did."""
    headers = [header for header in record.headers if header[0] not in _REPLACED]
    headers += [
        (REPLAY_OF, first_identity(letter).encode()),
        (REPLAY_LETTER, str(letter.identity).encode()),
        (REPLAY_RUN, run_id.encode()),
        ("x-attempt", b"%d" % (letter.attempt + 1)),
    ]
    return record._replace(headers=headers)


def first_identity(letter: Letter) -> str:
    """The request that failed first, through all redrives; the letter's where nothing says so."""
    headers = dict(letter.record.headers)
    first = headers.get(REPLAY_OF)
    if first is not None and REPLAY_LETTER in headers:
        return first.decode(errors="replace")
    return str(letter.origin or letter.identity)


def _has_passed(value: bytes | None, now_ms: int) -> bool:
    return value is not None and value.isdigit() and len(value) <= 15 and int(value) <= now_ms
