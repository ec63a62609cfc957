"""Conversion of a dead letter back to a request, without I/O.

The key, the value and the caller's headers are kept, including the reply topic and the correlation
id, so that the answer goes where the original answer was expected. The headers that Headrace added
to the dead letter are removed. Three `x-replay-*` headers, which are not copied to answers, name
its origin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from headrace.errors import ConfigurationError, describe_error
from headrace.log.port import NewRecord
from headrace.models.user_code import load_attribute
from headrace.protocol.headers import HeaderName
from headrace.tools.dead_letters.dead_letter import DeadLetter

_REPLACED = frozenset(
    {
        HeaderName.STAGE,
        HeaderName.ATTEMPT,
        HeaderName.REPLAY_OF,
        HeaderName.REPLAY_LETTER,
        HeaderName.REPLAY_RUN,
    }
)


class Copy(NamedTuple):
    """A dead letter converted back to a request.

    Attributes:
        deadline_dropped: its `x-deadline-ms` had passed and was removed.
    """

    record: NewRecord
    deadline_dropped: bool


def copy_of(dead_letter: DeadLetter, now_ms: int) -> Copy:
    """Return the request without the headers of the dead letter; `marked` adds those of its origin.

    A deadline that has passed is removed, since it would only cause the next error. An unreadable
    deadline stays, and so does a timeout (`x-timeout-ms`), since it counts from the new record's
    timestamp.
    """
    kept: list[tuple[str, bytes | None]] = []
    dropped = False
    for name, value in dead_letter.record.headers:
        if name.startswith("kafka_dlt-") or name in _REPLACED:
            continue
        if name == HeaderName.DEADLINE_MS and _has_passed(value, now_ms):
            dropped = True
            continue
        kept.append((name, value))
    return Copy(NewRecord(dead_letter.record.key, dead_letter.record.value, kept), dropped)


def marked(record: NewRecord, dead_letter: DeadLetter, run_id: str) -> NewRecord:
    """Set the replay headers and the attempt number, whatever a transform did to them."""
    headers = [header for header in record.headers if header[0] not in _REPLACED]
    headers += [
        (HeaderName.REPLAY_OF, first_identity(dead_letter).encode()),
        (HeaderName.REPLAY_LETTER, str(dead_letter.identity).encode()),
        (HeaderName.REPLAY_RUN, run_id.encode()),
        (HeaderName.ATTEMPT, b"%d" % (dead_letter.attempt + 1)),
    ]
    return record._replace(headers=headers)


def first_identity(dead_letter: DeadLetter) -> str:
    """Return the original request across all redrives; the dead letter's identity if unknown."""
    headers = dict(dead_letter.record.headers)
    first = headers.get(HeaderName.REPLAY_OF)
    if first is not None and HeaderName.REPLAY_LETTER in headers:
        return first.decode(errors="replace")
    return str(dead_letter.origin or dead_letter.identity)


def _has_passed(value: bytes | None, now_ms: int) -> bool:
    return value is not None and value.isdigit() and len(value) <= 15 and int(value) <= now_ms


# --- a user's transform --------------------------------------------------------------------------


Transform: TypeAlias = Callable[[NewRecord], NewRecord | None]
"""Returns the record to send instead; None skips the dead letter."""


def load_transform(path: Path) -> Transform:
    """Load the function `transform` of a user's file, and check its results.

    It receives the request as a `headrace.log.port.NewRecord` (`key`, `value`, `headers`,
    `timestamp_ms`), and returns one: `record._replace(value=…)`.

    Raises:
        ConfigurationError: there is no such function. The returned function raises it if the user's
            function raises, or returns something else.
    """
    function = load_attribute(path, "transform")

    def transform(record: NewRecord) -> NewRecord | None:
        try:
            result: NewRecord | None = function(record)
        except Exception as error:  # a user's code may raise anything
            raise ConfigurationError(f"{path}: transform: {describe_error(error)}") from error
        if result is not None and not _is_record(result):
            raise ConfigurationError(
                f"{path}: transform: expected a record with key and value of bytes or None, "
                "headers of (str, bytes or None) and timestamp_ms of an integer or None, or None, "
                f"got {result!r:.200}"
            )
        return result

    return transform


def _is_record(result: Any) -> bool:
    return (
        isinstance(result, NewRecord)
        and isinstance(result.key, bytes | None)
        and isinstance(result.value, bytes | None)
        and isinstance(result.timestamp_ms, int | None)
        and 0 <= (result.timestamp_ms or 0) < 2**63
        and isinstance(result.headers, Sequence)
        and all(_is_header(header) for header in result.headers)
    )


def _is_header(header: Any) -> bool:
    return (
        isinstance(header, tuple)
        and len(header) == 2
        and isinstance(header[0], str)
        and isinstance(header[1], bytes | None)
    )
