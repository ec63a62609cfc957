"""Spans on a real connection: what a collector gets by each protocol."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from prometheus_client import CollectorRegistry

from headrace.config import make_settings
from headrace.telemetry.collector import open_tracing
from headrace.telemetry.metrics import Metrics
from headrace.topics import STAGES
from tests.support.spans import make_traced, pass_through, traceparent
from tests.support.tuning import UNHURRIED_EXPORT

NAMES = [
    "process headrace.requests",
    "process batcher",
    "run digits",
    "process executor",
    "send headrace.responses",
    "process responder",
]


class Received:
    """Spans that came, and the headers that they were sent with."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.headers: dict[str, str] = {}

    def names(self) -> list[str]:
        """Return the names of the spans, in their order."""
        return [
            span.name
            for body in self.requests
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]


@pytest.fixture
def http() -> Iterator[tuple[str, Received]]:
    """A collector that takes OTLP over HTTP, and its address."""
    received = Received()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.headers = {name.lower(): value for name, value in self.headers.items()}
            is_gzip = received.headers.get("content-encoding") == "gzip"
            received.requests.append(gzip.decompress(body) if is_gzip else body)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        serving = threading.Thread(target=server.serve_forever, name="collector")
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        serving.join()


@pytest.fixture
def rpc() -> Iterator[tuple[str, Received]]:
    """The same over gRPC."""
    received = Received()

    class Collector(TraceServiceServicer):
        def Export(
            self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
        ) -> ExportTraceServiceResponse:
            received.requests.append(request.SerializeToString())
            received.headers = {
                str(name): str(text) for name, text in context.invocation_metadata()
            }
            return ExportTraceServiceResponse()

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]  # generated
            Collector(), server
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"http://127.0.0.1:{port}", received
        server.stop(None).wait()


async def _trace_one(endpoint: str) -> Metrics:
    settings = make_settings({"telemetry": {"otlp_endpoint": endpoint}})
    metrics = Metrics(CollectorRegistry())
    async with open_tracing(settings, STAGES, metrics, UNHURRIED_EXPORT) as tracing:
        assert tracing is not None
        pass_through(tracing, make_traced(traceparent()))
    return metrics


@pytest.mark.parametrize("compression", ["", "gzip"])
async def test_collector_reads_spans_over_http(
    http: tuple[str, Received], monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    """All of them, with the headers and the compression that the environment asks for."""
    endpoint, received = http
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression or "none")
    metrics = await _trace_one(endpoint)

    assert received.names() == NAMES
    assert received.headers["x-api-key"] == "secret"
    assert received.headers.get("content-encoding", "") == compression
    assert metrics.registry.get_sample_value("headrace_trace_spans_total") == len(NAMES)


async def test_collector_reads_spans_over_grpc(
    rpc: tuple[str, Received], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, with the headers that the environment asks for."""
    endpoint, received = rpc
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=secret")
    metrics = await _trace_one(endpoint)

    assert received.names() == NAMES
    assert received.headers["x-api-key"] == "secret"
    assert metrics.registry.get_sample_value("headrace_trace_spans_total") == len(NAMES)
