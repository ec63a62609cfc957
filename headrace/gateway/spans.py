"""The server spans of a gateway: one for each inference request at a door, around all stages.

The record on `requests` has the context of that span, whose parent is the caller's, so that the
stages' spans are its children. The door decides whether a request is sampled, as ingest does for
requests from Kafka, and the context carries the decision. docs/tracing.md lists the attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from headrace.client import Response
from headrace.config import TelemetrySettings
from headrace.errors import Code
from headrace.protocol.headers import HeaderName
from headrace.protocol.messages import Failure
from headrace.protocol.trace_context import (
    SAMPLED,
    Parent,
    SpanId,
    new_root,
    new_span_id,
    parse_traceparent,
    traceparent,
)
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.span_attributes import MODEL, STATUS, VERSION, Attributes
from headrace.telemetry.tracing import FinishedSpan, Sampler, Tracing

Description: TypeAlias = Callable[[], tuple[str, Attributes]]
"""Returns the name of a span and the attributes that its protocol has; called if it is kept."""


class ServerSpans:
    """Begins the server spans of a gateway.

    Args:
        settings: the rates of sampling, for all doors of this process together.
        instruments: without tracing there are no spans, and the context of a caller is passed on
            unchanged.
    """

    def __init__(self, settings: TelemetrySettings, instruments: Instruments) -> None:
        self.tracing: Tracing | None = instruments.tracing
        self.sampler = Sampler(settings, instruments.metrics)
        self.now_us = instruments.anchored_clock()

    def begin(self, parent: str | None, state: str | None) -> ServerSpan:
        """Begin the span of a request.

        Args:
            parent: the caller's `traceparent`.
            state: its `tracestate`.
        """
        return ServerSpan(self, _encoded(parent), _encoded(state))


class ServerSpan:
    """The span of one request, from its head to its answer; written once, by `end`.

    Attributes:
        headers: the trace context for the request's record.
    """

    def __init__(self, spans: ServerSpans, parent: bytes | None, state: bytes | None) -> None:
        self._spans = spans
        self._attributes: Attributes = {STATUS: Code.CANCELLED}
        self._failure: Failure | None = None
        self._state = state
        if spans.tracing is not None:
            self._began_us = now_us = spans.now_us()
            found = None if parent is None else parse_traceparent(parent)
            if found is None:
                self._state = None  # it belongs to a parent that cannot be read
            is_sampled = spans.sampler.sample_one(found, now_us)
            trace = found or new_root()
            flags = trace.flags | SAMPLED if is_sampled else trace.flags & ~SAMPLED
            self._parent = Parent(trace.trace_id, trace.span_id, flags)
            self._span_id = new_span_id()
            parent = traceparent(trace.trace_id, self._span_id, flags).encode()
        given = ((HeaderName.TRACEPARENT, parent), (HeaderName.TRACESTATE, self._state))
        self.headers = [(name, value) for name, value in given if value]

    def answered(self, answer: Response) -> None:
        """Note the answer that the caller gets."""
        self._attributes = {
            STATUS: "ok",
            MODEL: answer.model_name,
            VERSION: answer.model_version,
        }

    def failed(self, code: str, message: str, *, is_callers_fault: bool) -> None:
        """Note the error that the caller gets. Its own fault is no error of a server's span."""
        self._attributes = {STATUS: code}
        if not is_callers_fault:
            self._failure = Failure(code, message, "")

    def end(self, describe: Description) -> None:
        """Write the span if the request is sampled, or failed and within the rate for failures."""
        tracing = self._spans.tracing
        if tracing is None:
            return
        now_us = self._spans.now_us()
        ids = SpanId(self._parent.trace_id, self._span_id)
        if not self._parent.flags & SAMPLED and (
            self._attributes[STATUS] == "ok" or not self._spans.sampler.keep_failure(now_us)
        ):
            return
        name, attributes = describe()
        tracing.write(
            FinishedSpan(
                name=name,
                kind="SERVER",
                ids=ids,
                parent_id=self._parent.span_id,
                remote=True,
                flags=self._parent.flags | SAMPLED,
                start_us=self._began_us,
                end_us=now_us,
                attributes={**attributes, **self._attributes},
                failure=self._failure,
                tracestate=self._state,
            )
        )


def _encoded(header: str | None) -> bytes | None:
    return None if header is None else header.encode("utf-8", "surrogateescape")
