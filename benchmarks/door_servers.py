"""The servers whose doors are compared, each with the digits model on ONNX Runtime.

Those of others are in `benchmarks/servers`, written as their documentation shows, with batches of
up to 32 rows and one worker; each runs in an environment of its own, since their requirements
exclude one another.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.contestants import HEADRACE
from benchmarks.door_load import Dialect, Way
from benchmarks.processes import Program

SERVERS = Path("benchmarks/servers").absolute()
ENVIRONMENTS = Path(".venv-doors")
"""The directory of the virtual environments: one for each server of another project."""
THREADS = 1
BATCH = 32
INFER = "/v2/models/digits/infer"


class Place(NamedTuple):
    """The addresses, directories and model of a server.

    Attributes:
        namespace: of its topics.
        bootstrap_servers: the broker's address; empty for the embedded log.
        scratch: a directory for what the server writes.
    """

    http_port: int
    grpc_port: int
    spare_port: int
    namespace: str
    bootstrap_servers: str
    repository: Path
    onnx: Path
    scratch: Path


class Door(NamedTuple):
    """One way into a server."""

    way: Way
    path: str = INFER
    dialect: Dialect = Dialect.OPEN_INFERENCE


class Server(NamedTuple):
    """A server, and the ways into it, the first of which is HTTP.

    Attributes:
        parts: names of its programs, where their processor times are told apart.
        needs_broker: its log is Kafka.
        others: the environment that it needs; empty for Headrace.
    """

    name: str
    doors: tuple[Door, ...]
    programs: Callable[[Place], list[Program]]
    parts: tuple[str, ...] = ()
    needs_broker: bool = False
    others: str = ""


def headrace_environment(place: Place) -> dict[str, str]:
    """Return the settings of Headrace, which are also those of its commands."""
    environment = {
        "HEADRACE_NAMESPACE": place.namespace,
        "HEADRACE_MODELS__REPOSITORY": str(place.repository),
        "HEADRACE_BATCHING__MAX_BATCH_SIZE": str(BATCH),
        "HEADRACE_EXECUTOR__INTRA_OP_THREADS": str(THREADS),
        "HEADRACE_TELEMETRY__LOG_LEVEL": "warning",
    }
    if place.bootstrap_servers:
        environment["HEADRACE_KAFKA__BOOTSTRAP_SERVERS"] = place.bootstrap_servers
    return environment


def _headrace(place: Place) -> list[Program]:
    ports = ["--gateway-port", str(place.http_port), "--grpc-port", str(place.grpc_port)]
    command = [HEADRACE, "run", "--gateway", *ports, "--http-port", "0"]
    return [Program(command, headrace_environment(place))]


def _headrace_apart(place: Place) -> list[Program]:
    environment = headrace_environment(place)
    ports = ["--gateway-port", str(place.http_port), "--grpc-port", str(place.grpc_port)]
    return [
        Program([HEADRACE, "gateway", *ports, "--http-port", "0"], environment),
        Program([HEADRACE, "run", "--http-port", "0"], environment),
    ]


def _python(name: str) -> Path:
    return (ENVIRONMENTS / name / "bin" / "python").absolute()


def _model(place: Place) -> Mapping[str, str]:
    return {"MODEL_ONNX": str(place.onnx.absolute()), "MODEL_THREADS": str(THREADS)}


def _mlserver(place: Place) -> list[Program]:
    environment = {
        **_model(place),
        "MLSERVER_HOST": "127.0.0.1",
        "MLSERVER_HTTP_PORT": str(place.http_port),
        "MLSERVER_GRPC_PORT": str(place.grpc_port),
        "MLSERVER_METRICS_PORT": str(place.spare_port),
        "MLSERVER_METRICS_DIR": str(place.scratch),
    }
    command = [_python("mlserver"), "-m", "mlserver.cli.main", "start", SERVERS / "mlserver"]
    return [Program(command, environment)]


def _litserve(place: Place) -> list[Program]:
    command = [_python("litserve"), SERVERS / "litserve" / "server.py", str(place.http_port)]
    return [Program(command, _model(place))]


def _bentoml(place: Place) -> list[Program]:
    environment = {**_model(place), "BENTOML_HOME": str(place.scratch), "BENTOML_DO_NOT_TRACK": "1"}
    command = [_python("bentoml"), "-m", "bentoml", "serve", "service:Digits"]
    command += ["--host", "127.0.0.1", "--port", str(place.http_port)]
    return [Program(command, environment, SERVERS / "bentoml")]


EMBEDDED = "Headrace, embedded log"
WITH_KAFKA = "Headrace, Kafka"
APART = "Headrace, Kafka, gateway apart"
MLSERVER = "MLServer"
LITSERVE = "LitServe"
BENTOML = "BentoML"
_DOORS = (Door(Way.BINARY), Door(Way.JSON), Door(Way.GRPC))

DOOR_SERVERS = (
    Server(EMBEDDED, _DOORS, _headrace),
    Server(MLSERVER, (Door(Way.JSON), Door(Way.GRPC)), _mlserver, others="mlserver"),
    Server(WITH_KAFKA, (*_DOORS, Door(Way.KAFKA)), _headrace, needs_broker=True),
    Server(
        LITSERVE,
        (Door(Way.JSON, "/predict", Dialect.OBJECT),),
        _litserve,
        others="litserve",
    ),
    Server(
        APART,
        (Door(Way.BINARY), Door(Way.GRPC)),
        _headrace_apart,
        parts=("gateway", "stages"),
        needs_broker=True,
    ),
    Server(BENTOML, (Door(Way.JSON, "/predict", Dialect.ROWS),), _bentoml, others="bentoml"),
)
"""MLServer has no binary tensors over HTTP; LitServe and BentoML take JSON."""


def make_environment(name: str) -> None:
    """Install a server of others, unless what is there has the same requirements."""
    directory, requirements = ENVIRONMENTS / name, SERVERS / name / "requirements.txt"
    installed, wanted = directory / "installed.txt", requirements.read_text(encoding="utf-8")
    if installed.exists() and installed.read_text(encoding="utf-8") == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
    pip = [_python(name), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", requirements], check=True)
    installed.write_text(wanted, encoding="utf-8")
