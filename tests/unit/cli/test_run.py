"""The stages that `headrace run` takes, and how it starts them."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from headrace.cli.outcome import Exit
from headrace.cli.run import announce_start, core_part, parse_stages
from headrace.cli.settings import Invocation
from headrace.config import Settings, make_settings
from headrace.primitives.child_process import import_path, interpreter
from headrace.runtime.process import OpenDoors
from headrace.telemetry.logs import LogRateLimiter
from headrace.topics import STAGES, Stage
from headrace.tuning import TUNING
from tests.support.command_line import Call
from tests.support.conditions import DEADLINE_S
from tests.support.users import closed_to_us


class Started(list[tuple[Stage, ...]]):
    """The stages with which the services were started, and the last settings."""

    settings: Settings
    with_gateway: bool
    sighup: object
    """What SIGHUP would have done then."""
    file_descriptors: int
    """How many the process could have then."""


@pytest.fixture
def started() -> Iterator[Started]:
    """Record the stages that were started, instead of running services."""
    calls = Started()
    before, sighup = sys.getswitchinterval(), signal.getsignal(signal.SIGHUP)
    yield calls
    sys.setswitchinterval(before)
    signal.signal(signal.SIGHUP, sighup)


@pytest.fixture
def call(call: Call, started: Started) -> Call:
    """Runs a command that serves by recording what would be started."""

    async def record(
        settings: Settings,
        stages: tuple[Stage, ...],
        log_rate_limiter: LogRateLimiter,
        announce: Callable[[int, Mapping[str, int]], None] | None,
        open_doors: OpenDoors | None,
        on_forced: Callable[[], None],
    ) -> bool:
        started.append(tuple(stages))
        started.with_gateway = open_doors is not None
        started.settings = settings
        started.sighup = signal.getsignal(signal.SIGHUP)
        started.file_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if announce is not None:
            announce(8123, {} if open_doors is None else {"http": 8124})
        return settings.namespace == "headrace"

    return lambda *arguments: call(*arguments, obj=Invocation(serve_process=record))


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("ingest", (Stage.INGEST,)),
        ("batcher,executor", (Stage.BATCHER, Stage.EXECUTOR)),
        ("batcher, executor", (Stage.BATCHER, Stage.EXECUTOR)),
        ("ingest,batcher,executor,responder", STAGES),
    ],
)
def test_adjacent_stages_are_accepted(text: str, stages: tuple[Stage, ...]) -> None:
    """Any unbroken run of the path may share a process."""
    assert parse_stages(text) == stages


@pytest.mark.parametrize(
    "text", ["", "ingest,executor", "executor,batcher", "ingest,ingest", "ingest,", "gpu"]
)
def test_nonadjacent_stages_are_refused(text: str) -> None:
    """Gaps, another order, repetitions and unknown names are refused."""
    with pytest.raises(ValueError, match=r"expected (adjacent )?stages"):
        parse_stages(text)


def test_wrong_stages_are_wrong_usage(call: Call) -> None:
    """The command line says what was expected and what came."""
    result = call("run", "ingest,executor")
    assert result.exit_code == Exit.USAGE
    assert "in the order of ingest, batcher, executor, responder" in " ".join(result.stderr.split())


def test_gateway_runs_beside_stages(call: Call, started: Started) -> None:
    """`headrace run --gateway` opens one, at the port that is given."""
    assert call("run", "--gateway", "--gateway-port", "0").exit_code == Exit.DONE
    assert (started[0], started.with_gateway) == (STAGES, True)
    assert started.settings.gateway.http_port == 0


def test_gateway_alone_runs_no_stage(call: Call, started: Started) -> None:
    """`headrace gateway` is a process without stages, in front of a broker."""
    assert call("gateway", "--bootstrap-servers", "127.0.0.1:9092").exit_code == Exit.DONE
    assert (started[0], started.with_gateway) == ((), True)


def test_workers_of_gateway_refuse_shared_memory(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region that one process knows would be unknown to the next call's."""
    monkeypatch.setenv("HEADRACE_GATEWAY__SHARED_MEMORY", "/headrace_")
    result = call("gateway", "--workers", "2", "--bootstrap-servers", "127.0.0.1:9")
    assert result.exit_code == Exit.USAGE
    assert 'gateway.shared_memory: expected "off" with --workers' in result.stderr


