"""`python -m benchmarks`: measure, write the results, and the tables of docs/performance.md."""

from __future__ import annotations

import os
import time

import click
import uvloop

from benchmarks.campaign import DEFAULT, QUICK, Campaign, measure
from benchmarks.page import write_page
from benchmarks.results import LATEST, RESULTS, record
from benchmarks.scaling import write_scaling
from benchmarks.subjects import SUBJECTS


@click.command()
@click.option("--quick", is_flag=True, help="One short round: does it work? About three minutes.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(sorted(SUBJECTS)),
    help="This model alone; may be repeated.",
)
@click.option(
    "--contestant", "named", multiple=True, help="Those whose name contains this; may be repeated."
)
@click.option("--part", multiple=True, type=click.Choice(["saturation", "latency"]))
@click.option("--rounds", type=click.IntRange(min=1), help="How often each is measured.")
@click.option("--no-page", is_flag=True, help="Leave docs/performance.md as it is.")
def main(
    quick: bool,
    only: tuple[str, ...],
    named: tuple[str, ...],
    part: tuple[str, ...],
    rounds: int | None,
    no_page: bool,
) -> None:
    """Measure Headrace and others on a local broker.

    A whole run is recorded in benchmarks/results/latest.json, and the pages are written from it;
    a part of it, in partial.json, and the pages stay as they are.
    """
    plan: Campaign = QUICK if quick else DEFAULT
    plan = plan._replace(
        subjects=only or plan.subjects,
        named=named,
        parts=part or plan.parts,
        rounds=rounds or plan.rounds,
    )
    began_s = time.monotonic()
    results = uvloop.run(measure(plan, lambda line: click.echo(line, err=True)))
    whole = not (quick or only or named or part or rounds)
    target = LATEST if whole else RESULTS / "partial.json"
    record(target, results)
    click.echo(f"{target}: after {time.monotonic() - began_s:.0f} s", err=True)
    if whole and not no_page:
        write_page(results)
        write_scaling(results)


if __name__ == "__main__":
    os.environ.pop("HEADRACE_CONFIG", None)
    main()
