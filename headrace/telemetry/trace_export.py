"""The way out for spans: OpenTelemetry's SDK, which queues them and sends them by OTLP.

Spans come finished, so they are encoded at once and handed to the SDK's batch processor, without a
tracer, a sampler or a context in between, which would take ten times as long; and the ids are ours
to choose, which links in both directions need. Its thread only sends: one that encoded would hold
the interpreter for most of a burst, and the event loop would wait for it again and again.

A collector that is away costs spans, which are counted, and one line in the log a minute.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

import structlog
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_SPAN_LINK_COUNT_LIMIT,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

import headrace
from headrace.errors import ConfigurationError
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.otlp import EncodedSpan, Envelope, encode_span
from headrace.telemetry.span_attributes import SCHEMA_URL
from headrace.telemetry.tracing import FinishedSpan

log = structlog.get_logger(__name__)

DEFAULT_QUEUE_SIZE = 2048
CLOSE_S = 1.5
"""How long what is queued may take to leave when the process ends."""
CUT_OFF_S = 0.3
SAY_SO_EVERY_S = 60.0

_SCOPE = InstrumentationScope("headrace", headrace.__version__, SCHEMA_URL)


class TraceExport:
    """Takes spans on the event loop's thread, and sends them from the SDK's, which begins with it
    and ends with `close`.

    Args:
        exporter: takes `EncodedSpan`s.
        service_name: what the process is called, unless `OTEL_SERVICE_NAME` or
            `OTEL_RESOURCE_ATTRIBUTES` say otherwise.

    Raises:
        ConfigurationError: an `OTEL_*` variable is no number, or one that cannot be.
    """

    def __init__(
        self, exporter: SpanExporter, service_name: str, namespace: str, metrics: Metrics
    ) -> None:
        self._metrics = metrics
        self._envelope = Envelope(_resource(service_name, namespace), _SCOPE)
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
        self._processor.on_end(self._encoded(span))

    def close(self, within_s: float = CLOSE_S) -> None:
        """Send what is queued, in the time given; what is left then is dropped. Blocks."""
        closing = threading.Thread(
            target=self._processor.shutdown, name="trace-export-close", daemon=True
        )
        closing.start()
        closing.join(within_s)
        if closing.is_alive():
            self._exporter.shutdown()  # ends a wait between two tries
            closing.join(CUT_OFF_S)
        self._metrics.trace_spans_dropped.inc(self._waiting())

    def _waiting(self) -> int:
        return self._queued - self._exporter.taken

    def _encoded(self, span: FinishedSpan) -> EncodedSpan:
        """Without a limit set, with as many links as there are: a batch has no more requests than
        rows, and these have a limit.
        """
        links = span.links[: self._link_limit]
        dropped = len(span.links) - len(links)
        if dropped:
            self._metrics.trace_links_dropped.inc(dropped)
        return EncodedSpan(encode_span(span, links, dropped), self._envelope)


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
