"""The destination of traces; without one, nothing of OpenTelemetry's export is loaded."""

from __future__ import annotations

import io
import logging
import socket
import subprocess
import sys

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from headrace.config import Settings, make_settings
from headrace.errors import ConfigurationError
from headrace.telemetry.collector import Collector, find_collector, open_tracing, service_name
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.topics import STAGES, Stage
from tests.support.spans import make_traced, pass_through, traceparent
from tests.support.tuning import UNHURRIED_EXPORT

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test sets."""
    for name in ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", ENDPOINT, PROTOCOL):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.replace("OTLP_", "OTLP_TRACES_"), raising=False)


def _settings(endpoint: str) -> Settings:
    return make_settings({"telemetry": {"otlp_endpoint": endpoint, "sample_ratio": 1.0}})


@pytest.mark.parametrize(
    ("endpoint", "variables", "expected"),
    [
        ("", {}, None),
        ("http://c:4318", {}, Collector("http://c:4318/v1/traces", "http/protobuf")),
        ("http://c:4318/", {}, Collector("http://c:4318/v1/traces", "http/protobuf")),
        ("http://c:4317", {PROTOCOL: "grpc"}, Collector("http://c:4317", "grpc")),
        ("", {ENDPOINT: "http://d:4318"}, Collector(None, "http/protobuf")),
        ("http://c:4318", {ENDPOINT: "http://d:4318"}, Collector(None, "http/protobuf")),
        (
            "",
            {
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://d:4317",
                PROTOCOL: "http/protobuf",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
            },
            Collector(None, "grpc"),
        ),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "true"}, None),
        ("http://c:4318", {"OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_collector_of_environment_is_used(
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
    variables: dict[str, str],
    expected: Collector | None,
) -> None:
    """The standard variables precede the setting; with neither there is no collector."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert find_collector(_settings(endpoint)) == expected


def test_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what was expected."""
    monkeypatch.setenv(PROTOCOL, "http/json")
    with pytest.raises(ConfigurationError, match=r"expected http/protobuf or grpc, got 'http/json"):
        find_collector(_settings("http://c:4318"))


def test_endpoint_that_is_no_url_is_refused() -> None:
    """Instead of spans that go nowhere."""
    with pytest.raises(ConfigurationError, match=r"telemetry\.otlp_endpoint: expected http://"):
        find_collector(_settings("jaeger:4318"))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
    ],
)
async def test_variable_that_exporter_cannot_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """The one for gRPC raises what it likes."""
    monkeypatch.setenv(PROTOCOL, "grpc")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=rf"OTEL_EXPORTER_OTLP_\*: .*{value}"):
        async with open_tracing(_settings("http://c:4317"), STAGES, Metrics(CollectorRegistry())):
            pass


async def test_malformed_header_for_collector_is_not_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be most of a token."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Bearer sesame")
    logger, written = logging.getLogger("opentelemetry.util.re"), io.StringIO()
    handler = logging.StreamHandler(written)
    logger.addHandler(handler)
    try:
        metrics = Metrics(CollectorRegistry())
        async with open_tracing(_settings("http://c:4318"), STAGES, metrics):
            pass
    finally:
        logger.removeHandler(handler)

    assert "Header format invalid" in written.getvalue()
    assert "sesame" not in written.getvalue()


def test_service_name_lists_stages() -> None:
    """A process with all stages has the plain name; one without any is a gateway."""
    assert service_name(STAGES) == "headrace"
    assert service_name([Stage.BATCHER, Stage.EXECUTOR]) == "headrace-batcher-executor"
    assert service_name([]) == "headrace-gateway"


async def test_tracing_without_endpoint_is_off() -> None:
    """The stages get None."""
    async with open_tracing(_settings(""), STAGES, Metrics(CollectorRegistry())) as tracing:
        assert tracing is None


def test_opentelemetry_is_not_imported_without_tracing() -> None:
    """The composition root and all stages are imported without it."""
    code = (
        "import sys, headrace.runtime.process; "
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'grpc'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_unreachable_collector_costs_count_and_log_line(
    monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Nobody listens there: the end breaks off the retries, and the spans are counted as lost."""
    monkeypatch.setenv(PROTOCOL, protocol)
    metrics = Metrics(CollectorRegistry())
    tuning = replace(UNHURRIED_EXPORT, trace_close_timeout_s=0.5)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        settings = _settings(f"http://127.0.0.1:{unused.getsockname()[1]}")
        with capture_logs() as lines:
            async with open_tracing(settings, STAGES, metrics, tuning) as tracing:
                assert tracing is not None
                pass_through(tracing, make_traced(traceparent()))

    assert metrics.registry.get_sample_value("headrace_trace_spans_dropped_total") == 6
    assert [line["event"] for line in lines] == [Event.TRACE_EXPORT_FAILED]
