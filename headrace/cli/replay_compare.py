"""`headrace replay --compare`: whether a candidate is the same model as the current one."""

from __future__ import annotations

import json
import shlex
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click

from headrace.cli.event_loop import run
from headrace.cli.outcome import Unsuccessful
from headrace.cli.replay_sides import Repositories, ask_pipeline, repositories
from headrace.cli.selection_options import chosen_source, require_broker, selection_options
from headrace.cli.settings import pass_settings
from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.opening import open_log
from headrace.replay.compare.asking import RecordedSubject, Subject, load_answers
from headrace.replay.compare.report import Subjects, report
from headrace.replay.compare.run import DEFAULT_CONCURRENCY, DEFAULT_TOP_K, Comparison, compare
from headrace.replay.compare.summary import describe, lines, summary
from headrace.replay.compare.tally import WorstCase
from headrace.replay.compare.verdict import Thresholds, is_same, judge
from headrace.replay.jobs import Source
from headrace.replay.opening import open_recording
from headrace.replay.selection import Selection

_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_SHARE = click.FloatRange(min=0, max=1)
_POSITIVE = click.FloatRange(min=0)

SHOWN_WORST = 3


class Plan(NamedTuple):
    """What is compared, and how.

    Attributes:
        answers: recorded answers that are the reference; None for a run of the current model.
        runs_current: run the current model (again), for the noise floor.
    """

    source: Source
    repositories: Repositories
    answers: Source | None
    runs_current: bool
    top_k: int
    concurrency: int


@click.command()
@selection_options
@click.option(
    "--models",
    type=_DIRECTORY,
    metavar="DIR",
    help="The current models.  [default: models.repository]",
)
@click.option("--candidate", type=_DIRECTORY, metavar="DIR", help="The candidate's models.")
@click.option(
    "--candidate-version",
    type=click.IntRange(min=1),
    metavar="N",
    help="The candidate is this version of the current models.",
)
@click.option(
    "--current-version",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --candidate-version: the current one.  [default: the one that is served]",
)
@click.option(
    "--answers", metavar="TOPIC", help="The reference is answers that were recorded on this topic."
)
@click.option(
    "--answers-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="... in this capture file.",
)
@click.option(
    "--without-current", is_flag=True, help="With recorded answers: do not run the current models."
)
@click.option("--margin", type=_POSITIVE, default=4.0, show_default=True, help="Times the noise.")
@click.option("--max-difference", type=_POSITIVE, metavar="X", help="Of any float output.")
@click.option("--max-mismatched", type=_SHARE, metavar="SHARE", help="Of labels, texts, integers.")
@click.option("--min-top1", type=_SHARE, metavar="SHARE", help="Of rows with the same largest.")
@click.option("--max-code-changes", type=_SHARE, metavar="SHARE", help="Of answers' codes.")
@click.option(
    "--max-latency-ratio",
    type=_POSITIVE,
    default=1.5,
    show_default=True,
    help="Of the medians, candidate to current.",
)
@click.option(
    "--min-recorded",
    type=_SHARE,
    default=1.0,
    show_default=True,
    metavar="SHARE",
    help="Of requests, with a recorded answer.",
)
@click.option("--top-k", type=click.IntRange(min=1), default=DEFAULT_TOP_K, show_default=True)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1, max=1024),
    default=DEFAULT_CONCURRENCY,
    show_default=True,
    help="Requests under way at once.",
)
@click.option(
    "--report",
    "report_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.html",
    help="Write a page with plots and the worst requests.",
)
@click.option("--json", "in_json", is_flag=True, help="Write JSON.")
@pass_settings
def command(
    settings: Settings,
    /,
    *,
    models: Path | None,
    candidate: Path | None,
    candidate_version: int | None,
    current_version: int | None,
    answers: str | None,
    answers_file: Path | None,
    without_current: bool,
    margin: float,
    max_difference: float | None,
    max_mismatched: float | None,
    min_top1: float | None,
    max_code_changes: float | None,
    max_latency_ratio: float,
    min_recorded: float,
    top_k: int,
    concurrency: int,
    report_file: Path | None,
    in_json: bool,
    **chosen: Any,
) -> None:
    """Ask the current model twice and the candidate once, over the same recorded requests, in
    this process; compare outputs, codes and latency. Exit code 0: the same; 1: different.

    What is allowed follows from how far the current model differs from itself, unless an option
    says otherwise.
    """
    if (candidate is None) == (candidate_version is None):
        raise click.UsageError("give either --candidate or --candidate-version")
    if current_version is not None and candidate_version is None:
        raise click.UsageError("--current-version goes with --candidate-version")
    if answers is not None and answers_file is not None:
        raise click.UsageError("give either --answers or --answers-file")
    recorded = answers_file or answers
    if without_current and recorded is None:
        raise click.UsageError("--without-current goes with --answers or --answers-file")
    if answers is not None:
        require_broker(settings, "to read a topic")
    current = models or settings.models.repository
    plan = Plan(
        chosen_source(settings, chosen),
        Repositories(current, candidate, candidate_version, current_version, chosen["model"]),
        None if recorded is None else Source(recorded, Selection()),
        not without_current,
        top_k,
        concurrency,
    )
    thresholds = Thresholds(
        margin,
        max_difference,
        max_mismatched,
        min_top1,
        max_code_changes,
        max_latency_ratio,
        min_recorded,
    )
    _tell(plan, run(_compare(settings, plan)), thresholds, report_file, in_json)


