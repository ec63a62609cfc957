"""A real Jaeger, in memory, on ports of its own."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp

from headrace.tools.local_kafka.broker import free_port
from tests.support.conditions import eventually

HOST = "127.0.0.1"

SERVERS = (
    "--collector.otlp.http.host-port",
    "--collector.otlp.grpc.host-port",
    "--query.http-server.host-port",
    "--query.grpc-server.host-port",
    "--collector.grpc-server.host-port",
    "--collector.http-server.host-port",
    "--admin.http.host-port",
)


class Found(NamedTuple):
    """A span as the query API gives it.

    Attributes:
        ids: of its trace and its own, in hexadecimal.
        parent: the same of its parent, in its own trace.
        links: the same of those that it points to besides.
        start_us, duration_us: epoch microseconds, microseconds.
    """

    service: str
    name: str
    ids: tuple[str, str]
    parent: tuple[str, str] | None
    links: list[tuple[str, str]]
    start_us: int
    duration_us: int
    tags: dict[str, Any]


class Jaeger:
    """Entered when it answers; left when it has ended.

    Attributes:
        otlp_endpoint, grpc_endpoint: where it takes spans, by HTTP and by gRPC.
    """

    def __init__(self, program: Path) -> None:
        ports: list[int] = []
        for _ in SERVERS:
            ports.append(free_port(ports, HOST))
        self.otlp_endpoint = f"http://{HOST}:{ports[0]}"
        self.grpc_endpoint = f"http://{HOST}:{ports[1]}"
        self._query = f"http://{HOST}:{ports[2]}"
        self._command = [
            str(program),
            *(f"{name}={HOST}:{port}" for name, port in zip(SERVERS, ports, strict=True)),
        ]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __aexit__
        self._process: asyncio.subprocess.Process
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output
        )
        self._session = aiohttp.ClientSession(self._query)
        await eventually(self._answers, what="Jaeger answers")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        if self._process.returncode is None:
            # It has nothing to save, and would take ten seconds to end by itself.
            self._process.kill()
        await self._process.wait()
        self._output.close()

    async def _answers(self) -> bool:
        assert self._process.returncode is None, f"Jaeger ended: {self._process.returncode}"
        try:
            async with self._session.get("/api/services") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def trace(self, trace_id: str) -> list[Found]:
        """The spans of a trace, by their start; none if it is not there (yet)."""
        async with self._session.get(f"/api/traces/{trace_id}") as response:
            if response.status == 404:
                return []
            found = (await response.json())["data"]
        spans = [_found(span, each["processes"]) for each in found for span in each["spans"]]
        return sorted(spans, key=lambda span: span.start_us)


def _found(span: dict[str, Any], processes: dict[str, Any]) -> Found:
    points_to = [
        (one["refType"], (one["traceID"], one["spanID"])) for one in span.get("references", [])
    ]
    parents = [ids for kind, ids in points_to if kind == "CHILD_OF"]
    return Found(
        service=processes[span["processID"]]["serviceName"],
        name=span["operationName"],
        ids=(span["traceID"], span["spanID"]),
        parent=parents[0] if parents else None,
        links=[ids for kind, ids in points_to if kind == "FOLLOWS_FROM"],
        start_us=span["startTime"],
        duration_us=span["duration"],
        tags={tag["key"]: tag["value"] for tag in span["tags"]},
    )
