"""The way out for spans: OpenTelemetry's SDK, which queues them and sends them by OTLP.

Spans come finished, so they are made as the SDK's `ReadableSpan` and handed to its batch
processor, without a tracer, a sampler or a context in between: 4 to 11 microseconds for a span
in place of 60, and the ids are ours to choose, which links in both directions need.

A collector that is away costs spans, which are counted, and one line in the log a minute.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from itertools import islice

import structlog
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_SPAN_LINK_COUNT_LIMIT,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.span import TraceState

import headrace
from headrace.errors import ConfigurationError
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.span_attributes import ERROR_TYPE, SCHEMA_URL
from headrace.telemetry.tracing import FinishedSpan
from headrace.trace import SAMPLED, SpanId

log = structlog.get_logger(__name__)

DEFAULT_QUEUE_SIZE = 2048
CLOSE_S = 1.5
"""How long what is queued may take to leave when the process ends."""
CUT_OFF_S = 0.3
SAY_SO_EVERY_S = 60.0

_OK = Status(StatusCode.UNSET)
_SCOPE = InstrumentationScope("headrace", headrace.__version__, SCHEMA_URL)


class TraceExport:
    """Takes spans on the event loop's thread, and sends them from the SDK's, which begins with it
    and ends with `close`.

    Args:
        exporter: of the SDK's, or one for tests.
        service_name: what the process is called, unless `OTEL_SERVICE_NAME` or
            `OTEL_RESOURCE_ATTRIBUTES` say otherwise.

    Raises:
        ConfigurationError: an `OTEL_*` variable is no number, or one that cannot be.
    """

    def __init__(
        self, exporter: SpanExporter, service_name: str, namespace: str, metrics: Metrics
    ) -> None:
        self._metrics = metrics
        self._resource = _resource(service_name, namespace)
        self._link_limit = _number(OTEL_SPAN_LINK_COUNT_LIMIT)
        queue_size = _number(OTEL_BSP_MAX_QUEUE_SIZE)
        self._queue_size = DEFAULT_QUEUE_SIZE if queue_size is None else queue_size
        self._exporter = _CountingExporter(exporter, metrics)
        self._queued = 0
        try:
            self._processor = BatchSpanProcessor(self._exporter, max_queue_size=self._queue_size)
        except ValueError as error:
            raise ConfigurationError(f"OTEL_BSP_*: {error}") from error

    def write(self, span: FinishedSpan) -> None:
        """Queue a span; a full queue drops it."""
        # The SDK would drop the oldest one, and not say how many.
        if self._waiting() >= self._queue_size:
            self._metrics.trace_spans_dropped.inc()
            return
        self._queued += 1
        self._processor.on_end(self._made(span))

    def close(self) -> None:
        """Send what is queued, within `CLOSE_S`; what is left then is dropped. Blocks."""
        closing = threading.Thread(
            target=self._processor.shutdown, name="trace-export-close", daemon=True
        )
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()  # ends a wait between two tries
            closing.join(CUT_OFF_S)
        self._metrics.trace_spans_dropped.inc(self._waiting())

    def _waiting(self) -> int:
        return self._queued - self._exporter.taken

    def _made(self, span: FinishedSpan) -> ReadableSpan:
        state = None if span.tracestate is None else _state(span.tracestate)
        flags = TraceFlags(span.flags | SAMPLED)
        trace_id = span.place.trace_id
        context = SpanContext(trace_id, span.place.span_id, False, flags, state)
        parent = None
        if span.parent_id:
            parent = SpanContext(trace_id, span.parent_id, span.remote, flags, state)
        status = _OK
        attributes = span.attributes
        if span.failure is not None:
            status = Status(StatusCode.ERROR, span.failure.message)
            attributes = {**attributes, ERROR_TYPE: str(span.failure.code)}
        return ReadableSpan(
            span.name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            links=self._links(span.links),
            kind=SpanKind[span.kind],
            status=status,
            start_time=span.start_us * 1000,
            end_time=span.end_us * 1000,
            instrumentation_scope=_SCOPE,
        )

    def _links(self, places: Sequence[SpanId]) -> Sequence[Link]:
        """Without a limit set, as many as there are: a batch has no more requests than rows, and
        these have a limit.
        """
        links = [_link(place) for place in islice(places, self._link_limit)]
        dropped = len(places) - len(links)
        if not dropped:
            return links
        self._metrics.trace_links_dropped.inc(dropped)
        bounded = BoundedList.from_seq(len(links), links)
        bounded.dropped = dropped
        return bounded


class _CountingExporter(SpanExporter):
    """Counts what leaves and what does not; `taken` is what has left the queue."""

    def __init__(self, exporter: SpanExporter, metrics: Metrics) -> None:
        self._exporter = exporter
        self._metrics = metrics
        self._complaints = _Complaints()
        self._said_at_s = -SAY_SO_EVERY_S
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Called on the SDK's thread."""
        self.taken += len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - whatever an exporter raises, the spans are lost
            self._complaints.last = f"{type(error).__name__}: {error}"
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._metrics.trace_spans.inc(len(spans))
        else:
            self._metrics.trace_export_failures.inc()
            self._metrics.trace_spans_dropped.inc(len(spans))
            self._say_so(len(spans))
        return result

    def _say_so(self, spans: int) -> None:
        now_s = time.monotonic()
        if now_s - self._said_at_s >= SAY_SO_EVERY_S:
            self._said_at_s = now_s
            log.warning(Event.TRACE_EXPORT_FAILED, spans=spans, reason=self._complaints.last)

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Complaints(logging.Handler):
    """Takes what the SDK logs of its own, a line for each try, and keeps the last."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""
        logger = logging.getLogger("opentelemetry")
        logger.handlers = [self]
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Called by loggers."""
        self.last = record.getMessage()


def _resource(service_name: str, namespace: str) -> Resource:
    """Who the spans are from; the environment's word goes over ours."""
    ours = Resource.create(
        {
            "service.name": service_name,
            "service.namespace": namespace,
            "service.version": headrace.__version__,
            "service.instance.id": f"{os.uname().nodename}-{os.getpid()}",
        },
        SCHEMA_URL,
    )
    return ours.merge(OTELResourceDetector().detect())


def _number(variable: str) -> int | None:
    value = os.environ.get(variable, "").strip()
    if not value:
        return None
    if not value.isdigit():
        raise ConfigurationError(f"{variable}: expected a number of 0 or more, got {value!r}")
    return int(value)


def _state(header: bytes) -> TraceState:
    return TraceState.from_header([header.decode("ascii", "replace")])


def _link(place: SpanId) -> Link:
    return Link(SpanContext(*place, is_remote=False, trace_flags=TraceFlags(SAMPLED)))
