"""Export of spans by OpenTelemetry's SDK, which queues, encodes and sends them by OTLP.

Spans arrive finished, so they go to the SDK's batch processor as `ReadableSpan`s, without a tracer,
a sampler or a context in between: their ids are chosen here, which links in both directions need.
The SDK's thread holds the interpreter lock while it encodes them, which is why
`headrace.telemetry.tracing` limits their number.

An unreachable collector costs spans, which are counted, and one log line a minute.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

import structlog
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_EXPORT_TIMEOUT,
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
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
from headrace.errors import ConfigurationError, describe_error
from headrace.protocol.trace_context import SAMPLED, AttributeValue, SpanId
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.span_attributes import ERROR_TYPE, SCHEMA_URL
from headrace.telemetry.tracing import FinishedSpan
from headrace.tuning import TUNING, RuntimeTuning

log = structlog.get_logger(__name__)

_SAMPLED = TraceFlags(SAMPLED)
_SCOPE = InstrumentationScope("headrace", headrace.__version__, SCHEMA_URL)


class TraceExport:
    """Accepts spans on the event loop's thread, and sends them from the SDK's, which starts with
    this object and ends with `close`.

    Args:
        exporter: sends the spans.
        service_name: the name of the process, unless `OTEL_SERVICE_NAME` or
            `OTEL_RESOURCE_ATTRIBUTES` override it.

    Raises:
        ConfigurationError: an `OTEL_*` variable is not a number, or is out of range.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        service_name: str,
        namespace: str,
        metrics: Metrics,
        tuning: RuntimeTuning = TUNING.runtime,
    ) -> None:
        self._metrics = metrics
        self._tuning = tuning
        self._resource = _resource(service_name, namespace)
        self._link_limit = _number(OTEL_SPAN_LINK_COUNT_LIMIT)
        queue_size = _number(OTEL_BSP_MAX_QUEUE_SIZE)
        for read_by_sdk in (
            OTEL_BSP_EXPORT_TIMEOUT,
            OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
            OTEL_BSP_SCHEDULE_DELAY,
        ):
            _number(read_by_sdk)  # the SDK would take its default for one that is none
        self._queue_size = tuning.trace_queue_spans if queue_size is None else queue_size
        self._exporter = _CountingExporter(exporter, metrics, tuning.trace_failure_log_interval_s)
        self._queued = 0
        # Models are opened on a thread of their own, while a gateway may already have calls.
        self._queueing = threading.Lock()
        try:
            self._processor = BatchSpanProcessor(self._exporter, max_queue_size=self._queue_size)
        except ValueError as error:
            raise ConfigurationError(f"OTEL_BSP_*: {error}") from error

    def write(self, span: FinishedSpan) -> None:
        """Queue a span, from any thread; a full queue drops it."""
        # The SDK would drop the oldest one, and not report how many.
        with self._queueing:
            if self._waiting() >= self._queue_size:
                self._metrics.trace_spans_dropped.inc()
                return
            self._queued += 1
        if self._link_limit is not None and len(span.links) > self._link_limit:
            self._metrics.trace_links_dropped.inc(len(span.links) - self._link_limit)
        text_limit = self._tuning.trace_text_characters
        self._processor.on_end(readable_span(span, self._resource, text_limit, self._link_limit))

    def close(self) -> None:
        """Send the queued spans; drop those that take too long. Blocks."""
        closing = threading.Thread(
            target=self._processor.shutdown, name="trace-export-close", daemon=True
        )
        closing.start()
        closing.join(self._tuning.trace_close_timeout_s)
        if closing.is_alive():
            self._exporter.shutdown()  # ends a wait between two retries
            closing.join(self._tuning.trace_abort_timeout_s)
        self._metrics.trace_spans_dropped.inc(self._waiting())

    def _waiting(self) -> int:
        return self._queued - self._exporter.taken


