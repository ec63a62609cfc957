"""`headrace demo`: the whole thing on real files, in one process."""

from __future__ import annotations

import sys

import click

from headrace.cli.event_loop import run
from headrace.cli.outcome import Unsuccessful


@click.command()
@click.option("--kafka", is_flag=True, help="On a Kafka broker of its own on this machine.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=10.0,
    show_default=True,
    help="How long requests are sent.",
)
def command(kafka: bool, seconds: float) -> None:
    """Send images and files to two models through all four services in this process, check each
    answer against the truth, and show what happens. Uses a log and models of its own; leaves
    nothing behind. Exit code 1 when an answer is missing or too many are wrong.
    """
    from headrace.cli.run import SWITCH_INTERVAL_S
    from headrace.demo.demo import run_demo
    from headrace.demo.report import report
    from headrace.telemetry.logs import configure_logging

    def say(line: str) -> None:
        click.echo(f"headrace: {line}", err=True)

    configure_logging("warning")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    outcome = run(run_demo(seconds, say, kafka=kafka))
    for line in report(outcome.result, outcome.reasons):
        click.echo(line)
    if outcome.result.faults:
        raise Unsuccessful
