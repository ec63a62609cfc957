"""`headrace dlq list|show|redrive|export`: the dead letters."""

from __future__ import annotations

import heapq
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import click

from headrace.cli.event_loop import run
from headrace.cli.options import POSITIVE, check_period, json_option
from headrace.cli.outcome import Unsuccessful
from headrace.cli.output import say, say_gap
from headrace.cli.progress import Progress, progress
from headrace.cli.selection_options import parse_time_ms
from headrace.cli.settings import pass_settings, require_broker
from headrace.client.rpc import topic_partitions
from headrace.config import Settings
from headrace.errors import Code, ConfigurationError
from headrace.log.port import Log
from headrace.printable import printable
from headrace.runtime.log_factory import open_log
from headrace.tools.dead_letters import (
    DeadLetter,
    DeadLetterSelection,
    Redrive,
    RedriveJob,
    RedriveResult,
    read_dead_letters,
)
from headrace.tools.dead_letters.copies import load_transform
from headrace.tools.dead_letters.dead_letter import full, paragraphs, summary
from headrace.tools.dead_letters.reading import spans_of
from headrace.tools.dead_letters.redrive import patient
from headrace.tools.dead_letters.redrive_state import recall
from headrace.tools.replay.capture import CaptureWriter
from headrace.topics import STAGES, Topic
from headrace.tuning import TUNING, Tuning

# --- options and tables --------------------------------------------------------------------------


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_AGO = re.compile(r"(\d+)([smhd])")
_COLUMNS = ("letter", "time", "code", "model", "stage", "attempt", "redriven", "message")
_MAX_CELL = 60


class Position(NamedTuple):
    """Position of a dead letter; `topic` is None if only partition and offset were given."""

    topic: str | None
    partition: int
    offset: int


class PositionType(click.ParamType[Position]):
    """Parameter type for `TOPIC/PARTITION/OFFSET` or `PARTITION/OFFSET`."""

    name = "position"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Position:
        """Convert a value; called by click."""
        if isinstance(value, Position):
            return value
        *topic, partition, offset = ["", *str(value).split("/")][-3:]
        if not (partition.isdecimal() and offset.isdecimal()) or str(value).count("/") > 2:
            self.fail(f"expected [TOPIC/]PARTITION/OFFSET, got {value!r}", param, ctx)
        return Position(topic[0] or None, int(partition), int(offset))


class WhenType(click.ParamType[int]):
    """Parameter type for a time: epoch milliseconds, ISO 8601, or the duration until now, such as
    `2h`.
    """

    name = "when"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert a value; called by click."""
        text = str(value)
        if ago := _AGO.fullmatch(text):
            return int((time.time() - int(ago[1]) * _UNITS_S[ago[2]]) * 1000)
        try:
            return parse_time_ms(text)
        except ValueError as error:
            self.fail(f"{error}; an age as 2h is possible as well", param, ctx)


POSITION = PositionType()
WHEN = WhenType()


def selecting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select dead letters to a command, as one argument `selection`."""

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
        check_period("--since", since_ms, until_ms)
        selection = DeadLetterSelection(
            frozenset(codes), frozenset(models), frozenset(stages), since_ms, until_ms
        )
        return function(*args, selection=selection, **options)

    options = (
        click.option(
            "--code",
            "codes",
            multiple=True,
            type=click.Choice([code.value for code in Code if code.is_dead_letter]),
            metavar="CODE",
            help="Only this error code; repeat it for more.",
        ),
        click.option(
            "--model", "models", multiple=True, help="Only this model; repeat it for more."
        ),
        click.option(
            "--stage",
            "stages",
            multiple=True,
            type=click.Choice([stage.value for stage in STAGES]),
            help="Only failures of this stage.",
        ),
        click.option(
            "--since",
            "since_ms",
            type=WHEN,
            help="Written at or after this time: ISO 8601 (UTC), or an age as 2h.",
        ),
        click.option("--until", "until_ms", type=WHEN, help="Written before this time."),
    )
    for option in reversed(options):
        with_selection = option(with_selection)
    return with_selection


class Newest:
    """The newest of many dead letters, in bounded memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heap: list[tuple[int, int, dict[str, Any]]] = []
        self._numbers = itertools.count()

    def add(self, timestamp_ms: int, row: dict[str, Any]) -> None:
        """Keep a dead letter's row if it is one of the newest."""
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
    widths = [max(len(line[index]) for line in cells) for index in range(len(_COLUMNS) - 1)]
    for line in cells:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        yield "  ".join([*padded, line[-1]])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = printable(" ".join(str(value).split())) or "-"
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 1] + "…"


def counts_lines(counts: Counter[str], shown: int) -> Iterator[str]:
    """Yield the number of dead letters by code, the most frequent first."""
    if not counts:
        yield "no dead letters"
        return
    by_code = ", ".join(f"{code or 'no code'} {count}" for code, count in counts.most_common())
    hidden = counts.total() - shown
    yield f"{counts.total()} dead letters: {by_code}" + (f"; {hidden} not shown" if hidden else "")


