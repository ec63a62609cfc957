"""`headrace replay compare`: compares a candidate with the current model."""

from __future__ import annotations

import json
import shlex
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click

from headrace.cli.compare_options import COMPARE_OPTIONS, Compared
from headrace.cli.event_loop import run
from headrace.cli.options import chosen_answers, options_as, report_option, write_report
from headrace.cli.outcome import Unsuccessful
from headrace.cli.output import say
from headrace.cli.progress import watching
from headrace.cli.replay_sides import Repositories, ask_pipeline, repositories
from headrace.cli.selection_options import chosen_source, selection_options
from headrace.cli.settings import pass_settings
from headrace.config import Settings
from headrace.runtime.log_factory import open_log
from headrace.tools.replay.compare.asking import RecordedSubject, Subject, load_answers
from headrace.tools.replay.compare.report import Subjects, report
from headrace.tools.replay.compare.run import Comparison, compare
from headrace.tools.replay.compare.summary import describe, lines, summary
from headrace.tools.replay.compare.tally import WorstCase
from headrace.tools.replay.compare.verdict import Thresholds, is_same, judge
from headrace.tools.replay.jobs import Source, Watch
from headrace.tools.replay.opening import open_recording
from headrace.tools.replay.selection import Selection

SHOWN_WORST = 3


class Plan(NamedTuple):
    """What to compare, and how.

    Attributes:
        answers: recorded answers as the reference; None to run the current model.
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
@options_as(Compared, *COMPARE_OPTIONS)
@report_option("Write a page with plots and the worst requests.")
@click.option("--json", "in_json", is_flag=True, help="Write JSON.")
@pass_settings
def command(
    settings: Settings,
    /,
    *,
    given: Compared,
    report_file: Path | None,
    in_json: bool,
    **chosen: Any,
) -> None:
    """Ask the current model twice and the candidate once, over the same recorded requests, in
    this process; compare outputs, codes and latency. Exit code 0: the same; 1: different, or too
    little to compare; 2: a side lacks the model, or it has failed there.

    What is allowed follows from how far the current model differs from itself, unless an option
    says otherwise.
    """
    given.check()
    plan = _plan(settings, given, chosen)
    with watching("there is no verdict") as watch:
        comparison = run(_compare(settings, plan, watch))
    _tell(plan, comparison, given.thresholds, report_file, in_json)


def _plan(settings: Settings, given: Compared, chosen: dict[str, Any]) -> Plan:
    recorded = chosen_answers(settings, given.answers, given.answers_file)
    return Plan(
        chosen_source(settings, chosen),
        Repositories(
            given.models or settings.models.repository,
            given.candidate,
            given.candidate_version,
            given.current_version,
            chosen["model"],
        ),
        None if recorded is None else Source(recorded, Selection()),
        not given.without_current,
        given.top_k,
        given.concurrency,
    )


async def _compare(settings: Settings, plan: Plan, watch: Watch) -> Comparison:
    """Open all sides, and run the comparison."""
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
        await compare(
            recording,
            subjects,
            comparison,
            concurrency=plan.concurrency,
            advanced=watch(recording),
        )
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
        write_report(report_file, report(comparison, findings, subjects, command_of))
    if in_json:
        click.echo(json.dumps(summary(comparison, findings, command_of), indent=2))
    else:
        for line in lines(comparison, findings):
            say(line)
        for case in comparison.worst.sorted()[:SHOWN_WORST]:
            say(f"{case.topic}/{case.partition}/{case.offset}: {describe(case)}")
            say(f"  {command_of(case)}")
    if not is_same(findings):
        raise Unsuccessful


def command_alone(plan: Plan, case: WorstCase) -> str:
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
