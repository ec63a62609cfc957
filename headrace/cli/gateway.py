"""`headrace gateway`: a gateway in a process of its own, or in several, until a signal."""

from __future__ import annotations

from collections.abc import Sequence

import click

from headrace.cli.replicas import Replicas, serve_replicas
from headrace.cli.run import overriding_settings, serve
from headrace.cli.settings import Invocation, pass_invocation, require_broker
from headrace.config import Option


@click.command()
@overriding_settings
@click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    metavar="N",
    help="Processes that share the ports of the doors.",
)
@pass_invocation
def command(invocation: Invocation, overrides: Sequence[Option], workers: int) -> None:
    """Take requests over HTTP and gRPC, and send them to the broker, until SIGTERM or SIGINT.

    Any number of gateways may run. Each reads the model repository to describe the models to its
    callers; the stages (`headrace run`) decide about each request. The first signal drains: the
    gateway is no longer ready, and answers what is under way, within limits.drain_timeout_s.

    With --workers the kernel spreads the connections over N processes. Each has its own
    telemetry.http_port, the next one up from that of the worker before. One that ends is started
    again.
    """
    settings = invocation.settings_with(overrides)
    require_broker(settings, "`headrace run --gateway` serves without one, in one process")
    if workers == 1:
        serve(invocation, settings, (), gateway=True)
    replicas = Replicas("--workers", workers, ("gateway",), overrides, opens_doors=True)
    serve_replicas(invocation, settings, replicas)