def tally_lines(tally: RedriveResult, order: RedriveJob) -> Iterator[str]:
    """Yield the results of a redrive as text."""
    verb = "discarded" if order.discard else "sent"
    by_code = ", ".join(f"{code or 'no code'} {count}" for code, count in tally.sent.most_common())
    would = "would be " if order.dry_run else ""
    yield f"{tally.sent.total()} {would}{verb}" + (f": {by_code}" if by_code else "")
    if tally.done_before:
        yield f"{tally.done_before} passed over: redriven before"
    if tally.left:
        yield f"{tally.left} left where they are: transform gave None"
    if tally.deadlines_dropped and not order.discard:
        yield f"{tally.deadlines_dropped} without their x-deadline-ms, which has passed"
    for identity, reason in tally.refused:
        yield f"refused {identity}: {reason}"
    if missing := missing_positions(tally, order):
        yield f"{missing} of the positions given have no dead letter that is selected"


def missing_positions(tally: RedriveResult, order: RedriveJob) -> int:
    """Return at how many of the positions given nothing was found; 0 if a limit ended the run."""
    if order.limit is not None:
        return 0
    found = tally.sent.total() + tally.done_before + tally.left + len(tally.refused)
    return max(0, len(order.selection.positions) - found)


# --- the command ---------------------------------------------------------------------------------


@click.group()
def command() -> None:
    """List, show, send again and export requests that could not be served."""


@command.command("list")
@selecting
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=1000,
    show_default=True,
    help="Show at most this many, the newest; all are counted.",
)
@click.option("--pending", is_flag=True, help="Leave out dead letters that were redriven.")
@json_option
@pass_settings
def list_(
    settings: Settings, selection: DeadLetterSelection, limit: int, pending: bool, in_json: bool
) -> None:
    """List dead letters by time, the newest last, and count them by code."""
    shown, counts = run(_list(settings, selection, limit, pending))
    if in_json:
        listed = {"letters": shown, "counts": dict(counts), "total": counts.total()}
        click.echo(json.dumps(listed, indent=2))
        return
    for line in (*table(shown), *counts_lines(counts, len(shown))):
        say(line)


async def _list(
    settings: Settings, selection: DeadLetterSelection, limit: int, pending: bool
) -> tuple[list[dict[str, Any]], Counter[str]]:
    newest = Newest(limit)
    counts: Counter[str] = Counter()
    async with aclosing(_dead_letters(settings, selection)) as dead_letters:
        async for dead_letter, redriven in dead_letters:
            if pending and redriven:
                continue
            counts[dead_letter.code] += 1
            newest.add(dead_letter.record.timestamp, summary(dead_letter, redriven))
    return newest.rows(), counts


@command.command()
@click.argument("position", type=POSITION, metavar="[TOPIC/]PARTITION/OFFSET")
@json_option
@pass_settings
def show(settings: Settings, position: Position, in_json: bool) -> None:
    """Show one dead letter: its error, its headers, and the request as it can be read."""
    dead_letter, redriven = run(_one(settings, position))
    if in_json:
        click.echo(json.dumps(full(dead_letter, redriven), indent=2))
        return
    for line in paragraphs(dead_letter, redriven):
        say(line)


async def _one(settings: Settings, position: Position) -> tuple[DeadLetter, bool]:
    selection = DeadLetterSelection(positions=_chosen(settings, [position]))
    async with aclosing(_dead_letters(settings, selection)) as dead_letters:
        async for dead_letter, redriven in dead_letters:
            return dead_letter, redriven
    topic = settings.topic(Topic.DEAD_LETTERS)
    raise ConfigurationError(
        f"{topic}/{position.partition}/{position.offset}: expected a dead letter, but there is none"
    )


@command.command()
@click.argument("positions", type=POSITION, nargs=-1, metavar="[[TOPIC/]PARTITION/OFFSET]...")
@selecting
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Send at most this many, the first ones.",
)
@click.option("--rate", type=POSITIVE, help="Send this many per second.")
@click.option("--dry-run", is_flag=True, help="Count what would be sent; send nothing.")
@click.option(
    "--discard", is_flag=True, help="Mark the dead letters as redriven without sending them."
)
@click.option(
    "--transform",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.py",
    help="File with `def transform(record)`, which returns the record to send, or None.",
)
@json_option
@pass_settings
def redrive(
    settings: Settings,
    selection: DeadLetterSelection,
    *,
    positions: Sequence[Position],
    limit: int | None,
    rate: float | None,
    dry_run: bool,
    discard: bool,
    transform: Path | None,
    in_json: bool,
) -> None:
    """Send dead letters as requests again: those at these positions, or all that are selected.

    Key, headers, reply topic and correlation id are kept, so that the answer goes where the first
    one was expected. Each dead letter is sent at most once: the log records which were sent. Exit
    code 1 if a dead letter was refused, or a position has none.
    """
    if discard and transform is not None:
        raise click.UsageError("--discard sends nothing: leave --transform out")
    order = RedriveJob(
        replace(selection, positions=_chosen(settings, positions)),
        limit=limit,
        rate=rate,
        dry_run=dry_run,
        discard=discard,
        transform=None if transform is None else load_transform(transform),
    )
    remembered = "" if dry_run else "they are remembered, and the same command goes on"
    with progress(remembered) as shown:
        tally = run(_redrive(settings, order, shown))
    if in_json:
        click.echo(json.dumps(_tally(tally, order), indent=2))
    else:
        for line in tally_lines(tally, order):
            say(line)
    if tally.refused or missing_positions(tally, order):
        raise Unsuccessful


