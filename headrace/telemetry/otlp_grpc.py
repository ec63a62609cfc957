"""Spans by OTLP over gRPC, by the SDK's exporter: endpoint, headers, TLS, compression, retries."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan

from headrace.telemetry.otlp import request_of


class GrpcExporter(OTLPSpanExporter):
    """The SDK's, for spans that are encoded already. Its stub takes a message and no bytes, so
    these are parsed, in C, and encoded again.
    """

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        message = ExportTraceServiceRequest()
        message.ParseFromString(request_of(data))
        return message
