"""`headrace run [STAGE,…]`: runs the services until a signal."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
import structlog

from headrace.cli.outcome import Exit
from headrace.cli.output import drop_unwritten_output, say
from headrace.cli.replicas import Replicas, serve_replicas
from headrace.cli.settings import Invocation, pass_invocation, require_broker
from headrace.config import Option, Settings
from headrace.telemetry.logs import Event, configure_logging
from headrace.topics import STAGES, Stage
from headrace.tuning import TUNING

if TYPE_CHECKING:
    from headrace.runtime.process import OpenDoors

log = structlog.get_logger(__name__)

T = TypeVar("T")

ANY_ADDRESS = ("", str(IPv4Address(0)), str(IPv6Address(0)))


def parse_stages(text: str) -> tuple[Stage, ...]:
    """Parse adjacent stages in the order in which a request passes them, as in `batcher,executor`.

    Raises:
        ValueError: an unknown stage, a repeated one, or stages that are not adjacent and in order.
    """
    names = [name.strip() for name in text.split(",")]
    path = [stage.value for stage in STAGES]
    for name in names:
        if name not in path:
            raise ValueError(f"expected stages out of {', '.join(path)}, got {name!r}")
    first = path.index(names[0])
    if names != path[first : first + len(names)]:
        raise ValueError(
            f"expected adjacent stages in the order of {', '.join(path)}, each once, "
            f"got {', '.join(names)}"
        )
    return STAGES[first : first + len(names)]


def _stages(ctx: click.Context, param: click.Parameter, value: str) -> tuple[Stage, ...]:
    try:
        return parse_stages(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


_OVERRIDING: tuple[tuple[str, tuple[str, str], click.ParamType[Any], str], ...] = (
    ("--models", ("models", "repository"), click.STRING, "DIR|URL"),
    ("--bootstrap-servers", ("kafka", "bootstrap_servers"), click.STRING, "HOST:PORT,..."),
    ("--http-port", ("telemetry", "http_port"), click.INT, "N"),
    ("--gateway-port", ("gateway", "http_port"), click.INT, "N"),
    ("--grpc-port", ("gateway", "grpc_port"), click.INT, "N"),
)
"""Options of a process that override settings: name, setting, type and metavar."""


def overriding_settings(function: Callable[..., T]) -> Callable[..., T]:
    """Add the options that override settings; the command gets those given as `overrides`."""

    @wraps(function)
    def with_overrides(*args: Any, **values: Any) -> T:
        overrides = []
        for name, setting, _, _ in _OVERRIDING:
            value = values.pop(name.removeprefix("--").replace("-", "_"))
            if value is not None:
                overrides.append(Option(name, setting, value))
        return function(*args, overrides=overrides, **values)

    command: Callable[..., T] = with_overrides
    for name, setting, kind, metavar in reversed(_OVERRIDING):
        text = f"Setting {'.'.join(setting)}" + ("; 0 takes a free one." if metavar == "N" else ".")
        command = click.option(name, type=kind, metavar=metavar, help=text)(command)
    return command


@click.command()
@click.argument("stages", default=",".join(STAGES), callback=_stages, metavar="[STAGE,...]")
@overriding_settings
@click.option(
    "--gateway",
    is_flag=True,
    help="Open a gateway as well, in this process (docs/http.md).",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    metavar="N",
    help="Processes with these stages, which share this machine's cores (docs/scaling.md).",
)
@pass_invocation
def command(
    invocation: Invocation,
    stages: tuple[Stage, ...],
    overrides: Sequence[Option],
    gateway: bool,
    replicas: int,
) -> None:
    """Serve until SIGTERM or SIGINT: run all four stages in this process, or those named.

    The stages are ingest, batcher, executor and responder. Those named must be adjacent, in this
    order, with commas between them, as in `headrace run batcher,executor`. Stages that run apart
    need a broker, its topics (`headrace topics create`), and the same settings and models.

    The first signal drains: what is in flight is answered, within limits.drain_timeout_s. The
    second one ends at once; what is unanswered then is still on Kafka, and is answered after the
    next start. The exit code is 3 if requests were left unanswered or answers uncommitted. SIGHUP
    looks for new and changed models.

    With --replicas N such processes run on this machine. Each has its own telemetry.http_port, the
    next one up from that of the one before, and its part of the cores. One that ends is started
    again.

    The options go over the settings' file and the environment; a file is not needed.
    """
    settings = invocation.settings_with(overrides)
    if stages != STAGES:
        require_broker(settings, "without one all stages run in one process: `headrace run`")
    if replicas > 1:
        require_broker(settings, "without one every process would have a log of its own")
        arguments = ("run", ",".join(stages), *(["--gateway"] if gateway else []))
        part = partial(core_part, settings, replicas)
        serve_replicas(
            invocation,
            settings,
            Replicas("--replicas", replicas, arguments, overrides, gateway, part),
        )
    serve(invocation, settings, stages, gateway=gateway)


def core_part(settings: Settings, replicas: int, number: int) -> dict[str, str]:
    """Return the variable with a replica's part of the cores that are this process' own.

    Args:
        settings: of this process.
        replicas: how many there are.
        number: the replica's, from 0.
    """
    part, of = map(int, settings.executor.cores.split("/"))
    cores = f"{(part - 1) * replicas + number + 1}/{of * replicas}"
    return {"HEADRACE_EXECUTOR__CORES": cores}


def serve(
    invocation: Invocation, settings: Settings, stages: tuple[Stage, ...], *, gateway: bool
) -> NoReturn:
    """Serve until a signal; without stages, as a gateway alone."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the process listens to it
    # For the half second that the imports take: without a handler, the first process of a container
    # would ignore the signal, and be killed after its grace period.
    signal.signal(signal.SIGTERM, _end_before_start)
    from headrace.cli.event_loop import run
    from headrace.runtime import process
    from headrace.runtime.heap import keep_freed_memory

    log_rate_limiter = configure_logging(
        "debug" if invocation.debug else settings.telemetry.log_level
    )
    tune_interpreter()
    keep_freed_memory()
    raise_file_limit()
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
    announce = partial(announce_start, settings) if sys.stderr.isatty() else None
    serve_process = invocation.serve_process or process.run
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    is_drained = run(
        serve_process(
            settings,
            stages,
            log_rate_limiter,
            announce,
            open_doors=open_doors,
            on_forced=_end_soon,
        )
    )
    drop_unwritten_output()
    raise click.exceptions.Exit(Exit.DONE if is_drained else Exit.NOT_DRAINED)


