"""`headrace replay`: counts or saves recorded requests, or sends them to a topic or a pipeline."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click

from headrace.cli.event_loop import run
from headrace.cli.lazy_group import LazyGroup
from headrace.cli.options import POSITIVE, json_option, options_as
from headrace.cli.output import say, say_gap
from headrace.cli.progress import watching
from headrace.cli.selection_options import (
    as_json,
    chosen_source,
    selection_options,
)
from headrace.cli.settings import pass_settings, require_broker
from headrace.config import ModelSettings, Settings
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.telemetry.logs import configure_logging
from headrace.tools.dead_letters.dead_letter import time_text
from headrace.tools.replay.jobs import (
    RecordingSource,
    Replayed,
    TopicJob,
    Watch,
    new_run_id,
    now_ms,
    open_recording,
    replay_into_topic,
)
from headrace.tools.replay.jobs import (
    count as count_records,
)
from headrace.tools.replay.jobs import (
    save as save_records,
)
from headrace.tools.replay.recording import PartitionTotals, Recording
from headrace.tools.replay.replay import (
    FixedRate,
    OriginalSpacing,
    Pace,
    Replay,
    ReplayResult,
    Unpaced,
)
from headrace.tools.replay.sinks import Marking, into_pipeline
from headrace.topics import Topic

# --- replay into a pipeline in this process ------------------------------------------------------


class PipelineJob(NamedTuple):
    """Parameters of a replay into a pipeline with the models of a directory."""

    models: Path
    pace: Pace
    marking: Marking
    by_key: bool = False


async def replay_into_models(
    settings: Settings,
    source: RecordingSource,
    job: PipelineJob,
    watch: Watch,
) -> tuple[ReplayResult, Counter[str]]:
    """Replay into the four services with the models of a directory; no broker is written to.

    Returns the outcome, and the number of answers by `x-status`.

    Raises:
        ConfigurationError: the models cannot be served.
        Unanswered: an answer did not come.
    """
    configure_logging("warning")
    embedded = settings.model_copy(
        update={"kafka": None, "models": ModelSettings(repository=job.models)}
    )

    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(open_log(settings))
        recording = await stack.enter_async_context(
            open_recording(log, source.origin, source.selection)
        )
        memory = await stack.enter_async_context(open_log(embedded))
        await stack.enter_async_context(running(Pipeline(embedded, memory)))
        sink = await stack.enter_async_context(
            into_pipeline(memory, embedded, job.marking, now_ms, by_key=job.by_key)
        )
        outcome = await Replay(recording, job.pace, sink, advanced=watch(recording)).run()
    return outcome, sink.statuses


# --- the command ---------------------------------------------------------------------------------


MODULES = {
    "compare": (
        "headrace.cli.replay_compare",
        "Compare a candidate with the current model on recorded requests.",
    ),
    "simulate": (
        "headrace.cli.replay_simulate",
        "Simulate other limits, rates and numbers of instances.",
    ),
}


@click.group(cls=LazyGroup, modules=MODULES)
def command() -> None:
    """Count, save or replay recorded requests, or evaluate models and limits with them.

    They are read from a topic or a capture file, up to its current end, without a consumer group.
    """


# --- counting and saving ----------------------------------------------------------------------


@command.command()
@selection_options
@json_option
@pass_settings
def count(settings: Settings, /, *, in_json: bool, **chosen: Any) -> None:
    """Count the selected records by partition, with bytes, offsets and time span."""
    source = chosen_source(settings, chosen)
    with watching() as watch:
        totals = run(_count(settings, source, _telling(watch)))
    _report_totals(totals, in_json)


async def _count(
    settings: Settings, source: RecordingSource, watch: Watch
) -> list[PartitionTotals]:
    async with (
        open_log(settings) as log,
        open_recording(log, source.origin, source.selection) as recording,
    ):
        return await count_records(recording, watch(recording))


@command.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE")
@selection_options
@json_option
@pass_settings
def save(settings: Settings, /, *, path: Path, in_json: bool, **chosen: Any) -> None:
    """Save the selected records as capture file FILE, which must not exist yet."""
    source = chosen_source(settings, chosen)
    with watching(f"{path} can be read, and lacks the rest") as watch:
        saved = run(_save(settings, source, path, _telling(watch)))
    _report(saved, str(path), in_json)


async def _save(settings: Settings, source: RecordingSource, path: Path, watch: Watch) -> Replayed:
    async with (
        open_log(settings) as log,
        open_recording(log, source.origin, source.selection) as recording,
    ):
        return Replayed("", await save_records(recording, path, watch(recording)))


# --- sending ----------------------------------------------------------------------------------


def _speed(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Parse a factor; infinity for `max`."""
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


