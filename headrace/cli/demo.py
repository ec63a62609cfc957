"""`headrace demo`: the whole pipeline on real files, in one process."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import click

from headrace.cli.event_loop import run
from headrace.cli.options import FiniteRange
from headrace.cli.outcome import Unsuccessful

if TYPE_CHECKING:
    from headrace.tools.demo.tally import Result


@click.command()
@click.option(
    "--kafka",
    is_flag=True,
    help="Use a real Kafka, started on this machine for the demo, instead of the log in memory.",
)
@click.option(
    "--seconds",
    type=FiniteRange(min=1),
    default=10.0,
    show_default=True,
    help="How long to send requests.",
)
def command(kafka: bool, seconds: float) -> None:
    """Send images and files to two models, and check every answer.

    All four services run in this process. Each answer is checked against the known label. The demo
    has its own log and models, and leaves nothing behind. Exit code 1 if an answer is missing or
    too many are wrong, 2 if ONNX Runtime is not installed.
    """
    from headrace.telemetry.logs import configure_logging
    from headrace.tools.demo.demo import run_demo
    from headrace.tuning import TUNING

    def say(line: str) -> None:
        click.echo(f"headrace: {line}", err=True)

    configure_logging("warning")
    # A broker that has just started causes logged errors for requests that are then retried; real
    # failures show as missing answers.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    sys.setswitchinterval(TUNING.runtime.thread_switch_interval_s)
    conclude(run(run_demo(seconds, say, kafka=kafka)))


def conclude(result: Result) -> None:
    """Print the totals. Raises `Unsuccessful` if they show a fault."""
    from headrace.tools.demo.report import report

    for line in report(result):
        click.echo(line)
    if result.faults:
        raise Unsuccessful
