"""`headrace gateway`: a gateway in a process of its own, until a signal."""

from __future__ import annotations

from collections.abc import Sequence

import click

from headrace.cli.run import overriding_settings, serve
from headrace.cli.settings import Invocation, pass_invocation, require_broker
from headrace.config import Option


@click.command()
@overriding_settings
@pass_invocation
def command(
    invocation: Invocation,
    overrides: Sequence[Option],
) -> None:
    """Take requests over HTTP and gRPC, and send them to the broker, until SIGTERM or SIGINT.

    Any number of gateways may run. Each reads the model repository to describe the models to its
    callers; the stages (`headrace run`) decide about each request. The first signal drains: the
    gateway is no longer ready, and answers what is under way, within limits.drain_timeout_s.
    """
    settings = invocation.settings_with(overrides)
    require_broker(settings, "`headrace run --gateway` serves without one, in one process")
    serve(invocation, settings, (), gateway=True)
