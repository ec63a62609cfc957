"""Spans, kept in memory, and a request's way past the points where they are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from prometheus_client import CollectorRegistry

from headrace.config import Settings, make_settings
from headrace.log.port import TopicPartition
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.headers import answer_headers, parse_envelope
from headrace.protocol.messages import Batch, BatchSummary, Failure, Request
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.span_attributes import Answering, ModelRun
from headrace.telemetry.trace_export import TraceExport
from headrace.telemetry.tracing import Tracing
from headrace.topics import Stage
from tests.support.tuning import UNHURRIED_EXPORT

T = 1_700_000_000_000_000
"""When the record was written; epoch microseconds."""

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
CALLER = 0xB7AD6B7169203331
RESPONSES = TopicPartition("headrace.responses", 2)


def traceparent(flags: str = "01") -> bytes:
    """The header of a caller with a trace of its own."""
    return f"00-{TRACE_ID:032x}-{CALLER:016x}-{flags}".encode()


class Spans:
    """The exported spans; complete when `tracing_spans` is left."""

    def __init__(self) -> None:
        self.all: tuple[ReadableSpan, ...] = ()

    def of(self, role: str) -> list[ReadableSpan]:
        """Return the spans of one role, see `role_of`, in the order of creation."""
        return [span for span in self.all if role_of(span) == role]

    def of_requests(self) -> list[ReadableSpan]:
        """Return those of requests and their batches: all but those of changes of models."""
        return [span for span in self.all if "headrace.change" not in (span.attributes or {})]

    def one(self, role: str) -> ReadableSpan:
        """The only one."""
        (span,) = self.of(role)
        return span


def role_of(span: ReadableSpan) -> str:
    """Return the name that `docs/tracing.md` gives a span."""
    if span.kind is SpanKind.PRODUCER:
        return "send"
    if span.kind is SpanKind.SERVER:
        return "server"
    attributes = span.attributes or {}
    return str(attributes.get("headrace.change") or attributes.get("headrace.stage", "run"))


def id_of(span: ReadableSpan) -> tuple[int, int]:
    """Its trace and its own id."""
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    """The same of its parent."""
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def answer_traceparent(request: Request) -> str:
    """Return the trace header of the answer."""
    headers = answer_headers(request, "ok", "headrace.requests")
    return dict(headers)["traceparent"].decode()


def tracing_settings(ratio: float = 1.0, **rates: float) -> Settings:
    """Settings by which a root is sampled in this share of cases, without a limit unless given."""
    unlimited = dict.fromkeys(
        ("traces_per_second", "caller_traces_per_second", "failure_traces_per_second"), 1e6
    )
    return make_settings({"telemetry": {"sample_ratio": ratio, **unlimited, **rates}})


@contextmanager
def tracing_spans(
    settings: Settings | None = None, metrics: Metrics | None = None
) -> Iterator[tuple[Tracing, Spans]]:
    """Tracing into memory; the spans are there when the context is left."""
    exporter, spans = InMemorySpanExporter(), Spans()
    metrics = metrics or Metrics(CollectorRegistry())
    export = TraceExport(exporter, "headrace", "headrace", metrics, UNHURRIED_EXPORT)
    try:
        yield Tracing(export.write, settings or tracing_settings(), metrics), spans
    finally:
        export.close()
        spans.all = exporter.get_finished_spans()


def split(tracing: Tracing) -> None:
    """Let each stage read a topic, as where all of them are apart."""
    for stage, topic in zip(Stage, ("requests", "items", "batches", "results"), strict=True):
        tracing.reads(stage, f"headrace.{topic}", f"headrace.{stage}")


def make_traced(
    header: bytes | None = None, *, offset: int = 41, deadline_ms: int = 0, id: str | None = "a"
) -> Request:
    """A request that ingest has read, 500 microseconds after its record was written."""
    headers: list[tuple[str, bytes | None]] = [("kafka_correlationId", b"\xff\x01")]
    if header is not None:
        headers.append(("traceparent", header))
    if deadline_ms:
        headers.append(("x-deadline-ms", str(deadline_ms).encode()))
    envelope = parse_envelope(headers, T // 1000, 0)
    origin = (3, offset, offset - 1, T // 1000)
    request = Request(NULL_ACK, *origin, b"key", b"value", headers, envelope)
    request.id, request.model, request.version = id, "digits", "1"
    request.ingested_us = T + 500
    return request


def make_run(
    requests: list[Request], batch_id: str = "7", failure: Failure | None = None
) -> ModelRun:
    """A run of 900 microseconds, of which the model took 700."""
    return ModelRun(
        Batch(batch_id, requests, "full"),
        requests,
        began_us=T + 2100,
        gathered_us=T + 2200,
        ended_us=T + 3000,
        compute_us=700,
        attempts=1,
        failure=failure,
    )


def form(tracing: Tracing, requests: Sequence[Request]) -> None:
    """Pass requests through ingest and the batcher."""
    tracing.ingested(requests, T + 1000)
    for request in requests:
        request.batch = BatchSummary(T + 2000)
    tracing.formed(Batch("7", list(requests), "full"), T + 2000)


def run(tracing: Tracing, requests: Sequence[Request], failure: Failure | None = None) -> None:
    """Pass requests through the executor."""
    tracing.ran(make_run(list(requests), failure=failure))
    for request in requests:
        request.batch = BatchSummary(request.batch.formed_us, compute_us=700, rows=len(requests))
        if failure is not None:
            request.fail(failure)
    tracing.executed("7", requests, T + 3100)


def answer(tracing: Tracing, requests: Sequence[Request], to: TopicPartition = RESPONSES) -> None:
    """Pass requests through the responder."""
    for request in requests:
        if request.failure is not None:
            tracing.keep(request, T + 3200)
    tracing.answered(requests, to, Answering(T + 3200, T + 3300, T + 4000, T + 4100))


def pass_through(tracing: Tracing, *requests: Request) -> None:
    """All stages, without a fault."""
    form(tracing, requests)
    run(tracing, requests)
    answer(tracing, requests)
