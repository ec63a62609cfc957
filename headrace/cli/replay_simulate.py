"""`headrace replay simulate`: predicts the effect of other limits, rates and instances."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from headrace.cli.event_loop import run
from headrace.cli.options import ANSWERS_FILE, chosen_answers, json_option, options_as
from headrace.cli.output import say
from headrace.cli.progress import Progress, progress
from headrace.cli.selection_options import chosen_source, selection_options
from headrace.cli.settings import pass_settings
from headrace.config import MOST_INSTANCES, MOST_QUEUE_DELAY_MS, MOST_ROWS, Settings
from headrace.errors import ConfigurationError
from headrace.log.port import Log
from headrace.models.version import ModelVersion
from headrace.runtime.log_factory import open_log
from headrace.services.batcher.batcher import DynamicBatcher
from headrace.tools.replay.jobs import RecordingSource, open_recording
from headrace.tools.replay.recording import Selection
from headrace.tools.simulate.arrivals import read_arrivals
from headrace.tools.simulate.events import Policy, SimulatedLimits
from headrace.tools.simulate.report import cells, curve, table
from headrace.tools.simulate.scenarios import (
    Scenario,
    ScenarioResult,
    latest_models,
    only,
    resolved,
    scenarios,
    served_now,
    simulate,
)
from headrace.tools.simulate.service_times import ServiceTime, learn, measure, parse_service_time

T = TypeVar("T", int, float)


class SimulationJob(NamedTuple):
    """Parameters of a simulation.

    Attributes:
        models: the repository with the current limits, whose models are measured if batch durations
            are not known otherwise; None for the settings'.
        service_times: by model, or under "" for all others.
        answers: a topic, or a capture file.
    """

    source: RecordingSource
    models: Path | None
    service_times: Mapping[str, ServiceTime]
    answers: str | Path | None
    scenarios: Sequence[Scenario]


class Simulated(NamedTuple):
    """Results of a simulation.

    Attributes:
        times: S(b) of each arriving model.
        notices: what was left out, for display.
    """

    source: str
    times: Mapping[str, ServiceTime]
    outcomes: Sequence[ScenarioResult]
    notices: Sequence[str]


_SLOWEST, _FASTEST = 0.001, 1_000_000
"""Bounds of a rate factor, within which times fit into 64 bits."""


def _each(
    of: Callable[[str], T], low: float, high: float
) -> Callable[[click.Context, click.Parameter, str | None], tuple[T, ...]]:
    """Return a parser of numbers separated by commas."""

    def parse(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[T, ...]:
        try:
            numbers = tuple(of(part) for part in text.split(",")) if text else ()
        except ValueError:
            message = f"expected numbers as 1,2,4, got {text!r}"
            raise click.BadParameter(message, ctx, param) from None
        for number in numbers:
            if not low <= number <= high:
                message = f"expected numbers from {low:,} to {high:,}, got {number}"
                raise click.BadParameter(message, ctx, param)
        return numbers

    return parse


def _given_times(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> dict[str, ServiceTime]:
    try:
        return dict(parse_service_time(text) for text in texts)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


class SimulateOptions(NamedTuple):
    """Values of the options, as given."""

    service_times: dict[str, ServiceTime]
    answers: str | None
    answers_file: Path | None
    models: Path | None
    rate_factors: tuple[float, ...]
    instances: tuple[int, ...]
    max_batch_sizes: tuple[int, ...]
    max_queue_delays_ms: tuple[float, ...]


_OPTIONS = (
    click.option(
        "--service-time",
        "service_times",
        multiple=True,
        callback=_given_times,
        metavar="[MODEL=]T0+A",
        help="A batch of b rows takes T0 + A b microseconds.",
    ),
    click.option(
        "--answers", metavar="TOPIC", help="Learn how long batches take from answers on this topic."
    ),
    ANSWERS_FILE,
    click.option(
        "--models",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        metavar="DIR",
        help="Use the limits of these models, and measure unknown durations of batches.",
    ),
    click.option(
        "--rate-factor",
        "rate_factors",
        callback=_each(float, _SLOWEST, _FASTEST),
        metavar="K,...",
        help="Multiply the arrival rate by these factors.",
    ),
    click.option(
        "--instances",
        callback=_each(int, 1, MOST_INSTANCES),
        metavar="N,...",
        help="Numbers of instances of each model.",
    ),
    click.option(
        "--max-batch-size",
        "max_batch_sizes",
        callback=_each(int, 1, MOST_ROWS),
        metavar="B,...",
        help="Maximum batch sizes, in rows.",
    ),
    click.option(
        "--max-queue-delay-ms",
        "max_queue_delays_ms",
        callback=_each(float, 0, MOST_QUEUE_DELAY_MS),
        metavar="MS,...",
        help="Maximum queue delays, in milliseconds.",
    ),
)


@click.command()
@selection_options
@options_as(SimulateOptions, *_OPTIONS)
@json_option
@pass_settings
def command(
    settings: Settings,
    /,
    *,
    given: SimulateOptions,
    in_json: bool,
    **chosen: Any,
) -> None:
    """Predict latency, batches and missed deadlines under other limits, at other rates or with more
    instances, without running a model: the batcher's own rules on recorded arrivals, in simulated
    time.

    How long a batch takes is given (--service-time), learned from recorded answers (--answers),
    or measured (--models), in this order. Every combination of the options is a scenario.
    """
    job = _job(settings, given, chosen)
    with progress() as shown:
        found = run(simulated(settings, job, shown))
    _show(found, in_json=in_json)


def _job(settings: Settings, given: SimulateOptions, chosen: dict[str, Any]) -> SimulationJob:
    recorded = chosen_answers(settings, given.answers, given.answers_file)
    if not given.service_times and recorded is None and given.models is None:
        raise click.UsageError(
            "give --service-time, --answers, --answers-file or --models: how long do batches take?"
        )
    return SimulationJob(
        chosen_source(settings, chosen),
        given.models,
        given.service_times,
        recorded,
        scenarios(
            given.rate_factors,
            given.instances,
            given.max_batch_sizes,
            given.max_queue_delays_ms,
        ),
    )


def _show(found: Simulated, *, in_json: bool) -> None:
    for notice in found.notices:
        say(f"headrace: {notice}", err=True)
    rows = [cells(each) for each in found.outcomes]
    if in_json:
        fields = {
            "source": found.source,
            "service_times": {name: curve(each) for name, each in found.times.items()},
            "outcomes": [each.as_json() for each in found.outcomes],
        }
        click.echo(json.dumps(fields, indent=2))
        return
    for name, service_time in sorted(found.times.items()):
        say(f"S(b) of {name}: {service_time}")
    for line in table(rows):
        say(line)


async def simulated(settings: Settings, job: SimulationJob, shown: Progress) -> Simulated:
    """Read the recordings, find the service times, run every scenario.

    Raises:
        ConfigurationError: there is nothing to simulate, or no service time for any of it.
    """
    async with open_log(settings) as log:
        async with open_recording(log, job.source.origin, job.source.selection) as recording:
            shown.show(0.0, f"reading {recording.name}")
            notices = [recording.notice] if recording.notice else []
            recording.on_unreadable = lambda gap: notices.append(str(gap))
            models = latest_models(settings, job.models)
            unbatched = {name for name, each in models.items() if not each.signature.batched}
            recorded = await read_arrivals(recording, settings.limits.default_timeout_ms, unbatched)
            name = recording.name
        arrivals = resolved(recorded.arrivals, models)
        times = await _times(log, job, {kind.model for kind in arrivals.kinds}, models)
    if recorded.left_out:
        notices.append(f"{recorded.left_out} records are no requests, and are left out")
    arrivals, others = only(arrivals, times)
    for model, count in sorted(others.items()):
        notices.append(f"{count} requests of {model} left out: its service time is not known")
    if not len(arrivals.at_us):
        raise ConfigurationError(
            f"{name}: expected requests of models whose service time is known, got none; "
            "see --service-time, --answers and --models"
        )
    served = served_now(settings, arrivals, times, models)
    outcomes: list[ScenarioResult] = []
    for each in job.scenarios:
        shown.show(
            len(outcomes) / len(job.scenarios), f"{len(outcomes)} of {len(job.scenarios)} scenarios"
        )
        await asyncio.sleep(0)  # Ctrl-C takes effect between two scenarios
        outcomes.append(simulate(arrivals, served, each, _policy))
    source = f"{len(arrivals.at_us)} requests of {name}"
    return Simulated(source, times, outcomes, notices)


def _policy(limits: Callable[[str, str], SimulatedLimits]) -> Policy:
    return DynamicBatcher(limits, "simulated")


async def _times(
    log: Log, job: SimulationJob, wanted: set[str], models: Mapping[str, ModelVersion]
) -> dict[str, ServiceTime]:
    """Return service times: given, otherwise learned, otherwise measured."""
    given = job.service_times
    times = {model: given[model] for model in wanted & given.keys()}
    if "" in given:
        times |= dict.fromkeys(wanted - times.keys(), given[""])
    if job.answers is not None and wanted - times.keys():
        async with open_recording(log, job.answers, Selection()) as answers:
            learned = await learn(answers)
        times |= {model: learned[model] for model in (wanted & learned.keys()) - times.keys()}
    if job.models is not None:
        for model in sorted((wanted & models.keys()) - times.keys()):
            times[model] = measure(models[model])
    return times
