"""`headrace offsets show|reset`: the acknowledged offsets of each source partition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from headrace.cli.event_loop import run
from headrace.cli.options import json_option
from headrace.cli.outcome import Unsuccessful
from headrace.cli.selection_options import parse_time_ms
from headrace.cli.settings import pass_settings, require_broker
from headrace.config import Settings
from headrace.runtime.log_factory import open_log
from headrace.tools.offsets import PartitionOffsets, Reset, Target, read_offsets
from headrace.tools.offsets import reset as reset_offsets
from headrace.tools.offsets.resetting import Edge
from headrace.topics import Topic

SHOWN_RANGES = 4

_WITHOUT_BROKER = "the offsets of a log in memory end with its process"


class _TargetType(click.ParamType[Target]):
    name = "target"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Target:
        text = str(value)
        if text in {"earliest", "latest"}:
            return Target(edge=Edge[text.upper()])
        if text.isdecimal():
            return Target(offset=int(text))
        try:
            return Target(timestamp_ms=parse_time_ms(text))
        except ValueError:
            self.fail(
                "expected earliest, latest, an offset, or an ISO time as 2026-05-01T12:00:00Z, "
                f"got {text!r}",
                param,
                ctx,
            )


@click.group()
def command() -> None:
    """Show or reset how far each source partition is answered."""


@command.command()
@json_option
@pass_settings
def show(settings: Settings, in_json: bool) -> None:
    """Show base, answered ranges above it, end and lag of each partition of `requests`.

    The base is what the group has committed: all below it is answered. The lag
    includes the ranges. Exit code 1 when a commit's metadata cannot be read.
    """
    states = run(_show(settings))
    if in_json:
        click.echo(json.dumps(_document(settings, [_described(each) for each in states]), indent=2))
    else:
        click.echo(_heading(settings))
        for line in _table(states):
            click.echo(line)
    for each in states:
        if each.hidden:
            click.echo(
                f"partition {each.partition}: an open transaction of another producer hides the "
                f"offsets {each.end} to {each.end + each.hidden - 1}: no service reads them before "
                "it has ended",
                err=True,
            )
        if each.position > each.end:
            click.echo(
                f"partition {each.partition}: the base {each.position} is beyond the end "
                f"{each.end}: records were lost, and `headrace run` goes on at the end",
                err=True,
            )
    unreadable = [each for each in states if each.form == "unreadable"]
    for each in unreadable:
        assert each.committed is not None
        click.echo(
            f"partition {each.partition}: metadata {each.committed.metadata[:20]!r} was not "
            "written by this version of Headrace, and `headrace run` refuses it",
            err=True,
        )
    if unreadable:
        raise Unsuccessful


@command.command()
@click.option(
    "--to",
    "target",
    type=_TargetType(),
    required=True,
    metavar="earliest|latest|OFFSET|TIME",
    help="An end of each partition, an offset, or the first record at or after an ISO 8601 time.",
)
@click.option(
    "--partition",
    "partitions",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="N",
    help="Only this partition; repeat it for more.  [default: all]",
)
@click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")
@json_option
@pass_settings
def reset(
    settings: Settings,
    target: Target,
    partitions: tuple[int, ...],
    dry_run: bool,
    in_json: bool,
) -> None:
    """Set the base of source partitions, while no stage is running.

    Forward, answered ranges above the new base stay, so that nothing is answered twice; what lies
    between and was not answered never will be. Backward, all from the new base on is answered
    again.
    """
    resets = run(_reset(settings, target, partitions, dry_run))
    if in_json:
        described = [_described_reset(each) for each in resets]
        document = _document(settings, described) | {"dry_run": dry_run}
        click.echo(json.dumps(document, indent=2))
        return
    click.echo(_heading(settings))
    for each in resets:
        click.echo(_line(each))
    if dry_run:
        click.echo("dry run: nothing was changed", err=True)


async def _show(settings: Settings) -> list[PartitionOffsets]:
    require_broker(settings, _WITHOUT_BROKER)
    async with open_log(settings) as log:
        return await read_offsets(log, settings)


async def _reset(
    settings: Settings, target: Target, partitions: Sequence[int], dry_run: bool
) -> list[Reset]:
    require_broker(settings, _WITHOUT_BROKER)
    async with open_log(settings) as log:
        return await reset_offsets(log, settings, target, partitions, dry_run=dry_run)


def _heading(settings: Settings) -> str:
    return (
        f"group {settings.namespace}, topic {settings.topic(Topic.REQUESTS)}, "
        f"{settings.delivery.guarantee}"
    )


def _document(settings: Settings, partitions: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "group": settings.namespace,
        "topic": settings.topic(Topic.REQUESTS),
        "guarantee": settings.delivery.guarantee,
        "partitions": partitions,
    }


def _described(state: PartitionOffsets) -> dict[str, Any]:
    return {
        "partition": state.partition,
        "base": None if state.committed is None else state.committed.offset,
        "answered": []
        if state.progress is None
        else [list(each) for each in state.progress.ranges],
        "metadata": state.form,
        "beginning": state.beginning,
        "end": state.end,
        "lag": state.lag,
        "unanswered": state.unanswered,
        "hidden": state.hidden,
    }


def _described_reset(each: Reset) -> dict[str, Any]:
    return {
        "partition": each.before.partition,
        "before": _described(each.before),
        "base": each.after.base,
        "answered": [list(span) for span in each.after.ranges],
        "skips": each.skips,
        "repeats": each.repeats,
    }


def _table(states: Sequence[PartitionOffsets]) -> list[str]:
    rows = [("partition", "base", "end", "lag", "unanswered", "metadata", "answered above base")]
    rows += [
        (
            str(each.partition),
            "-" if each.committed is None else str(each.committed.offset),
            str(each.end),
            str(each.lag),
            str(each.unanswered),
            each.form,
            _ranges(each),
        )
        for each in states
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]


def _ranges(state: PartitionOffsets) -> str:
    """Format answered offsets, both ends inclusive: `5, 7-9`; if there are many, only the first
    few.
    """
    if state.progress is None:
        return "-"
    ranges = state.progress.ranges
    shown = ", ".join(
        str(start) if stop == start + 1 else f"{start}-{stop - 1}"
        for start, stop in ranges[:SHOWN_RANGES]
    )
    more = len(ranges) - SHOWN_RANGES
    return (shown or "-") + (f" and {more} more ranges" if more > 0 else "")


def _line(each: Reset) -> str:
    before = "nothing" if each.before.committed is None else str(each.before.committed.offset)
    changes = [
        f"{count} {what}"
        for count, what in (
            (each.skips, "unanswered are passed over"),
            (each.repeats, "answered are answered again"),
        )
        if count
    ]
    ending = f": {', '.join(changes)}" if changes else ""
    return f"partition {each.before.partition}: {before} -> {each.after.base}{ending}"