def _end_before_start(*_: object) -> NoReturn:
    """End by SIGTERM: nothing has been read, so nothing is left."""
    sys.exit(Exit.DONE)


def _end_soon() -> None:
    """End the process in a while, whatever it still closes then: that may wait for brokers."""
    ending = threading.Timer(TUNING.runtime.forced_end_s, _end_now)
    ending.daemon = True
    ending.start()


def _end_now() -> None:
    log.warning(Event.CUT_OFF)
    drop_unwritten_output()
    os._exit(Exit.NOT_DRAINED)


def announce_start(settings: Settings, http_port: int, doors: Mapping[str, int]) -> None:
    """Print on a terminal where requests come from, the models, and the HTTP addresses."""
    broker = settings.kafka.bootstrap_servers if settings.kafka else "none, a log in memory"
    locations = settings.models.locations
    models = ", ".join(  # of directories; a store is not asked, and the pipeline reports faults
        sorted(
            each.name
            for location in locations
            if isinstance(location, Path) and os.path.isdir(location)  # noqa: PTH112 - raises nothing
            for each in location.glob("[!.]*/")
        )
    )
    places = ", ".join(
        str(each.absolute()) if isinstance(each, Path) else each for each in locations
    )
    say(f"headrace: broker     {broker}", err=True)
    say(f"headrace: namespace  {settings.namespace}", err=True)
    say(f"headrace: models     {models or 'none'} ({places})", err=True)
    page_scheme = "http" if settings.telemetry.tls_cert_file is None else "https"
    page = _url(settings.telemetry.http_host, http_port, page_scheme)
    say(f"headrace: page       {page}", err=True)
    has_tls = settings.gateway.tls_cert_file is not None
    if "http" in doors:
        scheme = "https" if has_tls else "http"
        url = _url(settings.gateway.http_host, doors["http"], scheme)
        say(f"headrace: gateway    {url}v2", err=True)
    if "grpc" in doors:
        address = f"{_in_brackets(settings.gateway.grpc_host)}:{doors['grpc']}"
        say(f"headrace: grpc       {address}{' (TLS)' if has_tls else ''}", err=True)


def _url(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://{'localhost' if host in ANY_ADDRESS else _in_brackets(host)}:{port}/"


def _in_brackets(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets (RFC 3986)."""
    return f"[{host}]" if ":" in host else host


def tune_interpreter() -> None:
    """Set the interpreter's switch interval and garbage collection for serving."""
    tuning = TUNING.runtime
    sys.setswitchinterval(tuning.thread_switch_interval_s)
    gc.collect()
    gc.freeze()  # imported objects live as long as the process
    gc.set_threshold(*tuning.gc_thresholds)


def raise_file_limit() -> None:
    """Allow as many file descriptors as the hard limit does.

    The usual soft limit of 1024, which is for programs that call `select`, is below the connections
    that a gateway may have: idle callers would leave none for probes and brokers.
    """
    import resource  # here, because Windows has none

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS has a lower limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
