"""Several processes of one command, started again when they end, until a signal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import click

from headrace.cli.outcome import Exit
from headrace.cli.settings import Invocation
from headrace.config import Option, Settings
from headrace.errors import ConfigurationError
from headrace.primitives.child_process import import_path, interpreter
from headrace.telemetry.logs import configure_logging

if TYPE_CHECKING:
    import socket


_LAST_PORT = 65535


class Replicas(NamedTuple):
    """A command that runs in several processes.

    Attributes:
        option: of the command line that asked for several, for errors.
        number: how many.
        command: of `headrace`, with its arguments.
        overrides: options that were given.
        opens_doors: each is a gateway as well, and they share the ports of its doors.
        environment: variables of one of them, by its number from 0.
    """

    option: str
    number: int
    command: Sequence[str]
    overrides: Sequence[Option]
    opens_doors: bool
    environment: Callable[[int], Mapping[str, str]] = lambda _: {}


def serve_replicas(invocation: Invocation, settings: Settings, replicas: Replicas) -> NoReturn:
    """Keep processes running until a signal, and exit with their code.

    Raises:
        ConfigurationError: they cannot share the doors of a gateway, or there are too few ports.
        Fatal: a port is taken, of a door or for health, or an address is not this machine's.
    """
    from headrace.cli.event_loop import run

    if replicas.opens_doors and settings.gateway.shared_memory != "off":
        raise ConfigurationError(
            f'gateway.shared_memory: expected "off" with {replicas.option}, because regions belong '
            f"to one process, got {settings.gateway.shared_memory!r}"
        )
    if replicas.opens_doors and sys.platform == "win32":
        raise ConfigurationError(
            f"{replicas.option}: needs SO_REUSEPORT, which this system does not have"
        )
    if _page_port(settings, replicas.number - 1) > _LAST_PORT:
        raise ConfigurationError(
            f"telemetry.http_port: expected at most {_LAST_PORT - replicas.number + 1} with "
            f"{replicas.option} {replicas.number}, got {settings.telemetry.http_port}"
        )
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # in the workers as well, until they listen to it
    configure_logging("debug" if invocation.debug else settings.telemetry.log_level)
    raise click.exceptions.Exit(run(_serve(invocation, settings, replicas)))


async def _serve(invocation: Invocation, settings: Settings, replicas: Replicas) -> int:
    import asyncio

    from headrace.runtime.shutdown import Stop, stop_on_signals
    from headrace.runtime.workers import WorkerCommand, Workers

    stop = Stop()
    with ExitStack() as stack:
        options = {each.name: str(each.value) for each in replicas.overrides}
        common = import_path()
        if replicas.opens_doors:
            options |= await _reserve_ports(settings, stack)
            common["HEADRACE_GATEWAY__REUSE_PORT"] = "true"
        await _check_page_ports(settings, replicas.number)
        commands = [
            WorkerCommand(
                _command_line(
                    invocation,
                    replicas.command,
                    options | {"--http-port": str(_page_port(settings, number))},
                ),
                {**common, **replicas.environment(number)},
            )
            for number in range(replicas.number)
        ]
        workers = Workers(commands, Exit.USAGE)
        stack.enter_context(stop_on_signals(stop))
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, workers.send, signal.SIGHUP)
        return await workers.run(stop)


async def _reserve_ports(settings: Settings, stack: ExitStack) -> dict[str, str]:
    """Return options with the ports of a gateway's doors, which are kept until the stack ends."""
    from headrace.telemetry.http_listener import port_of, reserve

    chosen = settings.gateway
    options = {}
    for option, setting, host, port in (
        ("--gateway-port", "gateway.http_port", chosen.http_host, chosen.http_port),
        ("--grpc-port", "gateway.grpc_port", chosen.grpc_host, chosen.grpc_port),
    ):
        if port == "off":
            continue
        sockets: list[socket.socket] = await reserve(setting, host, port)
        for each in sockets:
            stack.enter_context(each)
        options[option] = str(port_of(sockets))
    return options


async def _check_page_ports(settings: Settings, number: int) -> None:
    """Raise `Fatal` if a process could not have its port: it would be started again for ever."""
    from headrace.telemetry.http_listener import bind, listen

    host = settings.telemetry.http_host
    for each in range(number):
        with ExitStack() as stack:
            sockets = await bind("telemetry.http_port", host, _page_port(settings, each))
            for opened in sockets:
                stack.enter_context(opened)
            listen("telemetry.http_port", sockets)


def _page_port(settings: Settings, number: int) -> int:
    first = settings.telemetry.http_port
    return first + number if first else 0


def _command_line(
    invocation: Invocation, command: Sequence[str], options: Mapping[str, str]
) -> list[str]:
    """Return the command line of a process, which has the parent's environment and directory."""
    line = [*interpreter("headrace.cli.worker"), str(os.getpid())]
    if invocation.config_file is not None:
        line += ["--config", str(invocation.config_file)]
    if invocation.debug:
        line.append("--debug")
    return [*line, *command, *(part for option in options.items() for part in option)]
