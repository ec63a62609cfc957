"""Spans by OTLP over HTTP, by the SDK's exporter: endpoint, headers, TLS, compression, retries."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from headrace.telemetry.otlp import request_of


class HttpExporter(OTLPSpanExporter):
    """The SDK's, for spans that are encoded already.

    It encodes in the middle of `export` and has no hook there, so what follows the encoding is
    asked for by its own name, which the tests of the collector do over a real connection.
    """

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send `EncodedSpan`s; after `shutdown` nothing."""
        if not self._shutdown and self._client.export(request_of(spans)).success:
            return SpanExportResult.SUCCESS
        return SpanExportResult.FAILURE
