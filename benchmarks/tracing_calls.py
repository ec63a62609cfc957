"""CPU cost of tracing per request: the calls made by the stages, and the encoding.

    python -m benchmarks.tracing_calls

Batches of 32 go past all points where spans are made: with no sampled request, with one in each,
and with all of them sampled by their callers, which are over the rate. Spans are queued and not
sent; encoding them is measured apart. It is the processor time of the thread, the best of many
rounds, so that a busy machine changes it little.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence

from msgspec.structs import replace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from headrace.config import make_settings
from headrace.log.port import TopicPartition
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.headers import parse_envelope
from headrace.protocol.messages import Batch, Request
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.span_attributes import Answering, ModelRun
from headrace.telemetry.trace_export import TraceExport
from headrace.telemetry.tracing import Tracing
from headrace.tuning import TUNING

BATCHES = 150
ROWS = 32
ROUNDS = 25
T = 1_700_000_000_000_000
NEVER = {
    OTEL_BSP_MAX_QUEUE_SIZE: "1000000",
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE: "1000000",
    OTEL_BSP_SCHEDULE_DELAY: "600000",
}
"""Settings of the exporter with which nothing is sent during the measurement."""


def _request(offset: int, traceparent: bytes | None) -> Request:
    headers = [] if traceparent is None else [("traceparent", traceparent)]
    envelope = parse_envelope(headers, T // 1000, 0)
    origin = (3, offset, offset - 1, T // 1000)
    request = Request(NULL_ACK, *origin, b"key", bytes(300), headers, envelope)
    request.model, request.version, request.ingested_us = "digits", "1", T + 500
    return request


def _batches(sampled: int) -> list[list[Request]]:
    """Return batches with `sampled` requests each that are sampled by their callers."""
    found = []
    for number in range(1, BATCHES + 1):
        chosen = f"00-{number:032x}-{number:016x}-01".encode()
        offsets = range(number * ROWS, (number + 1) * ROWS)
        found.append([_request(one, chosen if one % ROWS < sampled else None) for one in offsets])
    return found


def _pass_through(tracing: Tracing, batches: list[list[Request]]) -> None:
    times = Answering(T + 3200, T + 3300, T + 4000, T + 4100)
    for requests in batches:
        tracing.ingested(requests, T + 1000)
        batch = Batch("7", requests, "full")
        tracing.formed(batch, T + 2000)
        tracing.ran(ModelRun(batch, requests, T + 2100, T + 2200, T + 3000, 700, 1))
        tracing.executed("7", requests, T + 3100)
        tracing.answered(requests, TopicPartition("headrace.responses", 2), times)


def _taken_us(tracing: Tracing, sampled: int) -> float:
    batches = _batches(sampled)
    gc.collect()
    gc.disable()
    began_ns = time.thread_time_ns()
    _pass_through(tracing, batches)
    taken_ns = time.thread_time_ns() - began_ns
    gc.enable()
    return taken_ns / 1000


def _encoded_us(spans: Sequence[ReadableSpan]) -> float:
    began_ns = time.thread_time_ns()
    encode_spans(spans).SerializeToString()
    return (time.thread_time_ns() - began_ns) / 1000


def _tracing(export: TraceExport, metrics: Metrics, callers_per_second: float) -> Tracing:
    rates = {"sample_ratio": 0.0, "caller_traces_per_second": callers_per_second}
    return Tracing(export.write, make_settings({"telemetry": rates}), metrics)


def main() -> None:
    """Measure, and print the results."""
    os.environ.update(NEVER)
    metrics, exporter = Metrics(CollectorRegistry()), InMemorySpanExporter()
    tuning = replace(TUNING.runtime, trace_close_timeout_s=60.0)
    export = TraceExport(exporter, "headrace", "headrace", metrics, tuning)
    unlimited, limited = (_tracing(export, metrics, rate) for rate in (1e6, 0.0))
    rounds = [
        (_taken_us(unlimited, 0), _taken_us(unlimited, 1), _taken_us(limited, ROWS))
        for _ in range(ROUNDS)
    ]
    none_us, one_us, all_us = map(min, zip(*rounds, strict=True))
    export.close()
    spans = exporter.get_finished_spans()[: 6 * BATCHES]
    encoded_us = min(_encoded_us(spans) for _ in range(ROUNDS))
    print(f"not sampled: {none_us / BATCHES / ROWS:.2f} us a request")
    print(f"sampled by its caller, over the rate: {all_us / BATCHES / ROWS:.2f} us a request")
    print(f"sampled: {(one_us - none_us) / BATCHES:.1f} us a request besides")
    print(f"encoding its spans: {encoded_us / BATCHES:.1f} us a request, on the exporting thread")


if __name__ == "__main__":
    main()
