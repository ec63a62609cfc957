"""Traces in a real Jaeger: a producer's own, through four processes and a real Kafka."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry

from headrace.config import make_settings
from headrace.telemetry.collector import open_tracing
from headrace.telemetry.metrics import Metrics
from headrace.tools.local_kafka import LocalKafka
from headrace.topics import Stage
from tests.support.conditions import eventually
from tests.support.jaeger import Found, Jaeger
from tests.support.processes import Process, create_topics, environment
from tests.support.spans import TRACE_ID, make_traced, pass_through, traceparent

DEMO = Path(__file__).parents[2] / "headrace" / "tools" / "demo"
STAGES = ("ingest", "batcher", "executor", "responder")
REQUESTS = 100
PARTITIONS = 4
SPANS = 6
"""In each trace: the producer's, one for each stage, and the one that sends the answer."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class Asked(NamedTuple):
    """One request: its producer's span, and when its record was written."""

    trace_id: str
    span_id: str
    timestamp_ms: int


@pytest.fixture
async def jaeger(jaeger_program: Path) -> AsyncIterator[Jaeger]:
    """One that has no traces yet."""
    async with Jaeger(jaeger_program) as running:
        yield running


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """The digits, in batches that wait long enough for several requests to share one."""
    shutil.copytree(DEMO / "models" / "digits", tmp_path / "digits")
    (tmp_path / "digits" / "model.toml").write_text("max_queue_delay_ms = 200\n")
    return tmp_path


async def _ask(bootstrap_servers: str, topic: str, tracer: Tracer) -> list[Asked]:
    """Send the requests one after the other, each in a trace of its own."""
    tensor = {"name": "pixels", "datatype": "FP32", "shape": [1, 64]}
    value: bytes = msgpack.packb(
        {"model_name": "digits", "inputs": [{**tensor, "data": bytes(256)}]}
    )
    asked = []
    async with AIOKafkaProducer(bootstrap_servers=bootstrap_servers) as producer:
        await producer.partitions_for(topic)
        for number in range(REQUESTS):
            span = tracer.start_span(f"send {topic}", kind=SpanKind.PRODUCER)
            carrier: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
            timestamp_ms = time.time_ns() // 1_000_000
            await producer.send_and_wait(
                topic,
                value,
                partition=number % PARTITIONS,
                timestamp_ms=timestamp_ms,
                headers=[
                    ("traceparent", carrier["traceparent"].encode()),
                    ("number", str(number).encode()),
                ],
            )
            span.end()
            context = span.get_span_context()
            asked.append(Asked(f"{context.trace_id:032x}", f"{context.span_id:016x}", timestamp_ms))
    return asked


async def _answered_ms(bootstrap_servers: str, topic: str) -> dict[int, float]:
    """Return the time of each answer, in epoch milliseconds."""
    arrived: dict[int, float] = {}
    async with (
        asyncio.timeout(60),
        AIOKafkaConsumer(
            bootstrap_servers=bootstrap_servers, auto_offset_reset="earliest"
        ) as consumer,
    ):
        consumer.assign([TopicPartition(topic, number) for number in range(PARTITIONS)])
        while len(arrived) < REQUESTS:
            polled = await consumer.getmany(timeout_ms=200)
            now_ms = time.time_ns() / 1e6
            for record in itertools.chain.from_iterable(polled.values()):
                headers = dict(record.headers)
                assert headers["x-status"] == b"ok"
                arrived[int(headers["number"])] = now_ms
    return arrived


