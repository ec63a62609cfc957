"""`headrace gateway --workers`: processes that share ports, under load, with a real broker."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.config import Settings, make_settings
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics
from headrace.tools.local_kafka import LocalKafka
from tests.support.conditions import eventually
from tests.support.forked import HEADRACE
from tests.support.models import add_version, digits
from tests.support.processes import environment

HOST = "127.0.0.1"
CALLERS = 8
PIXELS = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": [1.0] * 64}


class Workers:
    """`headrace gateway --workers 2`, and what it has logged."""

    def __init__(self, process: asyncio.subprocess.Process, output: Path) -> None:
        self.process = process
        self._output = output

    def logged(self, event: str, field: str) -> list[Any]:
        """The values of a field in all lines with an event that have it."""
        lines = [json.loads(line) for line in self._output.read_text().splitlines()]
        return [line[field] for line in lines if line["event"] == event and field in line]

    @property
    def http_ports(self) -> list[int]:
        return self.logged("gateway.listening", "http_port")

    @property
    def page_ports(self) -> list[int]:
        return self.logged("process.starting", "http_port")

    def readies(self) -> int:
        """How often a worker got ready."""
        return len(self.logged("process.ready", "stages"))


@pytest.fixture
def settings(kafka: LocalKafka, unique_name: str, tmp_path: Path) -> Settings:
    models = tmp_path / "models"
    models.mkdir()
    add_version(models, "digits", 1, digits())
    return make_settings(
        {
            "namespace": unique_name,
            "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
            "models": {"repository": str(models)},
        }
    )


@asynccontextmanager
async def two_workers(settings: Settings, tmp_path: Path) -> AsyncIterator[Workers]:
    """Start them, and wait until both are ready."""
    assert settings.kafka is not None
    variables = environment(
        settings.kafka.bootstrap_servers,
        settings.namespace,
        tmp_path / "models",
        GATEWAY__HTTP_PORT="0",
        GATEWAY__GRPC_PORT="0",
        TELEMETRY__HTTP_PORT="0",
    )
    others = {name: value for name, value in os.environ.items() if "HEADRACE" not in name}
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(HEADRACE, "gateway", "--workers", "2"),
            env=others | variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    workers = Workers(process, output)
    try:
        await eventually(lambda: workers.readies() == 2, recheck_s=0.05, what="two workers")
        yield workers
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


class Load:
    """Callers that send one request after another, each second one on a connection of its own.

    Attributes:
        ended: number of requests by how they ended; `refused` ones were never begun, and neither
            were those on a new connection that was `reset`.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://{HOST}:{port}/v2/models/digits/infer"
        self._is_over = False
        self.ended: Counter[str] = Counter()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send while the context lasts."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(CALLERS):
                tasks.create_task(self._send(force_close=bool(number % 2)))
            try:
                yield
            finally:
                self._is_over = True

    async def _send(self, *, force_close: bool) -> None:
        connector = aiohttp.TCPConnector(force_close=force_close)
        async with aiohttp.ClientSession(connector=connector) as http:
            while not self._is_over:
                try:
                    async with http.post(self._url, json={"inputs": [PIXELS]}) as response:
                        await response.read()
                        self.ended[str(response.status)] += 1
                except aiohttp.ClientConnectorError as error:
                    kind = type(error.os_error).__name__
                    self.ended["refused" if kind == "ConnectionRefusedError" else kind] += 1
                    return
                except aiohttp.ClientError as error:
                    is_reset = isinstance(error, OSError) and error.errno == errno.ECONNRESET
                    self.ended["reset" if is_reset and force_close else repr(error)] += 1


async def answered(port: int) -> float:
    """The requests that a worker has answered, by its own metrics."""
    async with aiohttp.ClientSession() as http, http.get(f"http://{HOST}:{port}/metrics") as page:
        lines = (await page.text()).splitlines()
    found = [
        line for line in lines if line.startswith('headrace_gateway_requests_total{door="http"')
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


async def test_workers_share_ports_and_end_without_loss(settings: Settings, tmp_path: Path) -> None:
    """Both answer; one that is stopped drains, and another takes its place; then all drain."""
    async with open_log(settings) as log:
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        async with running(Pipeline(settings, log)), two_workers(settings, tmp_path) as workers:
            (port,) = set(workers.http_ports)
            (grpc_port,) = set(workers.logged("gateway.listening", "grpc_port"))
            load = Load(port)
            async with load.running():
                for page_port in workers.page_ports:

                    async def has_answered(page_port: int = page_port) -> bool:
                        return await answered(page_port) > 100

                    await eventually(has_answered, recheck_s=0.1)
                os.kill(workers.logged("worker.started", "pid")[0], signal.SIGTERM)
                await eventually(lambda: workers.readies() == 3, recheck_s=0.05)
                rolled = dict(load.ended)
                async with grpc.aio.insecure_channel(f"{HOST}:{grpc_port}") as channel:
                    check: Any = health_pb2_grpc.HealthStub(channel).Check
                    health = await check(health_pb2.HealthCheckRequest())
                workers.process.terminate()
                code = await workers.process.wait()
            exits = workers.logged("worker.ended", "exit_code")

    # Linux resets a connection that is being made in the instant in which a socket stops listening,
    # unless `net.ipv4.tcp_migrate_req` is 1: at most one of each caller that makes a new one.
    assert rolled.pop("reset", 0) <= CALLERS // 2
    assert list(rolled) == ["200"]
    assert set(load.ended) - {"reset"} == {"200", "refused"}
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert (code, exits) == (0, [0, 0, 0])