def test_workers_of_gateway_need_free_port(call: Call) -> None:
    """It is an error at once, and no worker is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = ("--bootstrap-servers", "127.0.0.1:9", "--gateway-port", port)
        result = call("gateway", "--workers", "2", *options)
    assert result.exit_code == Exit.FAILED
    assert f"gateway.http_port: cannot listen on 127.0.0.1:{port}" in result.stderr


@pytest.mark.parametrize("command", [("gateway", "--workers"), ("run", "--replicas")])
def test_replicas_need_free_ports_for_health(call: Call, command: tuple[str, str]) -> None:
    """The second one's is taken: it would be started again, and end, until someone looks."""
    name, option = command
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = ("--gateway-port", "0", "--grpc-port", "0", "--http-port", str(port - 1))
        result = call(name, option, "2", "--bootstrap-servers", "127.0.0.1:9", *ports)
    assert result.exit_code == Exit.FAILED
    [line] = result.stderr.splitlines()
    assert line in [  # the one below may be another program's
        f"headrace: telemetry.http_port: cannot listen on 127.0.0.1:{each}: Address already in "
        "use; set another port, or 0 for a free one"
        for each in (port - 1, port)
    ]


def test_replicas_need_room_above_first_port_for_health(call: Call) -> None:
    """There is no port 65536."""
    options = ("--bootstrap-servers", "127.0.0.1:9", "--http-port", "65535")
    result = call("run", "--replicas", "2", *options)
    assert result.exit_code == Exit.USAGE
    assert "telemetry.http_port: expected at most 65534 with --replicas 2" in result.stderr


def test_replicas_need_broker(call: Call, started: Started) -> None:
    """Each would have a log of its own, which nobody else could reach."""
    result = call("run", "--replicas", "2")
    assert result.exit_code == Exit.USAGE
    assert "every process would have a log of its own" in " ".join(result.stderr.split())
    assert not started


def test_replicas_divide_cores_of_their_parent() -> None:
    """The second half of the machine becomes its third and fourth quarter."""
    settings = make_settings({"executor": {"cores": "2/2"}})
    parts = [core_part(settings, 2, number)["HEADRACE_EXECUTOR__CORES"] for number in range(2)]
    assert parts == ["3/4", "4/4"]


def test_gateway_alone_needs_broker(call: Call, started: Started) -> None:
    """Without one nothing could answer, so that it is wrong usage; the remedy is told."""
    result = call("gateway")
    assert result.exit_code == Exit.USAGE
    assert "headrace run --gateway" in " ".join(result.stderr.split())
    assert not started


def test_all_stages_run_when_none_is_named(call: Call, started: Started) -> None:
    """Without an argument the whole path runs in one process."""
    assert call("run").exit_code == Exit.DONE
    assert started == [STAGES]


def test_run_shortens_thread_switch_interval(call: Call, started: Started) -> None:
    """The dispatcher's thread does not wait Python's 5 ms for a busy event loop."""
    call("run", "executor", "--bootstrap-servers", "127.0.0.1:9")
    assert started == [(Stage.EXECUTOR,)]
    assert sys.getswitchinterval() == pytest.approx(TUNING.runtime.thread_switch_interval_s)


def test_run_takes_all_file_descriptors_that_it_may_have(call: Call, started: Started) -> None:
    """Under the usual soft limit, idle callers of a gateway would lock its probes out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        call("run", "--gateway")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert started.file_descriptors == hard


def test_run_that_left_requests_exits_with_not_drained(
    call: Call, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor can tell it from a drained process, and from one that failed."""
    monkeypatch.setenv("HEADRACE_NAMESPACE", "other")
    assert call("run").exit_code == Exit.NOT_DRAINED


