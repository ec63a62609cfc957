"""`headrace gateway`: a gateway in a process of its own, until a signal."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.cli.run import serve
from headrace.cli.settings import Invocation, pass_invocation
from headrace.config import Option
from headrace.errors import ConfigurationError


@click.command()
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
    "--gateway-port", type=int, metavar="N", help="Setting gateway.http_port; 0 takes a free one."
)
@click.option(
    "--grpc-port", type=int, metavar="N", help="Setting gateway.grpc_port; 0 takes a free one."
)
@pass_invocation
def command(
    invocation: Invocation,
    models: Path | None,
    bootstrap_servers: str | None,
    http_port: int | None,
    gateway_port: int | None,
    grpc_port: int | None,
) -> None:
    """Take requests over HTTP and gRPC, and send them to the broker, until SIGTERM or SIGINT.

    Any number of gateways may run. Each reads the model repository to describe the models to its
    callers; the stages (`headrace run`) decide about each request. The first signal drains: the
    gateway is no longer ready, and answers what is under way, within limits.drain_timeout_s.
    """
    options = [
        Option("--models", ("models", "repository"), models),
        Option("--bootstrap-servers", ("kafka", "bootstrap_servers"), bootstrap_servers),
        Option("--http-port", ("telemetry", "http_port"), http_port),
        Option("--gateway-port", ("gateway", "http_port"), gateway_port),
        Option("--grpc-port", ("gateway", "grpc_port"), grpc_port),
    ]
    settings = invocation.settings_with([each for each in options if each.value is not None])
    if settings.kafka is None:
        raise ConfigurationError(
            "headrace gateway: expected a broker (kafka.bootstrap_servers), got none; "
            "`headrace run --gateway` serves without one, in one process"
        )
    serve(invocation, settings, (), gateway=True)
