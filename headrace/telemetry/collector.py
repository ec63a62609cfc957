"""The destination of traces: found once, in the settings and the standard `OTEL_*` variables.

The environment overrides the settings, as everywhere. Without either there is no tracing, and
OpenTelemetry is not even imported.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from headrace.config import Settings
from headrace.errors import ConfigurationError, describe_error
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.tracing import Tracing
from headrace.topics import STAGES, Stage
from headrace.tuning import TUNING, RuntimeTuning

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

HTTP = "http/protobuf"
GRPC = "grpc"

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Collector(NamedTuple):
    """The destination of traces.

    Attributes:
        endpoint: None if the exporter takes it from the environment.
        protocol: `http/protobuf` or `grpc`.
    """

    endpoint: str | None
    protocol: str


def find_collector(settings: Settings) -> Collector | None:
    """Return the collector; None if no traces are exported.

    Raises:
        ConfigurationError: the protocol is unknown, or the endpoint is no URL.
    """
    if _variable("OTEL_SDK_DISABLED").lower() == "true":
        return None
    if _variable("OTEL_TRACES_EXPORTER") == "none":
        return None
    protocol = next(filter(None, map(_variable, _PROTOCOLS)), HTTP)
    if protocol not in (HTTP, GRPC):
        raise ConfigurationError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL: expected {HTTP} or {GRPC}, got {protocol!r}"
        )
    if any(map(_variable, _ENDPOINTS)):
        return Collector(None, protocol)
    endpoint = settings.telemetry.otlp_endpoint
    if not endpoint:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"telemetry.otlp_endpoint: expected http://HOST:PORT or https://HOST:PORT, "
            f"got {endpoint!r}"
        )
    if protocol == HTTP:
        endpoint = f"{endpoint.rstrip('/')}/v1/traces"
    return Collector(endpoint, protocol)


@asynccontextmanager
async def open_tracing(
    settings: Settings,
    stages: Sequence[Stage],
    metrics: Metrics,
    tuning: RuntimeTuning = TUNING.runtime,
) -> AsyncIterator[Tracing | None]:
    """Provide tracing while the context lasts; None if no traces are exported.

    Leaving it sends the queued spans, and takes at most about two seconds.

    Raises:
        ConfigurationError: see `find_collector`, or an `OTEL_*` variable is wrong.
    """
    collector = find_collector(settings)
    if collector is None:
        yield None
        return
    from headrace.telemetry.trace_export import TraceExport

    export = TraceExport(
        _exporter(collector), service_name(stages), settings.namespace, metrics, tuning
    )
    try:
        yield Tracing(export.write, settings, metrics)
    finally:
        await asyncio.to_thread(export.close)


def service_name(stages: Sequence[Stage]) -> str:
    """Return `headrace`, with the stages' names appended unless the process has all of them.

    A process without a stage is a gateway alone.
    """
    if not stages:
        return "headrace-gateway"
    return "headrace" if tuple(stages) == STAGES else "-".join(("headrace", *stages))


def _exporter(collector: Collector) -> SpanExporter:
    """Return the SDK's exporter. Raises `ConfigurationError`: it cannot use a variable."""
    logging.getLogger("opentelemetry.util.re").addFilter(_hide_header)
    try:
        if collector.protocol == GRPC:
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as by_grpc

            return by_grpc.OTLPSpanExporter(endpoint=collector.endpoint)
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as by_http

        return by_http.OTLPSpanExporter(endpoint=collector.endpoint)
    except Exception as error:
        raise ConfigurationError(f"OTEL_EXPORTER_OTLP_*: {describe_error(error)}") from error


def _hide_header(line: logging.LogRecord) -> bool:
    """Leave out of the SDK's warning about a malformed header what it is: it may be a credential.

    Returns:
        True: the line is written.
    """
    line.args = ("(not shown)",)
    return True


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()