def test_run_options_override_file_and_environment(
    call: Call, started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models, broker and port can be given without a file, and over one."""
    (tmp_path / "headrace.toml").write_text('[kafka]\nbootstrap_servers = "file:1"\nlinger_ms = 7')
    monkeypatch.setenv("HEADRACE_KAFKA__BOOTSTRAP_SERVERS", "environment:1")
    options = ("--models", "other", "--bootstrap-servers", "option:1", "--http-port", "0")

    result = call("run", *options)

    assert result.exit_code == Exit.DONE, result.stderr
    assert started.settings.kafka is not None
    assert started.settings.kafka.bootstrap_servers == "option:1"
    assert started.settings.kafka.linger_ms == 7
    assert started.settings.models.repository == Path("other")
    assert started.settings.telemetry.http_port == 0


def test_wrong_run_option_is_named(call: Call, started: Started) -> None:
    """Instead of as a line of a file."""
    result = call("run", "--http-port", "70000")
    assert result.exit_code == Exit.USAGE
    assert result.stderr.startswith("headrace: --http-port: ")


def test_stages_apart_without_broker_are_refused(call: Call, started: Started) -> None:
    """They could pass nothing to each other."""
    result = call("run", "batcher,executor")

    assert result.exit_code == Exit.USAGE
    assert result.stderr.startswith("headrace: kafka.bootstrap_servers: expected a broker")
    assert not started


def test_run_without_broker_warns_once(call: Call, started: Started) -> None:
    """Its log can be reached by nobody else; with a broker nothing is said."""
    alone = call("run")
    with_broker = call("run", "--bootstrap-servers", "127.0.0.1:9")

    assert alone.stderr.count("no broker is configured") == 1
    assert "no broker" not in with_broker.stderr


def test_start_is_announced_with_models_and_addresses(
    call: Call, started: Started, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broker, namespace, models and the page's address on a terminal; nothing elsewhere."""
    (tmp_path / "models" / "digits").mkdir(parents=True)
    elsewhere = call("run", "--bootstrap-servers", "127.0.0.1:9")
    announce_start(started.settings, 8123, {})

    assert elsewhere.stderr == ""
    assert capsys.readouterr().err.splitlines() == [
        "headrace: broker     127.0.0.1:9",
        "headrace: namespace  headrace",
        f"headrace: models     digits ({tmp_path / 'models'})",
        "headrace: page       http://127.0.0.1:8123/",
    ]


def test_models_that_are_closed_to_us_do_not_end_announcement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pipeline reports them."""
    models = tmp_path / "models"
    with closed_to_us(tmp_path):
        announce_start(make_settings({"models": {"repository": str(models)}}), 8123, {})

    assert f"headrace: models     none ({models})" in capsys.readouterr().err


def test_announced_ipv6_addresses_can_be_opened(capsys: pytest.CaptureFixture[str]) -> None:
    """A URL has brackets around them, without which the port belongs to the address."""
    settings = make_settings(
        {
            "telemetry": {"http_host": "::1"},
            "gateway": {"http_host": "fd00::5", "grpc_host": "fd00::5"},
        }
    )
    announce_start(settings, 8123, {"http": 8000, "grpc": 8001})

    assert capsys.readouterr().err.splitlines()[-3:] == [
        "headrace: page       http://[::1]:8123/",
        "headrace: gateway    http://[fd00::5]:8000/v2",
        "headrace: grpc       [fd00::5]:8001",
    ]


def test_sighup_ends_no_process_that_starts(call: Call, started: Started) -> None:
    """It asks to look for models, which a process that starts does anyway."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    assert call("run").exit_code == Exit.DONE
    assert started.sighup is signal.SIG_IGN


def test_sigterm_during_imports_ends_process_cleanly(tmp_path: Path) -> None:
    """Nothing has been read yet. As the first process of a container it would ignore the signal."""
    (tmp_path / "prometheus_client.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-m", "headrace", "run", "--http-port", "0"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (Exit.DONE, "")


def test_replica_imports_nothing_from_working_directory(tmp_path: Path) -> None:
    """A file there with a module's name would end each replica, though not `headrace run`."""
    (tmp_path / "random.py").write_text("raise RuntimeError('not the one of Python')")
    ended = subprocess.run(
        [
            *interpreter("headrace"),
            *("run", "--replicas", "2", "--bootstrap-servers", "127.0.0.1:9", "--http-port", "0"),
        ],
        cwd=tmp_path,
        env={**os.environ, **import_path(), "OTEL_EXPORTER_OTLP_PROTOCOL": "pigeons"}
        | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == Exit.USAGE, ended.stderr
