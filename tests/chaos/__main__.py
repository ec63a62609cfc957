"""`python -m tests.chaos --seeds 20`: one line for each seed, and the stories of what broke."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import get_args

import click
from aiokafka.errors import KafkaError

from headrace.log.errors import LogUnavailable
from headrace.tools.local_kafka import BrokerFailed
from tests.chaos.checker import Guarantee, Order, duplicates
from tests.chaos.clients import LogDiffers
from tests.chaos.cluster import running_cluster
from tests.chaos.deployment import FORMS
from tests.chaos.story import tell
from tests.chaos.trial import (
    GUARANTEES,
    WORKLOADS,
    Outcome,
    Trial,
    Workload,
    draw_trial,
    run_trial,
)

BROKER_TROUBLE = (BrokerFailed, KafkaError, LogDiffers, LogUnavailable, TimeoutError)
"""Errors of the harness itself, where a broker does not come back or has not kept what it was sent.
They say nothing about Headrace.
"""
SEEDS_PER_BROKER = 10
"""Killed, it looks through every partition of every seed before it is there again."""
STORIES = 3
"""Stories shown for one seed; where much is broken, the others would repeat them."""


@click.command()
@click.option("--seeds", default=20, show_default=True, help="How many.")
@click.option("--first-seed", default=1, show_default=True, help="The others follow it.")
@click.option("--requests", type=int, help="Of each seed; 5000, or 2000 with payloads.")
@click.option("--form", type=click.Choice(list(FORMS)), help="Drawn by the seed if not given.")
@click.option("--guarantee", type=click.Choice(GUARANTEES), help="In turns if not given.")
@click.option("--order", type=click.Choice(get_args(Order)), help="Drawn by the seed if not given.")
@click.option("--workload", type=click.Choice(WORKLOADS), help="Drawn by the seed if not given.")
@click.option("--retention", is_flag=True, default=None, help="Drawn by the seed if not given.")
@click.option("--at-once", default=1, show_default=True, help="Seeds, each on its own broker.")
@click.option("--minutes", type=float, help="After so many, no further seed is begun.")
@click.option("--keep", type=click.Path(path_type=Path), help="Where failures are kept.")
def main(
    seeds: int,
    first_seed: int,
    requests: int | None,
    form: str | None,
    guarantee: Guarantee | None,
    order: Order | None,
    workload: Workload | None,
    retention: bool | None,
    at_once: int,
    minutes: float | None,
    keep: Path | None,
) -> None:
    """Run seeds on a local Kafka; exit code 1 if any promise was broken.

    The history and the logs of a seed that failed are kept.
    """
    # The harness's own clients and store tell of every connection that breaks, which is what it
    # does to them.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    end_s = None if minutes is None else time.monotonic() + minutes * 60
    drawn: Iterator[Trial] = (
        _sized(draw_trial(seed, guarantee, form, order, workload, retention), requests)
        for seed in range(first_seed, first_seed + seeds)
        if end_s is None or time.monotonic() < end_s
    )
    keep = keep or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    outcomes = asyncio.run(run(drawn, keep, at_once))
    click.echo(summary(outcomes))
    sys.exit(0 if all(outcome.passed for outcome in outcomes) else 1)


async def run(trials: Iterator[Trial], keep: Path, at_once: int) -> list[Outcome]:
    """Run all of them, so many at a time; the outcomes in the order in which they came."""
    outcomes: list[Outcome] = []
    async with asyncio.TaskGroup() as tasks:
        for number in range(at_once):
            tasks.create_task(_run_in_turn(trials, keep, outcomes), name=f"chaos-{number}")
    return outcomes


async def _run_in_turn(trials: Iterator[Trial], keep: Path, outcomes: list[Outcome]) -> None:
    """Run trials until none is left, a few on each cluster; replace a cluster that does not come
    back.
    """
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running_cluster())
        for number, trial in enumerate(trials, 1):
            directory = keep / f"seed-{trial.seed}"
            try:
                outcome = await run_trial(trial, cluster, directory)
            except* BROKER_TROUBLE as failed:
                click.echo(f"seed {trial.seed:<6} says nothing: {_first_line(failed)}")
                await stack.aclose()
                cluster = await stack.enter_async_context(running_cluster())
            else:
                outcomes.append(outcome)
                for line in report(outcome, directory):
                    click.echo(line)
            if number % SEEDS_PER_BROKER == 0:
                await stack.aclose()
                cluster = await stack.enter_async_context(running_cluster())


def _sized(trial: Trial, requests: int | None) -> Trial:
    return trial if requests is None else trial._replace(requests=requests)


def _first_line(failed: BaseExceptionGroup) -> str:
    """Return the first line of the innermost error."""
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]


def report(outcome: Outcome, directory: Path) -> Iterator[str]:
    """A line; of a failure the history is kept, and the first stories are told."""
    yield str(outcome)
    if outcome.passed:
        shutil.rmtree(directory)
        return
    history = directory / "history.jsonl"
    outcome.history.save(history)
    yield f"  kept: {history}"
    for finding in outcome.findings[:STORIES]:
        yield "  " + tell(outcome.history, finding).replace("\n", "\n  ")


def summary(outcomes: Sequence[Outcome]) -> str:
    """A line for each guarantee, and one for all."""
    lines = [
        _told(guarantee, [each for each in outcomes if each.trial.promise.guarantee == guarantee])
        for guarantee in GUARANTEES
    ]
    failed = [str(outcome.trial.seed) for outcome in outcomes if not outcome.passed]
    seconds = sum(outcome.seconds for outcome in outcomes)
    lines.append(
        f"{_told('all', outcomes)}, {seconds:.0f} s; failed: {', '.join(failed) or 'none'}"
    )
    return "\n".join(lines)


def _told(what: str, outcomes: Sequence[Outcome]) -> str:
    requests = sum(len(outcome.history.sent) for outcome in outcomes)
    answers = sum(len(outcome.history.answered) for outcome in outcomes)
    repeated = sum(duplicates(outcome.history) for outcome in outcomes)
    return (
        f"{what}: {len(outcomes)} seeds, {requests} requests, {answers} answers, "
        f"{repeated} repeated"
    )


if __name__ == "__main__":
    main()
