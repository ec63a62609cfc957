"""`headrace replay compare`: compares a candidate with the current model."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from headrace.cli.event_loop import run
from headrace.cli.options import (
    ANSWERS_FILE,
    FiniteRange,
    chosen_answers,
    json_option,
    options_as,
    report_option,
    write_report,
)
from headrace.cli.outcome import Unsuccessful
from headrace.cli.output import say
from headrace.cli.progress import watching
from headrace.cli.selection_options import chosen_source, selection_options
from headrace.cli.settings import pass_settings
from headrace.client.rpc import RpcClient
from headrace.config import ModelSettings, Settings
from headrace.errors import ConfigurationError
from headrace.models.repository import FoundModel, Repository
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.telemetry.logs import configure_logging
from headrace.tools.compare.report import SideNames, describe, lines, report, summary
from headrace.tools.compare.run import (
    DEFAULT_CONCURRENCY,
    DEFAULT_TOP_K,
    AnswerSource,
    Comparison,
    PipelineAnswers,
    RecordedAnswers,
    compare,
    load_answers,
)
from headrace.tools.compare.tally import WorstCase
from headrace.tools.compare.verdict import COMPARABLE_UNRECORDED, Thresholds, is_same, judge
from headrace.tools.pages import require_report_packages
from headrace.tools.replay.jobs import RecordingSource, Watch, open_recording
from headrace.tools.replay.recording import Selection

# --- options -------------------------------------------------------------------------------------


_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_SHARE = FiniteRange(min=0, max=1)
_NOT_NEGATIVE = FiniteRange(min=0)


class CompareOptions(NamedTuple):
    """Values of the options, as given."""

    models: Path | None
    candidate: Path | None
    candidate_version: int | None
    current_version: int | None
    answers: str | None
    answers_file: Path | None
    without_current: bool
    margin: float
    max_difference: float | None
    max_mismatched: float | None
    min_top1: float | None
    max_code_changes: float | None
    max_latency_ratio: float
    min_recorded: float
    min_comparable: float | None
    top_k: int
    concurrency: int

    def check(self) -> None:
        """Raise `click.UsageError` if options conflict."""
        if (self.candidate is None) == (self.candidate_version is None):
            raise click.UsageError("give either --candidate or --candidate-version")
        if self.current_version is not None and self.candidate_version is None:
            raise click.UsageError("--current-version goes with --candidate-version")
        if self.without_current and self.answers is None and self.answers_file is None:
            raise click.UsageError("--without-current goes with --answers or --answers-file")

    @property
    def thresholds(self) -> Thresholds:
        """Return the user's limits."""
        return Thresholds(
            self.margin,
            self.max_difference,
            self.max_mismatched,
            self.min_top1,
            self.max_code_changes,
            self.max_latency_ratio,
            self.min_recorded,
            self.min_comparable,
        )


COMPARE_OPTIONS = (
    click.option(
        "--models",
        type=_DIRECTORY,
        metavar="DIR",
        help="The current models.  [default: models.repository]",
    ),
    click.option("--candidate", type=_DIRECTORY, metavar="DIR", help="The candidate's models."),
    click.option(
        "--candidate-version",
        type=click.IntRange(min=1),
        metavar="N",
        help="The candidate is this version of the current models.",
    ),
    click.option(
        "--current-version",
        type=click.IntRange(min=1),
        metavar="N",
        help="With --candidate-version: the current version.  [default: the served one]",
    ),
    click.option(
        "--answers",
        metavar="TOPIC",
        help="Use the recorded answers of this topic as the reference.",
    ),
    ANSWERS_FILE,
    click.option(
        "--without-current",
        is_flag=True,
        help="With recorded answers: do not run the current models.",
    ),
    click.option(
        "--margin",
        type=_NOT_NEGATIVE,
        default=4.0,
        show_default=True,
        help="Allowed multiple of the noise floor.",
    ),
    click.option(
        "--max-difference",
        type=_NOT_NEGATIVE,
        metavar="X",
        help="Largest difference of a float output.",
    ),
    click.option(
        "--max-mismatched",
        type=_SHARE,
        metavar="SHARE",
        help="Most labels, texts or integers that differ.",
    ),
    click.option(
        "--min-top1",
        type=_SHARE,
        metavar="SHARE",
        help="Fewest rows whose largest element keeps its index.",
    ),
    click.option(
        "--max-code-changes", type=_SHARE, metavar="SHARE", help="Most answers with another code."
    ),
    click.option(
        "--max-latency-ratio",
        type=_NOT_NEGATIVE,
        default=1.5,
        show_default=True,
        help="Highest ratio of the medians, candidate to current.",
    ),
    click.option(
        "--min-recorded",
        type=_SHARE,
        default=1.0,
        show_default=True,
        metavar="SHARE",
        help="Fewest requests with a recorded answer.",
    ),
    click.option(
        "--min-comparable",
        type=_SHARE,
        metavar="SHARE",
        help="Fewest requests with outputs on both sides.  [default: as many as were recorded with "
        f"outputs, or {COMPARABLE_UNRECORDED:g} without recorded answers]",
    ),
    click.option(
        "--top-k",
        type=click.IntRange(min=1),
        default=DEFAULT_TOP_K,
        show_default=True,
        help="Number of largest elements whose indexes are compared.",
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(min=1, max=1024),
        default=DEFAULT_CONCURRENCY,
        show_default=True,
        help="Number of requests in flight.",
    ),
)


