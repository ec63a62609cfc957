"""`headrace dlq list|show|redrive|export`: the dead letters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import click

from headrace.cli.dlq_options import (
    PLACE,
    Newest,
    Place,
    counts_lines,
    selecting,
    table,
    tally_lines,
)
from headrace.cli.event_loop import run
from headrace.cli.outcome import Unsuccessful
from headrace.cli.output import say, say_gap
from headrace.cli.progress import Progress, progress
from headrace.cli.settings import pass_settings
from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.log.port import Log
from headrace.runtime.log_factory import open_log
from headrace.tools.dead_letters import Letter, Order, Redrive, Selection, Tally, read_letters
from headrace.tools.dead_letters.reading import partitions_of, spans_of
from headrace.tools.dead_letters.remembering import recall
from headrace.tools.dead_letters.showing import full, paragraphs, summary
from headrace.tools.dead_letters.transforming import load_transform
from headrace.tools.replay.capture import CaptureWriter
from headrace.topics import Topic

json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


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
    help="Show at most so many, the newest; all are counted.",
)
@click.option("--pending", is_flag=True, help="Without those that were redriven.")
@json_option
@pass_settings
def list_(
    settings: Settings, selection: Selection, limit: int, pending: bool, as_json: bool
) -> None:
    """List dead letters by time, the newest last, and count them by code."""
    shown, counts = run(_list(settings, selection, limit, pending))
    if as_json:
        listed = {"letters": shown, "counts": dict(counts), "total": counts.total()}
        click.echo(json.dumps(listed, indent=2))
        return
    for line in (*table(shown), *counts_lines(counts, len(shown))):
        say(line)


async def _list(
    settings: Settings, selection: Selection, limit: int, pending: bool
) -> tuple[list[dict[str, Any]], Counter[str]]:
    newest = Newest(limit)
    counts: Counter[str] = Counter()
    async with aclosing(_letters(settings, selection)) as letters:
        async for letter, redriven in letters:
            if pending and redriven:
                continue
            counts[letter.code] += 1
            newest.add(letter.record.timestamp, summary(letter, redriven))
    return newest.rows(), counts


@command.command()
@click.argument("place", type=PLACE, metavar="[TOPIC/]PARTITION/OFFSET")
@json_option
@pass_settings
def show(settings: Settings, place: Place, as_json: bool) -> None:
    """Show one dead letter: its error, its headers, and the request as it can be read."""
    letter, redriven = run(_one(settings, place))
    if as_json:
        click.echo(json.dumps(full(letter, redriven), indent=2))
        return
    for line in paragraphs(letter, redriven):
        say(line)


async def _one(settings: Settings, place: Place) -> tuple[Letter, bool]:
    selection = Selection(places=_chosen(settings, [place]))
    async with aclosing(_letters(settings, selection)) as letters:
        async for letter, redriven in letters:
            return letter, redriven
    topic = settings.topic(Topic.DEAD_LETTERS)
    raise ConfigurationError(
        f"{topic}/{place.partition}/{place.offset}: expected a dead letter, but there is none"
    )


@command.command()
@click.argument("places", type=PLACE, nargs=-1, metavar="[[TOPIC/]PARTITION/OFFSET]...")
@selecting
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="At most so many, the first ones read."
)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Requests a second.")
@click.option("--dry-run", is_flag=True, help="Count what would be sent; send nothing.")
@click.option("--discard", is_flag=True, help="Count them as redriven, without sending them.")
@click.option(
    "--transform",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.py",
    help="With `def transform(record)`, which gives the record to send, or None.",
)
@json_option
@pass_settings
def redrive(
    settings: Settings,
    selection: Selection,
    *,
    places: Sequence[Place],
    limit: int | None,
    rate: float | None,
    dry_run: bool,
    discard: bool,
    transform: Path | None,
    as_json: bool,
) -> None:
    """Send dead letters as requests again: those at these places, or all that the options select.

    Key, headers, reply topic and correlation id stay, so that the answer goes to where the first
    one was wanted. Each letter is sent once: what was sent is remembered in the log. Exit code 1
    when a letter was refused.
    """
    if discard and transform is not None:
        raise click.UsageError("--discard sends nothing: leave --transform out")
    order = Order(
        replace(selection, places=_chosen(settings, places)),
        limit=limit,
        rate=rate,
        dry_run=dry_run,
        discard=discard,
        transform=None if transform is None else load_transform(transform),
    )
    remembered = "" if dry_run else "they are remembered, and the same command goes on"
    with progress(remembered) as shown:
        tally = run(_redrive(settings, order, shown))
    if as_json:
        click.echo(json.dumps(_tally(tally, order), indent=2))
    else:
        for line in tally_lines(tally, order):
            say(line)
    if tally.refused:
        raise Unsuccessful


async def _redrive(settings: Settings, order: Order, shown: Progress) -> Tally:
    def advanced(part: float, tally: Tally) -> None:
        shown.show(part, next(tally_lines(tally, order)))

    async with _open(settings) as log:
        tally = await Redrive(log, settings, order, advanced=advanced).run()
    for gap in tally.gaps:
        say_gap(gap)
    return tally


def _tally(tally: Tally, order: Order) -> dict[str, Any]:
    return {
        "dry_run": order.dry_run,
        "discarded" if order.discard else "sent": tally.sent.total(),
        "by_code": dict(tally.sent),
        "done_before": tally.done_before,
        "left": tally.left,
        "deadlines_dropped": tally.deadlines_dropped,
        "refused": [[str(identity), reason] for identity, reason in tally.refused],
    }


@command.command()
@selecting
@click.option("--pending", is_flag=True, help="Without those that were redriven.")
@click.option(
    "--output",
    type=click.File("w", encoding="utf-8", lazy=True),
    default="-",
    help="A file.  [default: stdout]",
)
@click.option(
    "--capture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a capture file instead, as the --file of `headrace replay` names one.",
)
@pass_settings
def export(
    settings: Settings,
    selection: Selection,
    *,
    pending: bool,
    output: TextIO,
    capture: Path | None,
) -> None:
    """Write dead letters as JSON lines: what `show --json` has, one letter a line.

    Key, value and the values of headers are in base64.
    """
    with ExitStack() as stack:
        if capture is None:

            def write(letter: Letter, redriven: bool) -> None:
                output.write(json.dumps(full(letter, redriven)) + "\n")
        else:
            source = settings.topic(Topic.DEAD_LETTERS)
            writer = stack.enter_context(CaptureWriter(capture, source))

            def write(letter: Letter, redriven: bool) -> None:
                writer.add([letter.record])

        count = run(_export(settings, selection, pending, write))
    click.echo(f"{count} dead letters written", err=True)


async def _export(
    settings: Settings,
    selection: Selection,
    pending: bool,
    write: Callable[[Letter, bool], None],
) -> int:
    count = 0
    async with aclosing(_letters(settings, selection)) as letters:
        async for letter, redriven in letters:
            if not (pending and redriven):
                write(letter, redriven)
                count += 1
    return count


# --- reading ----------------------------------------------------------------------------------


@asynccontextmanager
async def _open(settings: Settings) -> AsyncIterator[Log]:
    if settings.kafka is None:
        raise ConfigurationError(
            "dlq: expected a broker (kafka.bootstrap_servers), got the embedded log, whose dead "
            "letters end with its process"
        )
    async with open_log(settings) as log:
        yield log


async def _letters(
    settings: Settings, selection: Selection
) -> AsyncGenerator[tuple[Letter, bool], None]:
    """Yield letters, and whether each was redriven."""
    topic = settings.topic(Topic.DEAD_LETTERS)
    async with _open(settings) as log:
        partitions = await partitions_of(log, topic)
        async with log.reader(partitions) as reader:
            done = await recall(log, settings, await spans_of(reader, partitions))
        async with aclosing(read_letters(log, topic, selection, say_gap)) as letters:
            async for letter in letters:
                yield letter, letter.record.offset in done[letter.partition]


def _chosen(settings: Settings, places: Sequence[Place]) -> frozenset[tuple[int, int]]:
    topic = settings.topic(Topic.DEAD_LETTERS)
    for place in places:
        if place.topic not in (None, topic):
            raise ConfigurationError(f"expected a letter of {topic}, got one of {place.topic}")
    return frozenset((place.partition, place.offset) for place in places)