PACE_OPTIONS = (
    click.option(
        "--speed",
        callback=_speed,
        metavar="FACTOR|max",
        help="Multiple of the original pace, or as fast as possible.  [default: 1]",
    ),
    click.option(
        "--rate",
        type=POSITIVE,
        metavar="N",
        help="Send this many records per second instead.",
    ),
    click.option(
        "--by-key", is_flag=True, help="Choose partitions by key instead of keeping them."
    ),
    click.option("--run-id", metavar="ID", help="Value of x-replay-run.  [default: a new id]"),
)
SEND_OPTIONS = (
    click.option("--to", "to", metavar="TOPIC", help="Send to this topic."),
    click.option(
        "--to-requests", is_flag=True, help="Send to the requests topic of a running pipeline."
    ),
    *PACE_OPTIONS,
    click.option("--keep-reply", is_flag=True, help="Keep the reply topics of the originals."),
    click.option("--reply-to", metavar="TOPIC", help="Reply topic of all copies."),
    click.option(
        "--checkpoint",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Checkpoint file, to resume an interrupted run.",
    ),
)


class Pacing(NamedTuple):
    """Values of the options of `models`, as given."""

    speed: float | None
    rate: float | None
    by_key: bool
    run_id: str | None


class Sending(NamedTuple):
    """Values of the options of `send`: target, pace, and marks of the copies."""

    to: str | None
    to_requests: bool
    speed: float | None
    rate: float | None
    by_key: bool
    run_id: str | None
    keep_reply: bool
    reply_to: str | None
    checkpoint: Path | None

    def check(self) -> None:
        """Raise `click.UsageError` if options conflict."""
        if bool(self.to) == self.to_requests:
            raise click.UsageError("give either --to or --to-requests")
        if self.keep_reply and self.reply_to:
            raise click.UsageError("give either --keep-reply or --reply-to")


def _pace(given: Pacing | Sending) -> Pace:
    """Return the pace of the records. Raises `click.UsageError`."""
    if given.speed is not None and given.rate is not None:
        raise click.UsageError("give either --speed or --rate")
    if given.rate is not None:
        return FixedRate(given.rate)
    return Unpaced() if given.speed == float("inf") else OriginalSpacing(given.speed or 1.0)


@command.command()
@selection_options
@options_as(Sending, *SEND_OPTIONS)
@json_option
@pass_settings
def send(settings: Settings, /, *, given: Sending, in_json: bool, **chosen: Any) -> None:
    """Send recorded requests again, into a topic or a running pipeline.

    They are sent at their original pace, or another one. Copies are marked (x-replay-of,
    x-replay-run), their deadlines are moved, and their reply topics removed.
    """
    given.check()
    pace = _pace(given)
    source = chosen_source(settings, chosen)
    require_broker(settings, "without one no topic can be written")
    topic = given.to or settings.topic(Topic.REQUESTS)
    marking = Marking(given.run_id or new_run_id(), given.keep_reply, given.reply_to)
    options = as_json(chosen) | {
        "source": str(source.origin),
        "target": topic,
        "by_key": given.by_key,
        "keep_reply": given.keep_reply,
        "reply_to": given.reply_to,
    }
    job = TopicJob(topic, pace, marking, given.by_key, given.checkpoint, options)
    afterwards = f"sent to {topic} (run {marking.run_id})"
    if given.checkpoint is not None:
        afterwards = f"sent to {topic}; the same command goes on from {given.checkpoint}"
    with watching(afterwards) as watch:
        replayed = run(_into_topic(settings, source, job, _telling(watch)))
    _report(replayed, topic, in_json)


async def _into_topic(
    settings: Settings, source: RecordingSource, job: TopicJob, watch: Watch
) -> Replayed:
    async with open_log(settings) as log:
        return await replay_into_topic(log, source, job, watch)


@command.command()
@click.argument(
    "repository",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
)
@selection_options
@options_as(Pacing, *PACE_OPTIONS)
@json_option
@pass_settings
def models(
    settings: Settings, /, *, repository: Path, given: Pacing, in_json: bool, **chosen: Any
) -> None:
    """Send recorded requests to a pipeline in this process that serves the models of DIR.

    No broker is written to. Answers are counted by status.
    """
    from headrace.cli.replay import PipelineJob, replay_into_models

    marking = Marking(given.run_id or new_run_id())
    job = PipelineJob(repository, _pace(given), marking, given.by_key)
    source = chosen_source(settings, chosen)
    with watching() as watch:
        outcome, statuses = run(replay_into_models(settings, source, job, _telling(watch)))
    _report(Replayed(marking.run_id, outcome), str(repository), in_json, dict(statuses))


def _telling(watch: Watch) -> Watch:
    """Print the notice of a recording when it is opened."""

    def telling(recording: Recording) -> Any:
        if recording.notice:
            say(f"headrace: {recording.notice}", err=True)
        recording.on_unreadable = say_gap
        return watch(recording)

    return telling


# --- output --------------------------------------------------------------------------------------


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
        say(
            f"{each.partition}: {each.records} records, {each.bytes} bytes, offsets "
            f"{each.first_offset} to {each.last_offset}, {_span(each.first_ms, each.last_ms)}"
        )
    records, size = sum(each.records for each in totals), sum(each.bytes for each in totals)
    first_ms = min((each.first_ms for each in totals), default=0)
    last_ms = max((each.last_ms for each in totals), default=0)
    when = f", {_span(first_ms, last_ms)}" if records else ""
    click.echo(f"in all: {records} records, {size} bytes{when}")


def _span(first_ms: int, last_ms: int) -> str:
    return f"{(last_ms - first_ms) / 1000:.3f} s from {time_text(first_ms)}"