async def _redrive(settings: Settings, order: RedriveJob, shown: Progress) -> RedriveResult:
    def advanced(part: float, tally: RedriveResult) -> None:
        shown.show(part, next(tally_lines(tally, order)))

    async with _open(settings, patient(TUNING)) as log:
        tally = await Redrive(log, settings, order, advanced=advanced).run()
    for gap in tally.gaps:
        say_gap(gap)
    return tally


def _tally(tally: RedriveResult, order: RedriveJob) -> dict[str, Any]:
    return {
        "dry_run": order.dry_run,
        "discarded" if order.discard else "sent": tally.sent.total(),
        "by_code": dict(tally.sent),
        "done_before": tally.done_before,
        "left": tally.left,
        "deadlines_dropped": tally.deadlines_dropped,
        "refused": [[str(identity), reason] for identity, reason in tally.refused],
        "missing_positions": missing_positions(tally, order),
    }


@command.command()
@selecting
@click.option("--pending", is_flag=True, help="Leave out dead letters that were redriven.")
@click.option(
    "--output",
    type=click.File("w", encoding="utf-8", lazy=True),
    default="-",
    help="Output file.  [default: stdout]",
)
@click.option(
    "--capture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a capture file instead, for `headrace replay --file`.",
)
@pass_settings
def export(
    settings: Settings,
    selection: DeadLetterSelection,
    *,
    pending: bool,
    output: TextIO,
    capture: Path | None,
) -> None:
    """Write dead letters as JSON lines: what `show --json` has, one per line.

    Key, value and the values of headers are in base64.
    """
    if capture is not None and output.name != "-":
        raise click.UsageError("give either --output or --capture")
    with ExitStack() as stack:
        if capture is None:

            def write(dead_letter: DeadLetter, redriven: bool) -> None:
                output.write(json.dumps(full(dead_letter, redriven)) + "\n")
        else:
            source = settings.topic(Topic.DEAD_LETTERS)
            writer = stack.enter_context(CaptureWriter(capture, source))

            def write(dead_letter: DeadLetter, redriven: bool) -> None:
                writer.add([dead_letter.record])

        count = run(_export(settings, selection, pending, write))
        if not count and capture is None:
            output.write("")  # opens an existing file, which is emptied
    click.echo(f"{count} dead letters written", err=True)


async def _export(
    settings: Settings,
    selection: DeadLetterSelection,
    pending: bool,
    write: Callable[[DeadLetter, bool], None],
) -> int:
    count = 0
    async with aclosing(_dead_letters(settings, selection)) as dead_letters:
        async for dead_letter, redriven in dead_letters:
            if not (pending and redriven):
                write(dead_letter, redriven)
                count += 1
    return count


# --- reading ----------------------------------------------------------------------------------


@asynccontextmanager
async def _open(settings: Settings, tuning: Tuning = TUNING) -> AsyncIterator[Log]:
    require_broker(settings, "the dead letters of a log in memory end with its process")
    async with open_log(settings, tuning) as log:
        yield log


async def _dead_letters(
    settings: Settings, selection: DeadLetterSelection
) -> AsyncGenerator[tuple[DeadLetter, bool], None]:
    """Yield dead letters, and whether each was redriven."""
    topic = settings.topic(Topic.DEAD_LETTERS)
    async with _open(settings) as log:
        partitions = await topic_partitions(log, topic)
        async with log.reader(partitions) as reader:
            done = await recall(log, settings, await spans_of(reader, partitions))
        async with aclosing(read_dead_letters(log, topic, selection, say_gap)) as dead_letters:
            async for dead_letter in dead_letters:
                yield dead_letter, dead_letter.record.offset in done[dead_letter.partition]


def _chosen(settings: Settings, positions: Sequence[Position]) -> frozenset[tuple[int, int]]:
    topic = settings.topic(Topic.DEAD_LETTERS)
    for position in positions:
        if position.topic not in (None, topic):
            raise ConfigurationError(
                f"expected a dead letter of {topic}, got one of {position.topic}"
            )
    return frozenset((position.partition, position.offset) for position in positions)
