"""Options that select what to read: a topic or a file, bounds and filters."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.cli.options import TO_READ, check_period
from headrace.cli.settings import require_broker
from headrace.config import Settings
from headrace.errors import Code
from headrace.topics import Topic

if TYPE_CHECKING:
    from headrace.tools.replay.jobs import RecordingSource

F = TypeVar("F", bound=Callable[..., Any])

_LEAST_DIGITS = 12
"""Of epoch milliseconds since 1973; seconds have fewer."""

_TRACE_ID = re.compile(r"[0-9a-fA-F]{32}")


def parse_time_ms(text: str) -> int:
    """Parse epoch milliseconds (ASCII digits), or an ISO 8601 time, in UTC without an offset.

    Raises:
        ValueError: it is neither, or a number of seconds or a date like 20260501, which would be a
            time of 1970.
    """
    if text.isdecimal():
        if len(text) < _LEAST_DIGITS and int(text):
            raise ValueError(f"expected epoch milliseconds, got {text}, which is a time of 1970")
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"expected epoch milliseconds or an ISO time as 2026-05-01T12:00:00Z, got {text!r}"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


def parse_offsets(texts: tuple[str, ...]) -> dict[int | None, int]:
    """Parse `OFFSET` for all partitions, `PARTITION:OFFSET` for one.

    Raises:
        ValueError: one of them is neither, or a partition is named twice.
    """
    offsets: dict[int | None, int] = {}
    for text in texts:
        partition, colon, offset = text.rpartition(":")
        if not offset.isdecimal() or (colon and not partition.isdecimal()):
            raise ValueError(f"expected OFFSET or PARTITION:OFFSET, got {text!r}")
        number = int(partition) if colon else None
        if number in offsets:
            raise ValueError(f"expected each partition once, got {text!r} as well")
        offsets[number] = int(offset)
    return offsets


def parse_header(text: str) -> tuple[str, bytes]:
    """Parse `NAME=VALUE`. Raises `ValueError`."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"expected NAME=VALUE, got {text!r}")
    return name, os.fsencode(value)


def _parsed(parse: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        if value is None:
            return None
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return callback


def _headers(texts: tuple[str, ...]) -> tuple[tuple[str, bytes], ...]:
    return tuple(map(parse_header, texts))


def _pattern(text: str) -> re.Pattern[bytes]:
    try:
        return re.compile(os.fsencode(text))
    except re.error as error:
        raise ValueError(f"expected a regular expression, got {text!r}: {error}") from error


def _trace_id(text: str) -> str:
    if not _TRACE_ID.fullmatch(text):
        raise ValueError(f"expected 32 hexadecimal digits, got {text!r}")
    return text.lower()


def _status(text: str) -> str:
    known = ["ok", *Code]
    if text not in known:
        raise ValueError(f"expected one of {', '.join(known)}, got {text!r}")
    return text


def check_offsets(first: Mapping[int | None, int], past: Mapping[int | None, int]) -> None:
    """Raise `click.UsageError` if the second offset of a partition lies before the first."""
    for number in first.keys() | past.keys():
        begin, end = first.get(number, first.get(None)), past.get(number, past.get(None))
        if begin is not None and end is not None and end < begin:
            where = "" if number is None else f" for partition {number}"
            raise click.UsageError(
                f"--until-offset: expected at least --from-offset {begin}{where}, got {end}"
            )


_OPTIONS = (
    click.option("--topic", metavar="TOPIC", help="Topic to read.  [default: the requests]"),
    click.option(
        "--file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Capture file to read instead of a topic.",
    ),
    click.option(
        "--from",
        "from_ms",
        callback=_parsed(parse_time_ms),
        metavar="TIME",
        help="Start at the first record at or after this time: ISO 8601, or epoch milliseconds.",
    ),
    click.option(
        "--until",
        "until_ms",
        callback=_parsed(parse_time_ms),
        metavar="TIME",
        help="Stop before the first record at or after this time.",
    ),
    click.option(
        "--from-offset",
        "from_offsets",
        multiple=True,
        callback=_parsed(parse_offsets),
        metavar="[PARTITION:]OFFSET",
        help="Start at this offset; repeat it for more partitions.",
    ),
    click.option(
        "--until-offset",
        "until_offsets",
        multiple=True,
        callback=_parsed(parse_offsets),
        metavar="[PARTITION:]OFFSET",
        help="Stop before this offset.",
    ),
    click.option(
        "--partition",
        "partitions",
        type=click.IntRange(min=0),
        multiple=True,
        metavar="N",
        help="Only this partition; repeat it for more.",
    ),
    click.option("--key", metavar="KEY", help="Only records with this key."),
    click.option(
        "--key-regex",
        callback=_parsed(_pattern),
        metavar="REGEX",
        help="Only records with a matching key.",
    ),
    click.option(
        "--header",
        "headers",
        multiple=True,
        callback=_parsed(_headers),
        metavar="NAME=VALUE",
        help="Only records with this header; repeat it for more.",
    ),
    click.option("--model", metavar="MODEL[/VERSION]", help="Only records of this model."),
    click.option(
        "--status",
        callback=_parsed(_status),
        metavar="STATUS",
        help="Only answers with this x-status: ok, or the code of an error.",
    ),
    click.option(
        "--trace-id", callback=_parsed(_trace_id), metavar="HEX", help="Only records of this trace."
    ),
    click.option(
        "--limit", type=click.IntRange(min=1), metavar="N", help="Read at most this many records."
    ),
)
SELECTION = (
    *("topic", "file", "from_ms", "until_ms", "from_offsets", "until_offsets", "partitions"),
    *("key", "key_regex", "headers", "model", "status", "trace_id", "limit"),
)
"""Parameters of these options; a command takes them by `**chosen`."""


def selection_options(function: F) -> F:
    """Add the options to a command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def chosen_source(settings: Settings, chosen: dict[str, Any]) -> RecordingSource:
    """Return the source that the options name.

    Raises:
        click.UsageError: both a topic and a file, or a period, or offsets of a partition, that end
            before they begin.
        ConfigurationError: a topic, but no broker.
    """
    from headrace.tools.replay.jobs import RecordingSource
    from headrace.tools.replay.recording import Filters, Selection, Window

    if chosen["topic"] and chosen["file"]:
        raise click.UsageError("give either --topic or --file")
    check_period("--from", chosen["from_ms"], chosen["until_ms"])
    check_offsets(chosen["from_offsets"], chosen["until_offsets"])
    key = chosen["key"]
    selection = Selection(
        Window(
            chosen["from_ms"],
            chosen["until_ms"],
            chosen["from_offsets"],
            chosen["until_offsets"],
            frozenset(chosen["partitions"]) or None,
        ),
        Filters(
            None if key is None else os.fsencode(key),
            chosen["key_regex"],
            chosen["headers"],
            chosen["model"],
            chosen["status"],
            chosen["trace_id"],
        ),
        chosen["limit"],
    )
    if chosen["file"] is not None:
        return RecordingSource(chosen["file"], selection)
    require_broker(settings, TO_READ)
    return RecordingSource(chosen["topic"] or settings.topic(Topic.REQUESTS), selection)


def as_json(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the options in JSON's types, by which a checkpoint identifies its run."""
    return {name: _plain(chosen[name]) for name in SELECTION}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): each for name, each in value.items()}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, re.Pattern):
        return _plain(value.pattern)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value) if isinstance(value, Path) else value
