"""Spans on their way out: what is counted, what is said, and that nothing waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from headrace.errors import Code, ConfigurationError
from headrace.protocol.messages import Failure
from headrace.protocol.trace_context import SAMPLED, SpanId
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.trace_export import TraceExport
from headrace.telemetry.tracing import FinishedSpan
from headrace.tuning import TUNING
from tests.support.conditions import DEADLINE_S
from tests.support.spans import T, make_run, make_traced, traceparent, tracing_spans
from tests.support.tuning import UNHURRIED_EXPORT

LONGEST_TEXT = TUNING.runtime.trace_text_characters

Export = Callable[[Sequence[ReadableSpan]], SpanExportResult]


class _Exporter(SpanExporter):
    """Does what a test says."""

    def __init__(self, export: Export) -> None:
        self._export = export

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self._export(spans)


@pytest.fixture
def metrics() -> Metrics:
    """Fresh ones."""
    return Metrics(CollectorRegistry())


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Holds an exporter back until it is set, which the end of the test does as well."""
    released = threading.Event()
    yield released
    released.set()


def _span(number: int = 1) -> FinishedSpan:
    return FinishedSpan("run m", "INTERNAL", SpanId(1, number), 0, False, SAMPLED, T, T + 1, {})


def _count(metrics: Metrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(f"headrace_{name}_total")


def test_exported_spans_are_counted(metrics: Metrics) -> None:
    """Leaving sends what is queued."""
    exporter = InMemorySpanExporter()
    export = TraceExport(exporter, "s", "n", metrics, UNHURRIED_EXPORT)
    for number in range(1, 6):
        export.write(_span(number))
    export.close()

    assert len(exporter.get_finished_spans()) == 5
    assert (_count(metrics, "trace_spans"), _count(metrics, "trace_spans_dropped")) == (5, 0)


def test_refused_spans_are_counted_and_logged_once(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two failed exports: both counted, said once, with the exporter's own reason."""
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")

    def refuse(_: Sequence[ReadableSpan]) -> SpanExportResult:
        logging.getLogger("opentelemetry.exporter.otlp").error("no way in")
        return SpanExportResult.FAILURE

    with capture_logs() as lines:
        export = TraceExport(_Exporter(refuse), "s", "n", metrics, UNHURRIED_EXPORT)
        export.write(_span(1))
        export.write(_span(2))
        export.close()

    assert _count(metrics, "trace_export_failures") == 2
    assert _count(metrics, "trace_spans_dropped") == 2
    assert [(line["event"], line["reason"]) for line in lines] == [
        (Event.TRACE_EXPORT_FAILED, "no way in")
    ]


def test_reason_of_failed_export_has_the_one_of_its_retries(metrics: Metrics) -> None:
    """Over HTTP the exporter's last line says only that it gave up."""

    def refuse(_: Sequence[ReadableSpan]) -> SpanExportResult:
        logger = logging.getLogger("opentelemetry.exporter.otlp")
        logger.warning("Connection refused, retrying")
        logging.getLogger("opentelemetry.trace.span").warning("tracestate of a caller")
        logger.error("no more retries")
        return SpanExportResult.FAILURE

    with capture_logs() as lines:
        export = TraceExport(_Exporter(refuse), "s", "n", metrics, UNHURRIED_EXPORT)
        export.write(_span())
        export.close()

    assert [line["reason"] for line in lines] == [
        "no more retries; before: Connection refused, retrying"
    ]


def test_raising_exporter_counts_as_failed_export(metrics: Metrics) -> None:
    """Its spans are counted as lost, and the reason is told."""

    def raise_(_: Sequence[ReadableSpan]) -> SpanExportResult:
        raise OSError("the disk is full")

    with capture_logs() as lines:
        export = TraceExport(_Exporter(raise_), "s", "n", metrics, UNHURRIED_EXPORT)
        export.write(_span())
        export.close()

    assert _count(metrics, "trace_export_failures") == 1
    assert [line["reason"] for line in lines] == ["OSError: the disk is full"]


def test_full_span_queue_drops_and_counts(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch, stuck: threading.Event
) -> None:
    """A queue for four, with the exporter busy with one span, drops one of five more."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    busy = threading.Event()

    def hold(_: Sequence[ReadableSpan]) -> SpanExportResult:
        busy.set()
        stuck.wait()
        return SpanExportResult.SUCCESS

    export = TraceExport(_Exporter(hold), "s", "n", metrics, UNHURRIED_EXPORT)
    export.write(_span())
    assert busy.wait(DEADLINE_S)
    for number in range(2, 7):
        export.write(_span(number))

    assert _count(metrics, "trace_spans_dropped") == 1
    stuck.set()
    export.close()


def test_closing_tracing_does_not_wait_for_hung_collector(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch, stuck: threading.Event
) -> None:
    """It gives up, and what is left is counted as lost."""
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    busy = threading.Event()

    def hold(_: Sequence[ReadableSpan]) -> SpanExportResult:
        busy.set()
        stuck.wait()
        return SpanExportResult.SUCCESS

    tuning = replace(TUNING.runtime, trace_close_timeout_s=0.2, trace_abort_timeout_s=0.1)
    export = TraceExport(_Exporter(hold), "s", "n", metrics, tuning)
    export.write(_span(1))
    assert busy.wait(DEADLINE_S)
    export.write(_span(2))
    export.close()  # while the collector still hangs

    assert _count(metrics, "trace_spans_dropped") == 1


def test_span_ends_no_earlier_than_it_starts(metrics: Metrics) -> None:
    """The wall clock may have been set back meanwhile, as while an answer was sent."""
    exporter = InMemorySpanExporter()
    export = TraceExport(exporter, "s", "n", metrics, UNHURRIED_EXPORT)
    export.write(_span()._replace(end_us=T - 1_000_000))
    export.close()

    (span,) = exporter.get_finished_spans()
    assert (span.start_time, span.end_time) == (T * 1000, T * 1000)


def test_span_links_over_limit_are_dropped_and_counted(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The span says how many it lost, and so does the metric."""
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "2")
    exporter = InMemorySpanExporter()
    export = TraceExport(exporter, "s", "n", metrics, UNHURRIED_EXPORT)
    export.write(_span()._replace(links=[SpanId(2, number) for number in range(1, 6)]))
    export.close()

    (span,) = exporter.get_finished_spans()
    assert (len(span.links), span.dropped_links) == (2, 3)
    assert _count(metrics, "trace_links_dropped") == 3


def test_span_of_large_batch_keeps_all_links_without_limit() -> None:
    """The SDK's own limit of 128 is not in force."""
    requests = [make_traced(traceparent(), offset=offset) for offset in range(300)]
    with tracing_spans() as (tracing, spans):
        tracing.ingested(requests, T + 1000)
        tracing.ran(make_run(requests))

    assert len(spans.one("run").links) == 300
    assert spans.one("run").dropped_links == 0


def test_failed_span_has_error_status_and_type(metrics: Metrics) -> None:
    """The message is the status' description, the code `error.type`."""
    exporter = InMemorySpanExporter()
    export = TraceExport(exporter, "s", "n", metrics, UNHURRIED_EXPORT)
    export.write(_span()._replace(failure=Failure(Code.MODEL_FAILED, "it broke", "executor")))
    export.close()

    (span,) = exporter.get_finished_spans()
    assert (span.status.is_ok, span.status.description) == (False, "it broke")
    assert (span.attributes or {})["error.type"] == "MODEL_FAILED"


def test_long_texts_of_callers_are_cut_off(metrics: Metrics) -> None:
    """A key of megabytes would be kept for each span that waits for the collector."""
    exporter = InMemorySpanExporter()
    export = TraceExport(exporter, "s", "n", metrics, UNHURRIED_EXPORT)
    key = "k" * 1_000_000
    export.write(_span()._replace(attributes={"messaging.kafka.message.key": key}))
    export.close()

    (span,) = exporter.get_finished_spans()
    assert (span.attributes or {})["messaging.kafka.message.key"] == "k" * LONGEST_TEXT


@pytest.mark.parametrize(("surplus", "members"), [(0, 1), (1, 0)])
def test_tracestate_is_left_out_above_longest_text(
    metrics: Metrics, surplus: int, members: int
) -> None:
    """To parse one of a megabyte in each span would hold up the event loop."""
    exporter = InMemorySpanExporter()
    export = TraceExport(exporter, "s", "n", metrics, UNHURRIED_EXPORT)
    export.write(_span()._replace(tracestate=b"a=b".ljust(LONGEST_TEXT + surplus, b",")))
    export.close()

    (span,) = exporter.get_finished_spans()
    assert span.context is not None
    assert len(span.context.trace_state) == members


def test_resource_attributes_come_from_environment(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`OTEL_SERVICE_NAME` goes over our name, `OTEL_RESOURCE_ATTRIBUTES` adds to it."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "scoring")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    exporter = InMemorySpanExporter()
    export = TraceExport(exporter, "headrace-ingest", "orders", metrics, UNHURRIED_EXPORT)
    export.write(_span())
    export.close()

    (span,) = exporter.get_finished_spans()
    resource = span.resource.attributes
    assert resource["service.name"] == "scoring"
    assert resource["deployment.environment.name"] == "test"
    assert resource["service.namespace"] == "orders"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        ("OTEL_BSP_SCHEDULE_DELAY", "5s"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "some"),
        ("OTEL_SPAN_LINK_COUNT_LIMIT", "-1"),
    ],
)
def test_invalid_otel_variable_is_refused_by_name(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """The process does not start with a limit that nobody set."""
    monkeypatch.setenv(variable, value)
    exporter = _Exporter(lambda _: SpanExportResult.SUCCESS)
    with pytest.raises(ConfigurationError, match="OTEL_"):
        TraceExport(exporter, "s", "n", metrics, UNHURRIED_EXPORT)
