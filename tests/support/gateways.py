"""A gateway in front of the stages, on one embedded log, and clients of both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from aiohttp import ClientSession
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from headrace.client import Client
from headrace.config import Settings, make_settings
from headrace.gateway import open_gateway
from headrace.gateway.doors import Doors
from headrace.log.port import Log, Record, TopicPartition
from headrace.protocol.tensors import DATATYPES
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.tracing import Tracing
from headrace.topics import STAGES, Stage, Topic
from headrace.tuning import TUNING, GatewayTuning, Tuning
from tests.support.conditions import eventually
from tests.support.models import add_version, identity
from tests.support.tuning import EAGER

HOST = "127.0.0.1"
QUICK_CHANGES = replace(
    EAGER,
    control=replace(EAGER.control, listen_s=0.6),
    transport=replace(EAGER.transport, heartbeat_s=0.1),
)
"""A process is heard soon, so that a change of its models is answered soon."""


class Reply(NamedTuple):
    """An answer over HTTP."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The JSON of the answer, without the tensors that follow it."""
        return msgspec.json.decode(self.body[: self.json_bytes])

    @property
    def tensors(self) -> bytes:
        """Return the binary tensors behind the JSON."""
        return self.body[self.json_bytes :]

    @property
    def json_bytes(self) -> int:
        return int(self.headers.get("Inference-Header-Content-Length", len(self.body)))


class Served(NamedTuple):
    """A gateway, the stages behind it, and a client of each kind."""

    settings: Settings
    log: Log
    doors: Doors
    pipeline: Pipeline
    http: ClientSession
    kafka: Client

    @property
    def grpc(self) -> str:
        """The address of the door for gRPC."""
        return f"{HOST}:{self.doors.ports['grpc']}"

    @property
    def url(self) -> str:
        return f"{HOST}:{self.doors.ports['http']}"

    async def infer(self, model: str, body: dict[str, Any], **options: Any) -> Reply:
        """Send a request in JSON, and read its answer."""
        return await self.post(f"/v2/models/{model}/infer", msgspec.json.encode(body), **options)

    async def post(self, path: str, body: bytes, **options: Any) -> Reply:
        """Send a body, and read its answer."""
        async with self.http.post(path, data=body, **options) as response:
            return Reply(response.status, response.headers, await response.read())

    async def get(self, path: str) -> Reply:
        """Read what is shown at a path."""
        async with self.http.get(path) as response:
            return Reply(response.status, response.headers, await response.read())

    def counted(self, status: int | str) -> float:
        """Number of requests that were answered with a status, of HTTP or of gRPC."""
        door = "http" if isinstance(status, int) else "grpc"
        labels = {"door": door, "status": str(status)}
        name = "headrace_gateway_requests_total"
        return self.pipeline.metrics.registry.get_sample_value(name, labels) or 0.0

    def waiting(self) -> int:
        """Number of requests in the batcher."""
        queue = self.pipeline.state.queue()
        return 0 if queue is None else queue.requests

    def ended(self, code: str) -> float:
        """Number of requests of the gated model that the stages ended with a code."""
        outcome = {"ok": "ok", "DEADLINE_EXCEEDED": "expired"}.get(code, "refused")
        labels = {"model": "gated", "version": "1", "outcome": outcome, "code": code}
        registry = self.pipeline.metrics.registry
        return registry.get_sample_value("headrace_requests_total", labels) or 0.0

    async def tenants(self) -> set[bytes | None]:
        """The tenants of the requests on the log."""
        topic = self.settings.topic(Topic.REQUESTS)
        info = (await self.log.describe_topics([topic]))[topic]
        assert info is not None
        records: list[Record] = []
        for number in range(info.partitions):
            records += await self.log.fetch(TopicPartition(topic, number), 0, 10, 1 << 20)
        return {dict(record.headers).get("x-tenant") for record in records}


@asynccontextmanager
async def gateway_of(
    repository: Path,
    stages: Sequence[Stage] = STAGES,
    tuning: GatewayTuning = TUNING.gateway,
    tracing: Tracing | None = None,
    telemetry: Mapping[str, float] | None = None,
    mode: str = "all",
    sections: Mapping[str, Any] | None = None,
    **gateway: Any,
) -> AsyncIterator[Served]:
    """Serve a repository behind a gateway while the context lasts; both drain when it is left.

    `sections` are those of the settings besides models, gateway and telemetry.
    """
    settings = make_settings(
        {
            "models": {
                "repository": str(repository),
                "mode": mode,
                "poll_interval_ms": 100,
                "trial_load": False,  # each takes a second; test_controlled_models.py has trials
            },
            "gateway": {"http_port": 0, "grpc_port": "off", **gateway},
            "telemetry": dict(telemetry or {}),
            **(sections or {}),
        }
    )
    async with (
        open_log(settings) as log,
        pipeline_with_doors(settings, log, stages, tuning, tracing) as (pipeline, doors),
        ClientSession(f"http://{HOST}:{doors.ports['http']}") as http,
        Client(log=log, settings=settings) as kafka,
    ):
        yield Served(settings, log, doors, pipeline, http, kafka)


@asynccontextmanager
async def pipeline_with_doors(
    settings: Settings,
    log: Log,
    stages: Sequence[Stage],
    tuning: GatewayTuning,
    tracing: Tracing | None = None,
    process_tuning: Tuning = QUICK_CHANGES,
) -> AsyncIterator[tuple[Pipeline, Doors]]:
    """Run stages and a gateway in one process, as `headrace run --gateway` does."""
    instruments = Instruments(Metrics(CollectorRegistry()), tracing)
    pipeline = Pipeline(settings, log, stages, instruments=instruments, tuning=process_tuning)
    models, health = pipeline.models.catalog, pipeline.health
    repository = pipeline.repository
    async with open_gateway(
        settings, log, models, health, instruments, repository, tuning
    ) as doors:
        pipeline.state.gateway = doors.snapshot
        pipeline.doors = doors
        async with running(pipeline):
            yield pipeline, doors


@asynccontextmanager
async def files_noticed(event: Event) -> AsyncIterator[None]:
    """Change files in the context; leaving it waits until a gateway has logged this of them."""
    with capture_logs() as logged:
        yield
        await eventually(lambda: any(each["event"] == event for each in logged), what=event)


def add_identities(repository: Path) -> None:
    """Add a model for each datatype, named after it, which returns what it gets."""
    for datatype in DATATYPES:
        add_version(repository, datatype, 1, identity(datatype), "probe = false")


def values_of(datatype: str) -> np.ndarray[Any, Any]:
    """Return two rows of two elements; of BYTES one element is empty."""
    if datatype == "BYTES":
        return np.array([[b"", "é".encode()], [b"a", b"b"]], dtype=object)
    return np.array([[0, 1], [1, 0]], DATATYPES[datatype].dtype)