async def _compare(settings: Settings, plan: Plan) -> Comparison:
    """Open all that is asked, and ask it."""
    async with AsyncExitStack() as stack:
        directories = stack.enter_context(repositories(settings, plan.repositories))
        log = await stack.enter_async_context(open_log(settings))
        source = plan.source
        recording = await stack.enter_async_context(
            open_recording(log, source.origin, source.selection)
        )
        reference: Subject
        again: Subject | None = None
        if plan.answers is not None:
            answers = await stack.enter_async_context(
                open_recording(log, plan.answers.origin, plan.answers.selection)
            )
            reference = RecordedSubject(await load_answers(answers))
        else:
            reference = await stack.enter_async_context(ask_pipeline(settings, directories.current))
        if plan.runs_current:
            again = await stack.enter_async_context(ask_pipeline(settings, directories.current))
        candidate = await stack.enter_async_context(ask_pipeline(settings, directories.candidate))
        comparison = Comparison(plan.top_k, reference_is_recorded=plan.answers is not None)
        subjects = (reference, again, candidate)
        await compare(recording, subjects, comparison, concurrency=plan.concurrency)
    return comparison


def _tell(
    plan: Plan,
    comparison: Comparison,
    thresholds: Thresholds,
    report_file: Path | None,
    in_json: bool,
) -> None:
    findings = judge(comparison.sides(), thresholds)

    def command_of(case: WorstCase) -> str:
        return command_alone(plan, case)

    if report_file is not None:
        subjects = Subjects(
            str(plan.source.origin),
            str(plan.answers.origin if plan.answers else plan.repositories.current_name),
            plan.repositories.candidate_name,
        )
        page = report(comparison, findings, subjects, command_of)
        try:
            report_file.write_text(page, encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"--report: {report_file}: {error.strerror}") from error
    if in_json:
        click.echo(json.dumps(summary(comparison, findings, command_of), indent=2))
    else:
        for line in lines(comparison, findings):
            click.echo(line)
        for case in comparison.worst.sorted()[:SHOWN_WORST]:
            click.echo(f"{case.topic}/{case.partition}/{case.offset}: {describe(case)}")
            click.echo(f"  {command_of(case)}")
    if not is_same(findings):
        raise Unsuccessful


def command_alone(plan: Plan, case: WorstCase) -> str:
    """The command that compares one request alone."""
    origin = plan.source.origin
    words = ["headrace", "replay", "--compare"]
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
