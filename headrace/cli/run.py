"""`headrace run [STAGE,…]`: runs the services until a signal."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
import structlog

from headrace.cli.output import say
from headrace.cli.settings import Invocation, pass_invocation
from headrace.cli.stages import parse_stages
from headrace.config import Option, Settings
from headrace.telemetry.logs import Event, configure_logging
from headrace.topics import STAGES, Stage
from headrace.tuning import TUNING, RuntimeTuning

if TYPE_CHECKING:
    from headrace.runtime.process import OpenDoors

log = structlog.get_logger(__name__)

ANY_ADDRESS = ("", str(IPv4Address(0)), str(IPv6Address(0)))


def _stages(ctx: click.Context, param: click.Parameter, value: str) -> tuple[Stage, ...]:
    try:
        return parse_stages(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


@click.command()
@click.argument("stages", default=",".join(STAGES), callback=_stages, metavar="[STAGE,...]")
@click.option(
    "--models",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Setting models.repository.",
)
@click.option(
    "--bootstrap-servers", metavar="HOST:PORT,...", help="Setting kafka.bootstrap_servers."
)
@click.option(
    "--http-port", type=int, metavar="N", help="Setting telemetry.http_port; 0 takes a free one."
)
@click.option(
    "--gateway",
    is_flag=True,
    help="Open a gateway as well, in this process (docs/http.md).",
)
@click.option(
    "--gateway-port", type=int, metavar="N", help="Setting gateway.http_port; 0 takes a free one."
)
@click.option(
    "--grpc-port", type=int, metavar="N", help="Setting gateway.grpc_port; 0 takes a free one."
)
@pass_invocation
def command(
    invocation: Invocation,
    stages: tuple[Stage, ...],
    models: Path | None,
    bootstrap_servers: str | None,
    http_port: int | None,
    gateway: bool,
    gateway_port: int | None,
    grpc_port: int | None,
) -> None:
    """Serve until SIGTERM or SIGINT: run all four stages in this process, or those named.

    The stages are ingest, batcher, executor and responder. Those named must be adjacent, in this
    order, with commas between them, as in `headrace run batcher,executor`. Stages that run apart
    need a broker, its topics (`headrace topics create`), and the same settings and models.

    The first signal drains: what is in flight is answered, within limits.drain_timeout_s. The
    second one ends at once; what is unanswered then is still on Kafka, and is answered after the
    next start. SIGHUP looks for new and changed models.

    The options go over the settings' file and the environment; a file is not needed.
    """
    options = [
        Option("--models", ("models", "repository"), models),
        Option("--bootstrap-servers", ("kafka", "bootstrap_servers"), bootstrap_servers),
        Option("--http-port", ("telemetry", "http_port"), http_port),
        Option("--gateway-port", ("gateway", "http_port"), gateway_port),
        Option("--grpc-port", ("gateway", "grpc_port"), grpc_port),
    ]
    settings = invocation.settings_with([each for each in options if each.value is not None])
    serve(invocation, settings, stages, gateway=gateway)


def serve(
    invocation: Invocation, settings: Settings, stages: tuple[Stage, ...], *, gateway: bool
) -> NoReturn:
    """Serve until a signal; without stages, as a gateway alone."""
    from headrace.cli.event_loop import run
    from headrace.runtime import process as pipeline

    log_rate_limiter = configure_logging(
        "debug" if invocation.debug else settings.telemetry.log_level
    )
    tune_interpreter()
    if settings.kafka is None:
        way_in = "its gateway is the only way in" if gateway else "no producer can reach it"
        log.warning(
            Event.NO_BROKER,
            reason="no broker is configured (kafka.bootstrap_servers): the log is in this "
            f"process's memory, and {way_in}",
        )
    open_doors: OpenDoors | None = None
    if gateway:
        from headrace.gateway import open_gateway

        open_doors = open_gateway
    announce = partial(_announce, settings) if on_terminal() else None
    raise click.exceptions.Exit(
        run(pipeline.run(settings, stages, log_rate_limiter, announce, open_doors=open_doors))
    )


def on_terminal() -> bool:
    """Return whether a person may be reading stderr."""
    return sys.stderr.isatty()


def _announce(settings: Settings, http_port: int, doors: Mapping[str, int]) -> None:
    """Print on a terminal where requests come from, the models, and the HTTP addresses."""
    broker = settings.kafka.bootstrap_servers if settings.kafka else "none, a log in memory"
    repository = settings.models.repository
    models = ""
    if repository.is_dir():  # otherwise the pipeline ends, and reports it
        models = ", ".join(sorted(each.name for each in repository.glob("[!.]*/")))
    say(f"headrace: broker     {broker}", err=True)
    say(f"headrace: namespace  {settings.namespace}", err=True)
    say(f"headrace: models     {models or 'none'} ({repository.absolute()})", err=True)
    say(f"headrace: page       {_url(settings.telemetry.http_host, http_port)}", err=True)
    if "http" in doors:
        say(f"headrace: gateway    {_url(settings.gateway.http_host, doors['http'])}v2", err=True)
    if "grpc" in doors:
        say(f"headrace: grpc       {settings.gateway.grpc_host}:{doors['grpc']}", err=True)


def _url(host: str, port: int) -> str:
    return f"http://{'localhost' if host in ANY_ADDRESS else host}:{port}/"


def tune_interpreter(tuning: RuntimeTuning = TUNING.runtime) -> None:
    """Set the interpreter's switch interval and garbage collection for serving."""
    sys.setswitchinterval(tuning.thread_switch_interval_s)
    gc.collect()
    gc.freeze()  # imported objects live as long as the process
    gc.set_threshold(*tuning.gc_thresholds)
