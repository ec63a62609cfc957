"""Options of `headrace dlq`, and its tables."""

from __future__ import annotations

import heapq
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import wraps
from typing import Any, NamedTuple

import click

from headrace.printable import printable
from headrace.tools.dead_letters import Order, Selection, Tally
from headrace.topics import STAGES

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_AGO = re.compile(r"(\d+)([smhd])")
_COLUMNS = ("letter", "time", "code", "model", "stage", "attempt", "redriven", "message")
_MAX_CELL = 60


class Place(NamedTuple):
    """Position of a letter; `topic` is None if only partition and offset were given."""

    topic: str | None
    partition: int
    offset: int


class PlaceType(click.ParamType[Place]):
    """`TOPIC/PARTITION/OFFSET` or `PARTITION/OFFSET`."""

    name = "place"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Place:
        """Convert a value; called by click."""
        if isinstance(value, Place):
            return value
        *topic, partition, offset = ["", *str(value).split("/")][-3:]
        if not (partition.isdecimal() and offset.isdecimal()) or str(value).count("/") > 2:
            self.fail(f"expected [TOPIC/]PARTITION/OFFSET, got {value!r}", param, ctx)
        return Place(topic[0] or None, int(partition), int(offset))


class WhenType(click.ParamType[int]):
    """A time in epoch milliseconds, as ISO 8601, or as a duration until now, such as `2h`."""

    name = "when"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert a value; called by click."""
        text = str(value)
        if text.isdecimal():
            return int(text)
        if ago := _AGO.fullmatch(text):
            return int((time.time() - int(ago[1]) * _UNITS_S[ago[2]]) * 1000)
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            self.fail(
                f"expected 2026-01-31T12:00:00Z, epoch milliseconds, or 2h, got {text!r}",
                param,
                ctx,
            )
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return int(moment.timestamp() * 1000)


PLACE = PlaceType()
WHEN = WhenType()


def selecting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select letters to a command, as one argument `selection`."""

    @wraps(function)
    def with_selection(
        *args: Any,
        codes: Sequence[str],
        models: Sequence[str],
        stages: Sequence[str],
        since_ms: int | None,
        until_ms: int | None,
        **options: Any,
    ) -> Any:
        selection = Selection(
            frozenset(codes), frozenset(models), frozenset(stages), since_ms, until_ms
        )
        return function(*args, selection=selection, **options)

    options = (
        click.option("--code", "codes", multiple=True, help="Of this code; several may be given."),
        click.option("--model", "models", multiple=True, help="Of this model; likewise."),
        click.option(
            "--stage",
            "stages",
            multiple=True,
            type=click.Choice([stage.value for stage in STAGES]),
            help="Failed here.",
        ),
        click.option(
            "--since", "since_ms", type=WHEN, help="Dead since then: ISO 8601 (UTC), or 2h ago."
        ),
        click.option("--until", "until_ms", type=WHEN, help="Dead before then."),
    )
    for option in reversed(options):
        with_selection = option(with_selection)
    return with_selection


class Newest:
    """The newest of many letters, in bounded memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heap: list[tuple[int, int, dict[str, Any]]] = []
        self._numbers = itertools.count()

    def add(self, timestamp_ms: int, row: dict[str, Any]) -> None:
        """Keep a letter's row if it is one of the newest."""
        heapq.heappush(self._heap, (timestamp_ms, next(self._numbers), row))
        if len(self._heap) > self._limit:
            heapq.heappop(self._heap)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows by time, the newest last; those of one time as they were added."""
        return [row for _, _, row in sorted(self._heap, key=lambda entry: entry[:2])]


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield rows under their headings, in columns that fit; the last column is not cut."""
    if not rows:
        return
    cells = [list(_COLUMNS), *([_cell(row[name]) for name in _COLUMNS] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(_COLUMNS) - 1)]
    for line in cells:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        yield "  ".join([*padded, line[-1]])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = printable(" ".join(str(value).split())) or "-"
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 1] + "…"


def counts_lines(counts: Counter[str], shown: int) -> Iterator[str]:
    """Yield the number of letters by code, the most frequent first."""
    if not counts:
        yield "no dead letters"
        return
    by_code = ", ".join(f"{code or 'no code'} {count}" for code, count in counts.most_common())
    hidden = counts.total() - shown
    yield f"{counts.total()} dead letters: {by_code}" + (f"; {hidden} not shown" if hidden else "")


def tally_lines(tally: Tally, order: Order) -> Iterator[str]:
    """Yield the results of a redrive as text."""
    verb = "discarded" if order.discard else "sent"
    by_code = ", ".join(f"{code or 'no code'} {count}" for code, count in tally.sent.most_common())
    would = "would be " if order.dry_run else ""
    yield f"{tally.sent.total()} {would}{verb}" + (f": {by_code}" if by_code else "")
    if tally.done_before:
        yield f"{tally.done_before} passed over: redriven before"
    if tally.left:
        yield f"{tally.left} left where they are: transform gave None"
    if tally.deadlines_dropped:
        yield f"{tally.deadlines_dropped} without their x-deadline-ms, which has passed"
    for identity, reason in tally.refused:
        yield f"refused {identity}: {reason}"
