"""Spans as the bytes of OTLP, written without a message object in between.

The messages are those of opentelemetry-proto's trace/v1/trace.proto and common/v1/common.proto, in
the encoding of https://protobuf.dev/programming-guides/encoding/: a field is its tag, the length
of its content, and the content; a message is its fields, one after the other. The SDK makes an
object for every attribute, another for its value, and hashes the resource as JSON for every span,
which takes 40 microseconds for a span; this takes 5. What all spans share is encoded once, and
strings that come again and again are remembered with the attribute that they are the value of.

`tests/property/test_otlp.py` has the official classes read what is written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import Struct
from typing import Final

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.span import TraceState

from headrace.protocol.messages import Failure
from headrace.protocol.trace_context import SAMPLED, SpanId
from headrace.telemetry.span_attributes import ERROR_TYPE
from headrace.telemetry.tracing import FinishedSpan

REMEMBERED_CHARACTERS: Final = 64
"""Longer strings are not remembered: callers choose some of them."""
LONG_KEY_BYTES: Final = 0x7F - 3 - 10
"""Up to this one, a name leaves an attribute with a number short of two bytes for its length."""

_KINDS: Final = {"INTERNAL": b"\x30\x01", "PRODUCER": b"\x30\x04", "CONSUMER": b"\x30\x05"}
_IS_REMOTE_IS_KNOWN, _IS_REMOTE = 0x100, 0x200
"""Bits of `Span.flags` above those of the trace."""

_ids = Struct(">2s16s2s8s").pack
_times_and_flags = Struct("<BQBQHI").pack
_link_flags = Struct("<BI").pack(0x35, _IS_REMOTE_IS_KNOWN | SAMPLED)
_MASK = (1 << 64) - 1
_SAMPLED = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(SAMPLED))


class Envelope:
    """What the spans of a process are sent in: one resource, one scope.

    Args:
        resource: who they are from.
        scope: what made them.
    """

    def __init__(self, resource: Resource, scope: InstrumentationScope) -> None:
        span = ReadableSpan(
            "",
            context=_SAMPLED,
            resource=resource,
            instrumentation_scope=scope,
        )
        (of_resource,) = encode_spans([span]).resource_spans
        (of_scope,) = of_resource.scope_spans
        of_scope.ClearField("spans")
        self._scope: bytes = of_scope.SerializeToString()
        of_resource.ClearField("scope_spans")
        self._resource: bytes = of_resource.SerializeToString()

    def request(self, spans: Iterable[bytes]) -> bytes:
        """An `ExportTraceServiceRequest` with these spans, each from `encode_span`."""
        of_scope = _field(b"\x12", b"".join((self._scope, *spans)))
        return _field(b"\x0a", self._resource + of_scope)


class EncodedSpan(ReadableSpan):
    """A span on its way through the SDK's batch processor, which asks for no more than its flags.

    Args:
        content: from `encode_span`.
        envelope: what it is to be sent in.
    """

    def __init__(self, content: bytes, envelope: Envelope) -> None:
        self.content = content
        self.envelope = envelope

    @property
    def context(self) -> SpanContext:
        """Not its own: one that is sampled."""
        return _SAMPLED


def request_of(spans: Sequence[ReadableSpan]) -> bytes:
    """An `ExportTraceServiceRequest` with `EncodedSpan`s, all of one envelope."""
    encoded = [span for span in spans if isinstance(span, EncodedSpan)]
    return encoded[0].envelope.request([span.content for span in encoded])


def encode_span(span: FinishedSpan, links: Sequence[SpanId], dropped_links: int = 0) -> bytes:
    """One span, as a field of `ScopeSpans`.

    Args:
        span: all of it but its links.
        links: those of its links that are sent.
        dropped_links: how many there were besides.
    """
    flags = span.flags & 0xFF | SAMPLED | _IS_REMOTE_IS_KNOWN
    if span.remote and span.parent_id:
        flags |= _IS_REMOTE
    parts = [
        _ids(
            *(b"\x0a\x10", span.place.trace_id.to_bytes(16, "big")),
            *(b"\x12\x08", span.place.span_id.to_bytes(8, "big")),
        ),
        _name(span.name),
        _KINDS[span.kind],
        _times_and_flags(0x39, span.start_us * 1000, 0x41, span.end_us * 1000, 0x0185, flags),
    ]
    if span.parent_id:
        parts.append(b"\x22\x08" + span.parent_id.to_bytes(8, "big"))
    if span.tracestate is not None:
        parts.append(_field(b"\x1a", _state(span.tracestate)))
    for name, value in span.attributes.items():
        if isinstance(value, str):
            short = len(value) <= REMEMBERED_CHARACTERS
            parts.append(_remembered_text(name, value) if short else _text(name, value))
        else:
            parts.append(_number(name, value))
    if span.failure is not None:
        parts.append(_text(ERROR_TYPE, str(span.failure.code)))
        parts.append(_status(span.failure))
    parts += map(_link, links)
    if dropped_links:
        parts.append(b"\x70" + _varint(dropped_links))
    return _field(b"\x12", b"".join(parts))


def _number(name: str, value: int) -> bytes:
    """An attribute that is an integer or a boolean."""
    key = _key(name)
    if isinstance(value, bool):
        number, field = b"\x01" if value else b"\x00", b"\x10"
    else:
        number, field = _varint(value & _MASK), b"\x18"
    size = len(number)
    if len(key) > LONG_KEY_BYTES:
        return _key_value(name, field + number)
    return b"\x4a%c%b\x12%c%b%b" % (len(key) + size + 3, key, size + 1, field, number)


def _text(name: str, value: str) -> bytes:
    return _key_value(name, _field(b"\x0a", value.encode(errors="replace")))


# Of these most are new each time, as a request's identity is; the others are never the oldest.
_remembered_text = lru_cache(maxsize=512)(_text)


def _key_value(name: str, value: bytes) -> bytes:
    return _field(b"\x4a", _key(name) + _field(b"\x12", value))


@lru_cache(maxsize=256)
def _key(name: str) -> bytes:
    return _field(b"\x0a", name.encode())


@lru_cache(maxsize=256)
def _name(name: str) -> bytes:
    return _field(b"\x2a", name.encode(errors="replace"))


def _link(place: SpanId) -> bytes:
    trace_id, span_id = place.trace_id.to_bytes(16, "big"), place.span_id.to_bytes(8, "big")
    return b"\x6a\x21" + _ids(b"\x0a\x10", trace_id, b"\x12\x08", span_id) + _link_flags


def _status(failure: Failure) -> bytes:
    """An error with its message."""
    return _field(b"\x7a", _field(b"\x12", failure.message.encode(errors="replace")) + b"\x18\x02")


def _state(header: bytes) -> bytes:
    """A `tracestate` without the members that cannot be."""
    state = TraceState.from_header([header.decode("ascii", "replace")])
    return ",".join(f"{key}={value}" for key, value in state.items()).encode(errors="replace")


def _field(tag: bytes, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return b"%b%c%b" % (tag, size, content)
    return b"".join((tag, _varint(size), content))


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; all bytes but the last have the eighth bit set."""
    if number < 0x80:
        return b"%c" % number
    if number < 0x4000:
        return b"%c%c" % (number & 0x7F | 0x80, number >> 7)
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
