"""What a request costs the event loop's thread to trace: the calls that the stages make, alone.

    python -m benchmarks.tracing_calls

Batches of 32 go past all points where spans are made, with one sampled request in each, and with
none; the difference is that request's. Spans are encoded and queued, and not sent. By the
processor time of the thread, the best of many rounds, so that it can be told on a busy machine.
"""

from __future__ import annotations

import gc
import os
import time
from typing import cast

from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from headrace.config import make_settings
from headrace.log.port import TopicPartition
from headrace.protocol.ack import Receipt
from headrace.protocol.headers import parse_envelope
from headrace.protocol.messages import Batch, Request
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.span_attributes import Answering, Run
from headrace.telemetry.trace_export import TraceExport
from headrace.telemetry.tracing import Tracing

BATCHES = 150
ROWS = 32
ROUNDS = 25
T = 1_700_000_000_000_000
NEVER = {
    OTEL_BSP_MAX_QUEUE_SIZE: "1000000",
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE: "1000000",
    OTEL_BSP_SCHEDULE_DELAY: "600000",
}
"""By which nothing is sent while it is measured."""


_OWES_NOTHING = cast(Receipt, None)  # nobody settles it


def _request(offset: int, traceparent: bytes | None) -> Request:
    headers = [] if traceparent is None else [("traceparent", traceparent)]
    envelope = parse_envelope(headers, T // 1000, 0)
    origin = (3, offset, offset - 1, T // 1000)
    request = Request(_OWES_NOTHING, *origin, b"key", bytes(300), headers, envelope)
    request.model, request.version, request.ingested_us = "digits", "1", T + 500
    return request


def _batches(*, sampled: bool) -> list[list[Request]]:
    """With one sampled request in each, or none."""
    found = []
    for number in range(1, BATCHES + 1):
        chosen = f"00-{number:032x}-{number:016x}-01".encode() if sampled else None
        offsets = range(number * ROWS, (number + 1) * ROWS)
        found.append([_request(one, None if one % ROWS else chosen) for one in offsets])
    return found


def _pass_through(tracing: Tracing, batches: list[list[Request]]) -> None:
    times = Answering(T + 3200, T + 3300, T + 4000, T + 4100)
    for requests in batches:
        tracing.ingested(requests, T + 1000)
        batch = Batch("7", requests, "full")
        tracing.formed(batch, T + 2000)
        tracing.ran(Run(batch, requests, T + 2100, T + 2200, T + 3000, 700, 1))
        tracing.executed("7", requests, T + 3100)
        tracing.answered(requests, TopicPartition("headrace.responses", 2), times)


def _taken_us(tracing: Tracing, *, sampled: bool) -> float:
    batches = _batches(sampled=sampled)
    gc.collect()
    gc.disable()
    began_ns = time.thread_time_ns()
    _pass_through(tracing, batches)
    taken_ns = time.thread_time_ns() - began_ns
    gc.enable()
    return taken_ns / 1000


def main() -> None:
    """Measure and print."""
    os.environ.update(NEVER)
    metrics = Metrics(CollectorRegistry())
    export = TraceExport(InMemorySpanExporter(), "headrace", "headrace", metrics)
    settings = make_settings({"telemetry": {"sample_ratio": 0.0}})
    tracing = Tracing(export.write, settings, metrics)
    pairs = [
        (_taken_us(tracing, sampled=False), _taken_us(tracing, sampled=True)) for _ in range(ROUNDS)
    ]
    without_us, with_us = map(min, zip(*pairs, strict=True))
    print(f"not sampled: {without_us / BATCHES / ROWS:.2f} us a request")
    print(f"sampled: {(with_us - without_us) / BATCHES:.1f} us a request besides")
    export.close()


if __name__ == "__main__":
    main()
