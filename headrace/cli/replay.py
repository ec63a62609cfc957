"""`headrace replay`: recorded requests again, into a topic, a pipeline or a file."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import click

from headrace.cli.event_loop import run
from headrace.cli.options import options_as
from headrace.cli.output import say
from headrace.cli.replay_modes import ReplayCommand
from headrace.cli.replay_progress import progress
from headrace.cli.selection_options import (
    as_json,
    chosen_source,
    require_broker,
    selection_options,
)
from headrace.cli.settings import pass_settings
from headrace.config import Settings
from headrace.opening import open_log
from headrace.replay.jobs import (
    Replayed,
    Source,
    TopicJob,
    Watch,
    count,
    new_run_id,
    replay_into_topic,
    save,
)
from headrace.replay.marking import Marking
from headrace.replay.opening import open_recording
from headrace.replay.pacing import FixedRate, OriginalSpacing, Pace, Unpaced
from headrace.replay.recording import Recording
from headrace.replay.totals import PartitionTotals
from headrace.topics import Topic


class Given(NamedTuple):
    """What the options say, as it was given: where to, how fast, and how copies are marked."""

    to: str | None
    to_requests: bool
    models: Path | None
    save_file: Path | None
    dry_run: bool
    speed: float | None
    rate: float | None
    by_key: bool
    keep_reply: bool
    reply_to: str | None
    run_id: str | None
    checkpoint: Path | None

    def check(self) -> None:
        """Raises `click.UsageError` where options do not go together."""
        into_topic = bool(self.to) or self.to_requests
        others = (self.models is not None, self.save_file is not None, self.dry_run)
        if sum((bool(self.to), self.to_requests, *others)) != 1:
            raise click.UsageError(
                "give one of --to, --to-requests, --models, --save and --dry-run"
            )
        if self.speed is not None and self.rate is not None:
            raise click.UsageError("give either --speed or --rate")
        if self.keep_reply and self.reply_to:
            raise click.UsageError("give either --keep-reply or --reply-to")
        if self.checkpoint is not None and not into_topic:
            raise click.UsageError("--checkpoint goes with --to and --to-requests")

    @property
    def pace(self) -> Pace:
        """When each record is due."""
        if self.rate is not None:
            return FixedRate(self.rate)
        return Unpaced() if self.speed == float("inf") else OriginalSpacing(self.speed or 1.0)

    @property
    def marking(self) -> Marking:
        """Of the copies."""
        return Marking(self.run_id or new_run_id(), self.keep_reply, self.reply_to)


def _speed(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A factor; infinity for `max`."""
    if value is None or value == "max":
        return None if value is None else float("inf")
    try:
        speed = float(value)
        OriginalSpacing(speed)
    except ValueError as error:
        raise click.BadParameter(
            f"expected a positive factor, or max, got {value!r}", ctx, param
        ) from error
    return speed


_OPTIONS = (
    click.option("--to", "to", metavar="TOPIC", help="Into this topic."),
    click.option("--to-requests", is_flag=True, help="Into the requests of a running pipeline."),
    click.option(
        "--models",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        metavar="DIR",
        help="Into a pipeline in this process with these models; needs no broker.",
    ),
    click.option(
        "--save",
        "save_file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Into a capture file, as they are.",
    ),
    click.option("--dry-run", is_flag=True, help="Nowhere: count them, by partition."),
    click.option(
        "--speed",
        callback=_speed,
        metavar="FACTOR|max",
        help="So many times as fast as they came, or as fast as possible.  [default: 1]",
    ),
    click.option(
        "--rate",
        type=click.FloatRange(min=0, min_open=True),
        metavar="N",
        help="So many records a second instead.",
    ),
    click.option("--by-key", is_flag=True, help="Choose partitions by key, not by the original's."),
    click.option("--keep-reply", is_flag=True, help="Answer where the originals were answered."),
    click.option("--reply-to", metavar="TOPIC", help="Answer all of them here."),
    click.option("--run-id", metavar="ID", help="What x-replay-run says.  [default: a new one]"),
    click.option(
        "--checkpoint",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Go on from here after an end; made if it is not there.",
    ),
)


@click.command(
    cls=ReplayCommand,
    epilog="With --compare: compare two models over what was recorded; see --compare --help. "
    "With --simulate: what other limits would make of it; see --simulate --help.",
)
@selection_options
@options_as(Given, *_OPTIONS)
@click.option("--json", "in_json", is_flag=True, help="Write JSON.")
@pass_settings
def command(settings: Settings, /, *, given: Given, in_json: bool, **chosen: Any) -> None:
    """Send recorded requests again, at the pace at which they came, into a topic, the requests
    of a running pipeline, a pipeline in this process, or a capture file.

    They are read from a topic or a capture file, by a reader that is in no consumer group, up to
    where it ends now. Copies are marked (x-replay-of, x-replay-run), their deadlines moved, and
    their reply topics removed.
    """
    given.check()
    source = chosen_source(settings, chosen)
    if given.dry_run or given.save_file is not None:
        _read_only(settings, source, given.save_file, in_json)
        return
    if given.models is not None:
        plan = (given.models, given.pace, given.marking, given.by_key)
        _into_models(settings, source, plan, in_json)
        return
    job = _topic_job(settings, source, given, as_json(chosen))
    with progress() as watch:
        replayed = run(_into_topic(settings, source, job, watch))
    _report(replayed, job.topic, in_json)