# --- sides ---------------------------------------------------------------------------------------


class Directories(NamedTuple):
    """Two repositories."""

    current: Path
    candidate: Path


class Repositories(NamedTuple):
    """Repositories as given by the options.

    Attributes:
        current: the directory of the current models.
        candidate: the candidate's, or None for `candidate_version` of `current`.
        current_version: the current version; None for what `current` serves.
        model: the compared model, in the form of a filter; None for all.
    """

    current: Path
    candidate: Path | None
    candidate_version: int | None
    current_version: int | None
    model: str | None

    @property
    def current_name(self) -> str:
        """Name of the current side, for display."""
        version = f", version {self.current_version}" if self.current_version else ""
        return f"{self.current}{version}"

    @property
    def candidate_name(self) -> str:
        """Name of the candidate, for display."""
        if self.candidate is not None:
            return str(self.candidate)
        return f"{self.current}, version {self.candidate_version}"

    def options(self) -> list[str]:
        """Return the same as command line options."""
        words = ["--models", str(self.current)]
        if self.model is not None:
            words += ["--model", self.model]
        if self.candidate is not None:
            words += ["--candidate", str(self.candidate)]
        if self.candidate_version is not None:
            words += ["--candidate-version", str(self.candidate_version)]
        if self.current_version is not None:
            words += ["--current-version", str(self.current_version)]
        return words


@contextmanager
def repositories(settings: Settings, chosen: Repositories) -> Iterator[Directories]:
    """Yield the two directories; for a named version, a temporary one made of links.

    Raises:
        ConfigurationError: there is no such directory or version.
    """
    if chosen.candidate is not None:
        yield Directories(chosen.current, chosen.candidate)
        return
    assert chosen.candidate_version is not None
    found = [
        model
        for model in Repository(chosen.current, settings).scan()
        if chosen.model is None or model.name == chosen.model.partition("/")[0]
    ]
    with tempfile.TemporaryDirectory(prefix="headrace-compare-") as place:
        made = Directories(Path(place, "current"), Path(place, "candidate"))
        _link(found, chosen.candidate_version, made.candidate)
        if chosen.current_version is None:
            _require_another(found, chosen.candidate_version)
            made = made._replace(current=chosen.current)
        else:
            _link(found, chosen.current_version, made.current)
        yield made


def _link(models: list[FoundModel], version: int, target: Path) -> None:
    """Link a repository that answers with this version, whichever version a request names."""
    linked = 0
    for model in models:
        directory = (model.directory / str(version)).resolve()
        if not directory.is_dir():
            continue
        linked += 1
        place = target / model.name
        place.mkdir(parents=True)
        for path in model.directory.iterdir():
            if path.is_file():
                (place / path.name).symlink_to(path.resolve())
        for served in {each.version for each in model.versions} or {str(version)}:
            (place / served).symlink_to(directory, target_is_directory=True)
    if not linked:
        names = ", ".join(model.name for model in models) or "no model"
        raise ConfigurationError(f"version {version}: expected it of {names}, but there is none")


def _require_another(models: list[FoundModel], version: int) -> None:
    for model in models:
        served = [int(each.version) for each in model.versions]
        if served and max(served) == version:
            raise ConfigurationError(
                f"{model.name}: version {version} is the one that is served; name the one to "
                "compare it with (--current-version)"
            )


@asynccontextmanager
async def ask_pipeline(settings: Settings, models: Path) -> AsyncIterator[PipelineAnswers]:
    """Run the four services with the models of a directory, on their own embedded log.

    Raises:
        ConfigurationError: the models cannot be served.
    """
    configure_logging("warning")
    embedded = settings.model_copy(
        update={"kafka": None, "models": ModelSettings(repository=models)}
    )
    async with (
        open_log(embedded) as log,
        running(Pipeline(embedded, log)),
        RpcClient(log, embedded) as rpc,
    ):
        yield PipelineAnswers(rpc)


# --- the command ---------------------------------------------------------------------------------