@pytest.fixture
async def journey(
    kafka: LocalKafka, unique_name: str, models: Path, jaeger: Jaeger
) -> tuple[list[Asked], dict[int, float], list[list[Found]]]:
    """Return the requests sent, when each was answered, and the trace of each in Jaeger."""
    settings = environment(
        kafka.bootstrap_servers,
        unique_name,
        models,
        TELEMETRY__OTLP_ENDPOINT=jaeger.otlp_endpoint,
        TELEMETRY__SAMPLE_RATIO="0",  # the producer decides
        TELEMETRY__CALLER_TRACES_PER_SECOND=str(REQUESTS),
    )
    await create_topics(settings)
    provider = TracerProvider(
        resource=Resource({"service.name": "producer"}), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(endpoint=f"{jaeger.otlp_endpoint}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    async with AsyncExitStack() as stack:
        started = [Process(stage, settings) for stage in STAGES]
        await asyncio.gather(*[stack.enter_async_context(process) for process in started])
        reading = asyncio.create_task(
            _answered_ms(kafka.bootstrap_servers, f"{unique_name}.responses")
        )
        asked = await _ask(
            kafka.bootstrap_servers, f"{unique_name}.requests", provider.get_tracer("producer")
        )
        arrived_ms = await reading
        # What is queued is sent when a process ends.
        assert [await process.terminate() for process in started] == [0] * len(STAGES)
    await asyncio.to_thread(provider.shutdown)
    traces = [await _whole(jaeger, one.trace_id) for one in asked]
    return asked, arrived_ms, traces


async def _whole(jaeger: Jaeger, trace_id: str, spans: int = SPANS) -> list[Found]:
    async def arrived() -> bool:
        return len(await jaeger.trace(trace_id)) >= spans

    await eventually(arrived, what=f"{spans} spans of trace {trace_id} in Jaeger")
    return await jaeger.trace(trace_id)


async def test_jaeger_shows_request_path_and_batch(
    journey: tuple[list[Asked], dict[int, float], list[list[Found]]], jaeger: Jaeger
) -> None:
    """All four services in order under the producer's span, without a gap from the producer's
    timestamp to the acknowledged answer, and links between requests and their batches in both
    directions.
    """
    asked, arrived_ms, traces = journey
    members: set[Any] = set()
    for number, (one, spans) in enumerate(zip(asked, traces, strict=True)):
        stages, send = _path(one, spans)
        # The caller may have the answer before the responder has the broker's acknowledgement, so
        # only the start of the sending is known to come first.
        assert send.start_us <= 1000 * arrived_ms[number]
        members.add(stages[STAGES.index("executor")].ids)

    assert await _members_of_batches(jaeger, traces) == members


def _path(asked: Asked, spans: list[Found]) -> tuple[list[Found], Found]:
    """Check what every trace must have; return the spans of the stages and that of the sending."""
    by_service = {span.service: span for span in spans if span.tags["span.kind"] == "consumer"}
    stages = [by_service[f"headrace-{stage}"] for stage in STAGES]
    (send,) = [span for span in spans if span.name.endswith(".responses")]
    assert len({span.ids for span in spans}) == len(spans) == SPANS
    assert [span.tags["headrace.stage"] for span in stages] == list(STAGES)
    assert [span.parent for span in (*stages, send)] == [
        (asked.trace_id, asked.span_id),
        *(span.ids for span in stages),
    ]
    ends = [asked.timestamp_ms * 1000, *(span.start_us + span.duration_us for span in stages)]
    assert [span.start_us for span in stages] == ends[:-1]
    assert ends[-2] <= send.start_us <= send.start_us + send.duration_us <= ends[-1]
    return stages, send


async def _members_of_batches(jaeger: Jaeger, traces: list[list[Found]]) -> set[Any]:
    """The requests that all batches point to, each of which points back."""
    back: dict[Any, Any] = {}
    for spans in traces:
        (executor,) = [span for span in spans if span.service == "headrace-executor"]
        tags = executor.tags
        (back[executor.ids],) = executor.links
        assert back[executor.ids] == (
            tags["headrace.batch.trace_id"],
            tags["headrace.batch.span_id"],
        )
    reached: set[Any] = set()
    for trace_id, span_id in set(back.values()):
        (run,) = await _whole(jaeger, trace_id, 1)
        assert (run.name, run.ids) == ("run digits", (trace_id, span_id))
        assert {back[ids] for ids in run.links} == {run.ids}
        assert len(run.links) == run.tags["headrace.batch.requests"]
        reached.update(run.links)
    return reached


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_spans_arrive_by_either_protocol(
    jaeger: Jaeger, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """All spans of the stages are in Jaeger once tracing is closed, over HTTP and over gRPC."""
    endpoint = jaeger.grpc_endpoint if protocol == "grpc" else jaeger.otlp_endpoint
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    metrics = Metrics(CollectorRegistry())
    async with open_tracing(make_settings({}), tuple(Stage), metrics) as tracing:
        assert tracing is not None
        pass_through(tracing, make_traced(traceparent()))

    spans = await _whole(jaeger, f"{TRACE_ID:032x}", 5)
    assert {span.service for span in spans} == {"headrace"}
    assert metrics.registry.get_sample_value("headrace_trace_spans_total") == 6