def _topic_job(
    settings: Settings, source: Source, given: Given, chosen: dict[str, Any]
) -> TopicJob:
    require_broker(settings, "to write to a topic")
    topic = given.to or settings.topic(Topic.REQUESTS)
    options = chosen | {
        "source": str(source.origin),
        "target": topic,
        "by_key": given.by_key,
        "keep_reply": given.keep_reply,
        "reply_to": given.reply_to,
    }
    return TopicJob(topic, given.pace, given.marking, given.by_key, given.checkpoint, options)


# --- the runs ---------------------------------------------------------------------------------


async def _into_topic(settings: Settings, source: Source, job: TopicJob, watch: Watch) -> Replayed:
    async with open_log(settings) as log:
        return await replay_into_topic(log, source, job, _telling(watch))


def _into_models(
    settings: Settings, source: Source, plan: tuple[Path, Pace, Marking, bool], in_json: bool
) -> None:
    from headrace.cli.replay_pipeline import PipelineJob, replay_into_models

    job = PipelineJob(*plan)
    with progress() as watch:
        outcome, statuses = run(replay_into_models(settings, source, job, _telling(watch)))
    _report(Replayed(job.marking.run_id, outcome), str(job.models), in_json, dict(statuses))


def _read_only(settings: Settings, source: Source, path: Path | None, in_json: bool) -> None:
    with progress() as watch:
        found = run(_save_or_count(settings, source, path, _telling(watch)))
    if isinstance(found, list):
        _report_totals(found, in_json)
    else:
        _report(found, str(path), in_json)


async def _save_or_count(
    settings: Settings, source: Source, path: Path | None, watch: Watch
) -> Replayed | list[PartitionTotals]:
    async with (
        open_log(settings) as log,
        open_recording(log, source.origin, source.selection) as recording,
    ):
        advanced = watch(recording)
        if path is None:
            return await count(recording)
        return Replayed("", await save(recording, path, advanced))


def _telling(watch: Watch) -> Watch:
    """Say what is to be known of a recording when it is opened."""

    def telling(recording: Recording) -> Any:
        if recording.notice:
            say(f"headrace: {recording.notice}", err=True)
        return watch(recording)

    return telling


# --- what is said of them ---------------------------------------------------------------------


def _report(
    replayed: Replayed, target: str, in_json: bool, statuses: dict[str, int] | None = None
) -> None:
    outcome = replayed.outcome
    if in_json:
        fields: dict[str, Any] = {"run": replayed.run_id} if replayed.run_id else {}
        fields |= {"target": target, "resumed": replayed.resumed} | outcome._asdict()
        fields["rate_per_s"] = outcome.rate_per_s
        if statuses is not None:
            fields["statuses"] = statuses
        click.echo(json.dumps(fields, indent=2))
        return
    run_id = f" (run {replayed.run_id})" if replayed.run_id else ""
    click.echo(
        f"{outcome.records} records, {outcome.bytes} bytes, to {target} "
        f"in {outcome.seconds:.2f} s: {outcome.rate_per_s:.0f} per second{run_id}"
    )
    if replayed.resumed:
        click.echo(f"resumed: {outcome.skipped} were there already")
    if outcome.spacing_p50_ms is not None:
        click.echo(
            f"spacing error: median {outcome.spacing_p50_ms:.2f} ms, "
            f"99 % within {outcome.spacing_p99_ms:.2f} ms, at most {outcome.spacing_max_ms:.2f} ms"
        )
    for status, answers in sorted((statuses or {}).items()):
        say(f"{status}: {answers}")


def _report_totals(totals: list[PartitionTotals], in_json: bool) -> None:
    if in_json:
        rows = [{**each._asdict(), **each.partition._asdict()} for each in totals]
        click.echo(json.dumps(rows, indent=2))
        return
    for each in totals:
        click.echo(
            f"{each.partition}: {each.records} records, {each.bytes} bytes, offsets "
            f"{each.first_offset} to {each.last_offset}, {_span(each.first_ms, each.last_ms)}"
        )
    records, size = sum(each.records for each in totals), sum(each.bytes for each in totals)
    first_ms = min((each.first_ms for each in totals), default=0)
    last_ms = max((each.last_ms for each in totals), default=0)
    when = f", {_span(first_ms, last_ms)}" if records else ""
    click.echo(f"in all: {records} records, {size} bytes{when}")


def _span(first_ms: int, last_ms: int) -> str:
    first = datetime.fromtimestamp(first_ms / 1000, UTC).isoformat(timespec="milliseconds")
    return f"{(last_ms - first_ms) / 1000:.3f} s from {first}"