def readable_span(
    span: FinishedSpan, resource: Resource, text_limit: int, link_limit: int | None = None
) -> ReadableSpan:
    """Return the SDK's form of a span.

    Args:
        span: the finished span.
        resource: the process that the span is from.
        text_limit: characters to which texts are cut off, so that a queue of spans has a bound in
            bytes. A longer `tracestate` is left out: a part of it would be another one.
        link_limit: None keeps all links: a batch has no more requests than rows, and these have a
            limit.
    """
    header = span.tracestate
    state = None if header is None or len(header) > text_limit else _trace_state(header)
    attributes = {name: _valid(value, text_limit) for name, value in span.attributes.items()}
    status = Status()
    if span.failure is not None:
        attributes[ERROR_TYPE] = str(span.failure.code)
        status = Status(StatusCode.ERROR, _valid_text(span.failure.message, text_limit))
    flags = TraceFlags(span.flags | SAMPLED)
    trace_id, parent_id = span.ids.trace_id, span.parent_id
    return ReadableSpan(
        _valid_text(span.name, text_limit),
        context=SpanContext(*span.ids, is_remote=False, trace_flags=flags, trace_state=state),
        parent=SpanContext(trace_id, parent_id, span.remote, flags) if parent_id else None,
        resource=resource,
        attributes=attributes,
        links=_links(span.links, link_limit),
        kind=SpanKind[span.kind],
        status=status,
        start_time=span.start_us * 1000,
        end_time=max(span.start_us, span.end_us) * 1000,  # the clock may have been set back
        instrumentation_scope=_SCOPE,
    )


def _links(linked: Sequence[SpanId], limit: int | None) -> Sequence[Link]:
    """Return the first links, in a list that tells the SDK how many were dropped."""
    if not linked:
        return ()
    links: BoundedList[Link] = BoundedList(limit)
    links.extend([Link(SpanContext(*ids, False, _SAMPLED)) for ids in linked[:limit]])
    links.dropped = len(linked) - len(links)
    return links


def _trace_state(header: bytes) -> TraceState:
    """Parse a `tracestate`, leaving out the members that cannot be read."""
    return TraceState.from_header([header.decode("ascii", "replace")])


def _valid(value: AttributeValue, limit: int) -> AttributeValue:
    return _valid_text(value, limit) if isinstance(value, str) else value


def _valid_text(text: str, limit: int) -> str:
    """Return the beginning of a text, without surrogates, which UTF-8 cannot encode: one would fail
    a whole export.
    """
    text = text[:limit]
    return text if text.isascii() else text.encode(errors="replace").decode()


class _CountingExporter(SpanExporter):
    """Counts the spans sent and lost; `taken` is the number that has left the queue."""

    def __init__(self, exporter: SpanExporter, metrics: Metrics, log_interval_s: float) -> None:
        self._exporter = exporter
        self._metrics = metrics
        self._warnings = _ExporterWarnings()
        self._log_interval_s = log_interval_s
        self._logged_at_s = -log_interval_s
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans; the SDK calls this on a thread of its own."""
        self.taken += len(spans)
        self._warnings.last.clear()
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - whatever an exporter raises, the spans are lost
            self._warnings.last.append(describe_error(error))
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._metrics.trace_spans.inc(len(spans))
        else:
            self._metrics.trace_export_failures.inc()
            self._metrics.trace_spans_dropped.inc(len(spans))
            self._log_failure(len(spans))
        return result

    def _log_failure(self, spans: int) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_at_s >= self._log_interval_s:
            self._logged_at_s = now_s
            log.warning(Event.TRACE_EXPORT_FAILED, spans=spans, reason=self._warnings.text())

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _ExporterWarnings(logging.Handler):
    """Keeps the last two log lines of the SDK's exporter: with retries over HTTP, the last one says
    that it gave up, and the one before why. Other lines of the SDK are dropped: those about a
    `tracestate` quote callers.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last: deque[str] = deque(maxlen=2)
        logger = logging.getLogger("opentelemetry")
        logger.handlers = [self]
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        if record.name.startswith("opentelemetry.exporter."):
            self.last.append(record.getMessage())

    def text(self) -> str:
        """Return the lines, the latest one first."""
        return "; before: ".join(reversed(self.last))


def _resource(service_name: str, namespace: str) -> Resource:
    """Return the resource of the spans; the environment overrides our attributes."""
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
