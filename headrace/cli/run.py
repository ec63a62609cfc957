"""`headrace run [STAGE,…]`: the services, until a signal."""

from __future__ import annotations

import gc
import sys

import click

from headrace.cli.settings import pass_settings
from headrace.cli.stages import parse_stages
from headrace.config import Settings
from headrace.topics import STAGES, Stage

SWITCH_INTERVAL_S = 0.0005
"""How long a thread keeps the interpreter while another one waits for it. With Python's 5 ms, a
busy event loop makes the dispatcher wait that long for each completed run."""

GC_THRESHOLD = (50_000, 20, 50)
"""Python's (700, 10, 10) goes through all requests in flight again and again: half the time at a
deep backlog. The path of a request makes no reference cycles (tests/flow/test_guards.py); what a
user's model makes of them is still found, later."""


def _stages(ctx: click.Context, param: click.Parameter, value: str) -> tuple[Stage, ...]:
    try:
        return parse_stages(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


@click.command()
@click.argument("stages", default=",".join(STAGES), callback=_stages, metavar="[STAGE,...]")
@pass_settings
def command(settings: Settings, stages: tuple[Stage, ...]) -> None:
    """Serve until SIGTERM or SIGINT: run all four stages in this process, or those named.

    The stages are ingest, batcher, executor and responder. Those named must be adjacent, in this
    order, with commas between them, as in `headrace run batcher,executor`. Stages that run apart
    need a broker, its topics (`headrace topics create`), and the same settings and models.

    The first signal drains: what is in flight is answered, within limits.drain_timeout_s. The
    second one ends at once; what is unanswered then is still on Kafka, and is answered after the
    next start. SIGHUP looks for new and changed models.
    """
    from headrace import pipeline
    from headrace.cli.event_loop import run
    from headrace.telemetry.logs import configure_logging

    flood = configure_logging(settings.telemetry.log_level)
    tune_interpreter()
    raise click.exceptions.Exit(run(pipeline.run(settings, stages, flood)))


def tune_interpreter() -> None:
    """Set what the whole process has, as one that serves needs it."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # what was imported lives as long as the process
    gc.set_threshold(*GC_THRESHOLD)