SHOWN_WORST = 3


class CompareJob(NamedTuple):
    """Parameters of a comparison.

    Attributes:
        answers: recorded answers as the reference; None to run the current model.
        runs_current: run the current model a second time, for the noise floor.
    """

    source: RecordingSource
    repositories: Repositories
    answers: RecordingSource | None
    runs_current: bool
    top_k: int
    concurrency: int


@click.command()
@selection_options
@options_as(CompareOptions, *COMPARE_OPTIONS)
@report_option("Write a page with plots and the worst requests.")
@json_option
@pass_settings
def command(
    settings: Settings,
    /,
    *,
    given: CompareOptions,
    report_file: Path | None,
    in_json: bool,
    **chosen: Any,
) -> None:
    """Ask the current model twice and the candidate once, over the same recorded requests, in this
    process; compare outputs, codes and latency.

    What is allowed follows from how far the current model differs from itself, unless an option
    says otherwise.
    """
    given.check()
    if report_file is not None:
        require_report_packages()
    plan = _plan(settings, given, chosen)
    with watching("there is no verdict") as watch:
        comparison = run(_compare(settings, plan, watch))
    _tell(plan, comparison, given.thresholds, report_file, in_json)


def _plan(settings: Settings, given: CompareOptions, chosen: dict[str, Any]) -> CompareJob:
    recorded = chosen_answers(settings, given.answers, given.answers_file)
    return CompareJob(
        chosen_source(settings, chosen),
        Repositories(
            given.models or settings.models.directory,
            given.candidate,
            given.candidate_version,
            given.current_version,
            chosen["model"],
        ),
        None if recorded is None else RecordingSource(recorded, Selection()),
        not given.without_current,
        given.top_k,
        given.concurrency,
    )


async def _compare(settings: Settings, plan: CompareJob, watch: Watch) -> Comparison:
    """Open all sides, and run the comparison."""
    async with AsyncExitStack() as stack:
        directories = stack.enter_context(repositories(settings, plan.repositories))
        log = await stack.enter_async_context(open_log(settings))
        source = plan.source
        recording = await stack.enter_async_context(
            open_recording(log, source.origin, source.selection)
        )
        reference: AnswerSource
        second: AnswerSource | None = None
        if plan.answers is not None:
            answers = await stack.enter_async_context(
                open_recording(log, plan.answers.origin, plan.answers.selection)
            )
            reference = RecordedAnswers(await load_answers(answers, recording))
        else:
            reference = await stack.enter_async_context(ask_pipeline(settings, directories.current))
        if plan.runs_current:
            second = await stack.enter_async_context(ask_pipeline(settings, directories.current))
        candidate = await stack.enter_async_context(ask_pipeline(settings, directories.candidate))
        comparison = Comparison(plan.top_k, reference_is_recorded=plan.answers is not None)
        subjects = (reference, second, candidate)
        await compare(
            recording,
            subjects,
            comparison,
            concurrency=plan.concurrency,
            advanced=watch(recording),
        )
    return comparison


def _tell(
    plan: CompareJob,
    comparison: Comparison,
    thresholds: Thresholds,
    report_file: Path | None,
    in_json: bool,
) -> None:
    findings = judge(comparison.sides(), thresholds)

    def command_of(case: WorstCase) -> str:
        return command_alone(plan, case)

    if in_json:
        click.echo(json.dumps(summary(comparison, findings, command_of), indent=2))
    else:
        for line in lines(comparison, findings):
            say(line)
        for case in comparison.worst.sorted()[:SHOWN_WORST]:
            say(f"{case.topic}/{case.partition}/{case.offset}: {describe(case)}")
            say(f"  {command_of(case)}")
    if report_file is not None:
        subjects = SideNames(
            str(plan.source.origin),
            str(plan.answers.origin if plan.answers else plan.repositories.current_name),
            plan.repositories.candidate_name,
        )
        write_report(report_file, report(comparison, findings, subjects, command_of))
    if not is_same(findings):
        raise Unsuccessful


def command_alone(plan: CompareJob, case: WorstCase) -> str:
    """Return the command that compares one request alone."""
    origin = plan.source.origin
    words = ["headrace", "replay", "compare"]
    words += ["--file" if isinstance(origin, Path) else "--topic", str(origin)]
    words += ["--partition", str(case.partition)]
    words += ["--from-offset", str(case.offset), "--until-offset", str(case.offset + 1)]
    words += plan.repositories.options()
    if plan.answers is not None:
        name = "--answers-file" if isinstance(plan.answers.origin, Path) else "--answers"
        words += [name, str(plan.answers.origin)]
    if not plan.runs_current:
        words.append("--without-current")
    return shlex.join(words)
