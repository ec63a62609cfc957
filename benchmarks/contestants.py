"""The contestants: the programs that each of them runs, given a model, a broker and topics."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.processes import Program
from benchmarks.subjects import BenchmarkModel
from headrace.config import Settings, make_settings
from headrace.errors import ConfigurationError

PYTHON = Path(sys.executable)
HEADRACE = PYTHON.parent / "headrace"
PEERS_PYTHON = Path(".venv-bench/bin/python")
"""Python environment of the other frameworks, created by `make bench-peers`."""


class ContestantMissing(Exception):
    """A contestant cannot run on this machine; the text says why."""


class Endpoints(NamedTuple):
    """Broker, topics and ports of one run; topics and consumer group belong to that run only.

    Attributes:
        collector: where traces are sent, if they are.
        http_port: where Headrace answers questions, in one process; 0: it does not.
    """

    bootstrap_servers: str
    requests: str
    run: str
    collector: str = ""
    http_port: int = 0

    @property
    def responses(self) -> str:
        """The topic of answers."""
        return f"{self.run}.responses"


class Contestant(NamedTuple):
    """One way to serve a model.

    Attributes:
        family: `loop`, `framework` or `headrace`.
        settings: None for those that are not Headrace.
        vary: the model in the form in which this one serves it.
        settle_s: from the first answer until the count begins. Headrace reads ahead as far as its
            byte budget goes; until then it reads more than it answers. One that learns has tried
            most sizes by then.
        in_transactions: it answers in transactions, whose ends are counted in offsets as well.
    """

    name: str
    family: str
    programs: Callable[[BenchmarkModel, Endpoints], list[Program]]
    settings: Callable[[BenchmarkModel, Endpoints], Settings] | None = None
    settle_s: float = 1.0
    vary: Callable[[BenchmarkModel], BenchmarkModel] = lambda subject: subject
    in_transactions: bool = False


# --- loops by hand and frameworks --------------------------------------------------------------


def _loop(name: str, module: str, *more: str, family: str = "loop") -> Contestant:
    def programs(subject: BenchmarkModel, place: Endpoints) -> list[Program]:
        python = PYTHON
        if family == "framework":
            python = PEERS_PYTHON
            if not python.exists():
                raise ContestantMissing(f"expected {python}; make it with `make bench-peers`")
        command = [python, "-m", f"benchmarks.loops.{module}", *more]
        command += ["--bootstrap-servers", place.bootstrap_servers, "--requests", place.requests]
        command += ["--responses", place.responses, "--group", place.run]
        command += ["--model", str(subject.onnx), "--batch", str(subject.batch)]
        command += ["--threads", str(subject.threads)]
        if subject.slow:
            command.append("--slow")
        return [Program(command)]

    return Contestant(name, family, programs)


# --- Headrace ----------------------------------------------------------------------------------


def _environment(
    subject: BenchmarkModel, place: Endpoints, delivery: str, *, traced: bool
) -> dict[str, str]:
    names = {"requests": place.requests, "responses": place.responses}
    environment = {
        "HEADRACE_NAMESPACE": place.run,
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": place.bootstrap_servers,
        "HEADRACE_MODELS__REPOSITORY": str(subject.repository),
        "HEADRACE_TOPICS__NAMES": json.dumps(names),
        "HEADRACE_BATCHING__MAX_BATCH_SIZE": str(subject.batch),
        "HEADRACE_EXECUTOR__INTRA_OP_THREADS": str(subject.threads),
        "HEADRACE_DELIVERY__GUARANTEE": delivery,
        "HEADRACE_TELEMETRY__HTTP_PORT": str(place.http_port),
        "HEADRACE_TELEMETRY__LOG_LEVEL": "warning",
    }
    if traced:
        environment["HEADRACE_TELEMETRY__OTLP_ENDPOINT"] = place.collector
    return environment


def _settings_from(environment: Mapping[str, str]) -> Settings:
    """Read settings from the environment that the program will get, not from this process's own."""
    values: dict[str, dict[str, object]] = {}
    for name, value in environment.items():
        group, _, field = name.removeprefix("HEADRACE_").lower().partition("__")
        if field:
            values.setdefault(group, {})[field] = json.loads(value) if field == "names" else value
    return make_settings({**values, "namespace": environment["HEADRACE_NAMESPACE"]})


def headrace_as(
    name: str,
    *processes: str,
    delivery: str = "at_least_once",
    traced: bool = False,
) -> Contestant:
    """Return Headrace with these stages in each process; by default with all stages in one."""

    def programs(subject: BenchmarkModel, place: Endpoints) -> list[Program]:
        environment = _environment(subject, place, delivery, traced=traced)
        return [
            Program([HEADRACE, "run", *([stages] if stages else [])], environment)
            for stages in processes or ("",)
        ]

    def settings(subject: BenchmarkModel, place: Endpoints) -> Settings:
        try:
            return _settings_from(_environment(subject, place, delivery, traced=traced))
        except ConfigurationError as error:
            raise ContestantMissing(str(error)) from error

    return Contestant(
        name,
        "headrace",
        programs,
        settings,
        settle_s=2.0,
        in_transactions=delivery == "exactly_once",
    )


FUSED = "Headrace"
TRACED = "Headrace, traced at 1 %"
THREE = "Headrace, three processes"
THREE_ONCE = "Headrace, three processes, exactly once"
FOUR = "Headrace, four processes"
FASTSTREAM = "FastStream"
QUIX = "Quix Streams"
AWAITED = "aiokafka, batches, commit awaited"
OVERLAPPED = "aiokafka, bulk, partitions overlapped"
BARE = "bare ONNX Runtime"
LEARNING = "Headrace, batch size learned"
ALL_CORES = ", all cores"
"""Suffix of contestants whose model uses every core, including the broker's."""

FUSED_CONTESTANT = headrace_as(FUSED)
THREE_CONTESTANT = headrace_as(THREE, "ingest", "batcher,executor", "responder")
ECHO = _loop("two hops through Kafka", "echo")

CONTESTANTS = [
    _loop("aiokafka, one record at a time", "one_at_a_time"),
    _loop(AWAITED, "awaited"),
    _loop("aiokafka, batches, commit in background", "background"),
    _loop("aiokafka, bulk", "bulk"),
    _loop(OVERLAPPED, "bulk", "--overlapped"),
    _loop(FASTSTREAM, "faststream_app", family="framework"),
    _loop(QUIX, "quix_app", family="framework"),
    FUSED_CONTESTANT,
    headrace_as("Headrace, exactly once", delivery="exactly_once"),
    headrace_as(TRACED, traced=True),
    THREE_CONTESTANT,
    headrace_as(THREE_ONCE, "ingest", "batcher,executor", "responder", delivery="exactly_once"),
    headrace_as(FOUR, "ingest", "batcher", "executor", "responder"),
]
COMPUTING = [
    FUSED_CONTESTANT._replace(name=LEARNING, vary=BenchmarkModel.learning, settle_s=15.0),
    FUSED_CONTESTANT._replace(name=FUSED + ALL_CORES, vary=BenchmarkModel.with_all_cores),
]
"""Further contestants for models that take nearly all of the time."""
ENOUGH_FOR_SLOW_MODELS = {
    AWAITED,
    OVERLAPPED,
    FUSED,
    "Headrace, exactly once",
    THREE,
}
"""Contestants for slow models; the results of the others are like one of these."""
