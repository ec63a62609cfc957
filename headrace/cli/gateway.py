"""`headrace gateway`: a gateway in a process of its own, or in several, until a signal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from headrace.cli.outcome import Exit
from headrace.cli.run import overriding_settings, serve
from headrace.cli.settings import Invocation, pass_invocation, require_broker
from headrace.config import Option, Settings
from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    import socket


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
    from headrace.cli.event_loop import run
    from headrace.telemetry.logs import configure_logging

    if settings.gateway.shared_memory != "off":
        raise ConfigurationError(
            'gateway.shared_memory: expected "off" with --workers, because regions belong to one '
            f"process, got {settings.gateway.shared_memory!r}"
        )
    if sys.platform == "win32":
        raise ConfigurationError("--workers: needs SO_REUSEPORT, which this system does not have")
    configure_logging("debug" if invocation.debug else settings.telemetry.log_level)
    raise click.exceptions.Exit(run(_serve_workers(invocation, settings, overrides, workers)))


async def _serve_workers(
    invocation: Invocation, settings: Settings, overrides: Sequence[Option], number: int
) -> int:
    """Run workers until a signal, and return the exit code.

    Raises:
        Fatal: a port is taken, or an address is not this machine's.
    """
    import asyncio

    from headrace.runtime.shutdown import Stop, stop_on_signals
    from headrace.runtime.workers import Workers
    from headrace.telemetry.http_listener import port_of, reserve

    doors = {
        "--gateway-port": (
            "gateway.http_port",
            settings.gateway.http_host,
            settings.gateway.http_port,
        ),
        "--grpc-port": (
            "gateway.grpc_port",
            settings.gateway.grpc_host,
            settings.gateway.grpc_port,
        ),
    }
    options = {each.name: str(each.value) for each in overrides}
    stop = Stop()
    with ExitStack() as stack:
        for option, (setting, host, port) in doors.items():
            if port == "off":
                continue
            sockets: list[socket.socket] = await reserve(setting, host, port)
            for each in sockets:
                stack.enter_context(each)
            options[option] = str(port_of(sockets))
        commands = [
            _command_of(invocation, options | {"--http-port": _page_port(settings, worker)})
            for worker in range(number)
        ]
        workers = Workers(commands, {"HEADRACE_GATEWAY__REUSE_PORT": "true"}, Exit.USAGE)
        stack.enter_context(stop_on_signals(stop))
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, workers.send, signal.SIGHUP)
        return await workers.run(stop)


def _page_port(settings: Settings, worker: int) -> str:
    first = settings.telemetry.http_port
    return str(first + worker if first else 0)


def _command_of(invocation: Invocation, options: dict[str, str]) -> list[str]:
    """Return the command line of a worker, which has the parent's environment and directory."""
    command = [sys.executable, "-m", "headrace"]
    if invocation.config_file is not None:
        command += ["--config", str(invocation.config_file)]
    if invocation.debug:
        command.append("--debug")
    return [*command, "gateway", *(part for option in options.items() for part in option)]
