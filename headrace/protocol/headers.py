"""Record headers: parse those of requests, and build those of answers and dead letters.

Existing names and formats are used where there are any: `kafka_replyTopic`,
`kafka_replyPartition`, `kafka_correlationId` and `kafka_dlt-*` are from Spring for Apache Kafka
(`KafkaHeaders`), `traceparent` and `tracestate` from W3C Trace Context, `ce_*` from CloudEvents'
binary mode. Header names match exactly; the last value of a repeated header counts, and a null
value is an absent header.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NoReturn

from headrace.protocol.compression import CODINGS, choose_coding, read_coding
from headrace.protocol.messages import (
    MAX_NAME_LENGTH,
    Envelope,
    Failure,
    Request,
    is_whole_answer,
    whole_answer_type,
)
from headrace.protocol.negotiation import choose_content_type, media_type, read_accept
from headrace.protocol.trace_context import parse_traceparent
from headrace.tuning import TUNING


class HeaderName:
    """Names of the record headers that Headrace reads or writes."""

    # of requests
    CONTENT_TYPE: Final = "content-type"
    CONTENT_ENCODING: Final = "content-encoding"
    ACCEPT: Final = "accept"
    ACCEPT_ENCODING: Final = "accept-encoding"
    CORRELATION_ID: Final = "kafka_correlationId"
    REPLY_TOPIC: Final = "kafka_replyTopic"
    REPLY_PARTITION: Final = "kafka_replyPartition"
    DEADLINE_MS: Final = "x-deadline-ms"
    TIMEOUT_MS: Final = "x-timeout-ms"
    PRIORITY: Final = "x-priority"
    TENANT: Final = "x-tenant"
    MODEL: Final = "x-model"
    CANCEL: Final = "x-cancel"
    CLAIM: Final = "x-claim"
    """Reference to the value, which is in a store; of answers too. See `headrace.protocol.claims`.
    """
    TRACEPARENT: Final = "traceparent"
    TRACESTATE: Final = "tracestate"
    # of answers
    STATUS: Final = "x-status"
    REQUEST: Final = "x-request"
    CLAIM_EXPIRES_MS: Final = "x-claim-expires-ms"
    """Time after which the object of an answer's claim may be gone."""
    RECORD_OF: Final = "x-record-of"
    """Model and version whose outputs are in the value, which is a record of the caller's."""
    # of dead letters
    STAGE: Final = "x-stage"
    ATTEMPT: Final = "x-attempt"
    DLT_TOPIC: Final = "kafka_dlt-original-topic"
    DLT_PARTITION: Final = "kafka_dlt-original-partition"
    DLT_OFFSET: Final = "kafka_dlt-original-offset"
    DLT_TIMESTAMP: Final = "kafka_dlt-original-timestamp"
    DLT_CODE: Final = "kafka_dlt-exception-fqcn"
    DLT_MESSAGE: Final = "kafka_dlt-exception-message"
    # of replayed requests
    REPLAY_OF: Final = "x-replay-of"
    """Identity of the request that was copied."""
    REPLAY_RUN: Final = "x-replay-run"
    """Id of the replay that wrote the copy."""
    REPLAY_LETTER: Final = "x-replay-letter"
    """Identity of the dead letter that was copied."""


ALL_HEADERS = frozenset(
    value.lower() for name, value in vars(HeaderName).items() if not name.startswith("_")
)
"""All of `HeaderName`, in lower case."""

MSGPACK: Final = "application/msgpack"
JSON: Final = "application/json"
PNG: Final = "image/png"
OCTETS: Final = "application/octet-stream"
MSGPACK_TYPES = frozenset({"", MSGPACK, "application/vnd.msgpack", "application/x-msgpack"})
"""An absent header means MessagePack."""

_TENSOR_TYPES = (JSON, MSGPACK, *sorted(MSGPACK_TYPES - {"", MSGPACK}))
DECODED_TYPES = MSGPACK_TYPES | {JSON}
"""Any other type is a payload that only the model's transform can read."""

MAX_PRIORITY = 100
"""`x-priority` is between `-MAX_PRIORITY` and this."""

BY_CORRELATION = ("", -1, -1)
"""Meaning of an empty `x-cancel`: the request with the record's own `kafka_correlationId`."""

MAX_HEADER_BYTES = 512
"""Largest value of a parsed header; headers that are only copied may be longer."""

MAX_SHOWN_NAME = 80
"""Most characters of a header's name in an error text."""

INT32 = struct.Struct(">i")
"""Format of a partition in a header."""
INT64 = struct.Struct(">q")
"""Format of an offset or a time in the headers of a dead letter."""

_CLOUDEVENTS = "application/cloudevents"
_TUNING = TUNING.protocol
_LOOKED_AT_BYTES = 64
_MAX_COUNT = 4  # digits of a number of attempts
_MAX_DIGITS = 15  # epoch milliseconds of the year 33658; more is a mistake
_LATEST_MS = int("9" * _MAX_DIGITS)
NO_HEADERS: Final = Envelope()
"""Envelope of a record without headers, if requests have no default timeout."""

Header = tuple[str, bytes]
Headers = Sequence[tuple[str, bytes | None]]


# --- a request's headers ----------------------------------------------------------------------


def parse_envelope(headers: Headers, timestamp_ms: int, default_timeout_ms: int) -> Envelope:
    """Parse the headers of a request record.

    Never raises: `fault` describes what is wrong with them, and all readable fields are set
    nevertheless, so that the error answer can be routed. The deadline is the earlier of
    `x-deadline-ms` and `timestamp_ms` + `x-timeout-ms`; without either, `default_timeout_ms`
    counts from the timestamp (0: no deadline). A record without a timestamp (-1) has no timeouts.
    """
    if not headers and not default_timeout_ms:
        return NO_HEADERS
    fields: list[Any] = _BLANK.copy()
    fault = None
    rule_of = _RULES.get
    for name, value in headers:
        rule = rule_of(name)
        if rule is None:
            fault = fault or name_fault(name)
            continue
        position, parse = rule
        if value is None:
            return parse_envelope(_distinct(headers), timestamp_ms, default_timeout_ms)
        if parse is None:
            fields[position] = value
            continue
        try:
            fields[position] = parse(value if len(value) <= MAX_HEADER_BYTES else _too_long(value))
        except ValueError as error:
            if len(dict(headers)) < len(headers):  # the fault may be in a value that does not count
                return parse_envelope(_distinct(headers), timestamp_ms, default_timeout_ms)
            fault = fault or f"header {name}: {error}"
    fields[_MODEL], fields[_VERSION] = fields.pop()
    timeout_ms = fields.pop()
    if fields[0] and fields[0] not in DECODED_TYPES and fault is None:
        fault = _content_type_fault(fields[0], fields[_MODEL])
    if timeout_ms is not None or default_timeout_ms:
        fields[_DEADLINE] = _earlier(
            fields[_DEADLINE], timeout_ms, timestamp_ms, default_timeout_ms
        )
    state = fields[_TRACESTATE]
    fields[_TRACESTATE] = state and _state_of(fields[_TRACEPARENT], state)
    fields[_FAULT] = fault
    # A third of the cost of calling the NamedTuple class.
    return tuple.__new__(Envelope, fields)


def _state_of(parent: bytes | None, state: bytes) -> bytes | None:
    """Return a `tracestate`; None without a `traceparent` that can be read, which it describes."""
    return state if parent is not None and parse_traceparent(parent) is not None else None


def parse_envelopes(
    headers: Sequence[Headers], deadlines_ms: Sequence[int], varying: Collection[str] | None
) -> list[Envelope]:
    """Parse the headers of requests that passed ingest, and set their deadlines.

    Args:
        headers: those of each request.
        deadlines_ms: the deadline of each, which ingest has found.
        varying: names of the headers that are not equal in all requests, if all have the same
            names; None if they may differ in everything.
    """
    first = parse_envelope(headers[0], 0, 0) if headers[0] else NO_HEADERS
    parsed: list[Envelope] | None = None
    if varying is not None and first.fault is None:
        read = [name for name in varying if name in _RULES]
        if not read:
            parsed = [first] * len(headers)
        elif read == [HeaderName.CORRELATION_ID] and len(dict(headers[0])) == len(headers[0]):
            # Only the opaque correlation id differs, so all else is parsed once.
            place = [name for name, _ in headers[0]].index(HeaderName.CORRELATION_ID)
            content_type, others = first[0], first[2:]
            if not any(each[place][1] is None for each in headers):
                parsed = [
                    tuple.__new__(Envelope, (content_type, each[place][1], *others))
                    for each in headers
                ]
    if parsed is None:
        parsed = [parse_envelope(each, 0, 0) if each else NO_HEADERS for each in headers]
    return [
        envelope
        if envelope.deadline_ms == deadline_ms
        else envelope._replace(deadline_ms=deadline_ms)
        for envelope, deadline_ms in zip(parsed, deadlines_ms, strict=True)
    ]


def is_payload(envelope: Envelope) -> bool:
    """Return True if the value of a request for a model that takes records was one."""
    return bool(envelope.model) and envelope.content_type not in MSGPACK_TYPES


def is_utf8(name: str) -> bool:
    """Return True if a header's name is UTF-8; the log decodes others with `surrogateescape`."""
    return name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)


def name_fault(name: str) -> str | None:
    """Return what is wrong with a header's name; None if nothing is."""
    return None if is_utf8(name) else f"header {shown_name(name)}: expected a name in UTF-8"


def shown_name(name: str) -> str:
    """Return the beginning of a header's name as valid UTF-8 text."""
    raw = name[:MAX_SHOWN_NAME].encode("utf-8", "surrogateescape")
    return raw.decode("utf-8", "backslashreplace") + ("..." if len(name) > MAX_SHOWN_NAME else "")


def _distinct(headers: Headers) -> Headers:
    """Return the last header of each name, without null values, except of a name that is not UTF-8:
    that is a fault whatever its value.
    """
    return [
        (name, value)
        for name, value in dict(headers).items()
        if value is not None or not is_utf8(name)
    ]


def _earlier(
    deadline_ms: int, timeout_ms: int | None, timestamp_ms: int, default_timeout_ms: int
) -> int:
    """Return the deadline, after applying the record's or the default timeout; 0 if none."""
    if timeout_ms is None:
        if deadline_ms:
            return deadline_ms
        timeout_ms = default_timeout_ms
    if timestamp_ms < 0:
        return deadline_ms
    # A producer may have put nanoseconds into the timestamp.
    timed_out_ms = min(max(timestamp_ms + timeout_ms, 1), _LATEST_MS)
    return min(deadline_ms, timed_out_ms) if deadline_ms else timed_out_ms


def _content_type_fault(content_type: str, model: str) -> str | None:
    if content_type.startswith(_CLOUDEVENTS):
        return (
            "header content-type: expected CloudEvents in binary mode (ce_* headers), "
            f"got structured mode ({content_type})"
        )
    if not model:
        return (
            f"header content-type: expected {MSGPACK} or {JSON}, or a header x-model that names "
            f"the model for this payload, got {content_type} without x-model"
        )
    return None


@lru_cache(maxsize=_TUNING.cached_content_types)
def _content_type(value: bytes) -> str:
    return media_type(value.decode("ascii", "replace"))


@lru_cache(maxsize=_TUNING.cached_header_values)
def _model(value: bytes) -> tuple[str, str]:
    name, slash, version = _text(value).partition("/")
    if not name or "/" in version or (slash and not version):
        raise ValueError(f"expected a model name or name/version, got {_shown(value)}")
    return name, version


def _text(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise ValueError(f"expected UTF-8, got {_shown(value)}") from None
    if len(text) > MAX_NAME_LENGTH:
        raise ValueError(f"expected at most {MAX_NAME_LENGTH} characters, got {len(text)}")
    return text


@lru_cache(maxsize=_TUNING.cached_header_values)
def _topic(value: bytes) -> str:
    if not value:
        raise ValueError("expected the name of a topic, got an empty value")
    return _text(value)


def _milliseconds(in_place_of_0: int) -> Callable[[bytes], int]:
    def parse(value: bytes) -> int:
        if not value.isdigit() or len(value) > _MAX_DIGITS:
            raise ValueError(
                f"expected milliseconds in at most {_MAX_DIGITS} ASCII digits, got {_shown(value)}"
            )
        return int(value) or in_place_of_0

    return parse


def _priority(value: bytes) -> int:
    digits = value[1:] if value[:1] == b"-" else value
    if not digits.isdigit() or len(digits) > 3 or int(digits) > MAX_PRIORITY:
        raise ValueError(
            f"expected an integer between -{MAX_PRIORITY} and {MAX_PRIORITY}, got {_shown(value)}"
        )
    return int(value)


def _partition(value: bytes) -> int:
    if len(value) != INT32.size:
        raise ValueError(f"expected 4 bytes, big-endian, got {len(value)} bytes")
    partition: int = INT32.unpack(value)[0]
    if partition < 0:
        raise ValueError(f"expected a partition of 0 or more, got {partition}")
    return partition


def _cancelled(value: bytes) -> tuple[str, int, int]:
    if not value:
        return BY_CORRELATION
    topic, slash, place = _text(value).partition("/")
    partition, second, offset = place.partition("/")
    if not (topic and slash and second and _is_number(partition) and _is_number(offset)):
        raise ValueError(f"expected topic/partition/offset, as in x-request, got {_shown(value)}")
    return topic, int(partition), int(offset)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


@lru_cache(maxsize=_TUNING.cached_header_values)
def _content_encoding(value: bytes) -> str:
    coding = read_coding(value.decode("ascii", "replace"))
    if coding is None:
        raise ValueError(f"expected one of {', '.join(CODINGS)}, or none, got {_shown(value)}")
    return coding


@lru_cache(maxsize=_TUNING.cached_header_values)
def _accept_encoding(value: bytes) -> str:
    return choose_coding(value.decode("ascii", "replace"))


@lru_cache(maxsize=_TUNING.cached_header_values)
def _accept(value: bytes) -> str:
    return read_accept(value.decode("ascii", "replace"))


def _too_long(value: bytes) -> NoReturn:
    raise ValueError(f"expected at most {MAX_HEADER_BYTES} bytes, got {len(value)}")


def _shown(value: bytes) -> str:
    return repr(value[:40])[1:] + ("..." if len(value) > 40 else "")


_Parse = Callable[[bytes], Any]

# Index of each header among the fields of `parse_envelope`, and its parser, if it has one.
# The first seventeen fields are those of `Envelope`; the last two are merged into them.
_RULES: dict[str, tuple[int, _Parse | None]] = {
    HeaderName.CONTENT_TYPE: (0, _content_type),
    HeaderName.CORRELATION_ID: (1, None),
    HeaderName.REPLY_TOPIC: (2, _topic),
    HeaderName.REPLY_PARTITION: (3, _partition),
    HeaderName.DEADLINE_MS: (4, _milliseconds(1)),  # in an envelope 0 is none, here a past one
    HeaderName.PRIORITY: (5, _priority),
    HeaderName.TENANT: (6, lru_cache(maxsize=_TUNING.cached_header_values)(_text)),
    HeaderName.TRACEPARENT: (9, None),
    HeaderName.TRACESTATE: (10, None),
    HeaderName.CANCEL: (12, _cancelled),
    HeaderName.CONTENT_ENCODING: (13, _content_encoding),
    HeaderName.ACCEPT_ENCODING: (14, _accept_encoding),
    HeaderName.CLAIM: (15, None),  # parsed where it is used: most processes never do
    HeaderName.ACCEPT: (16, _accept),
    HeaderName.TIMEOUT_MS: (17, _milliseconds(0)),
    HeaderName.MODEL: (18, _model),
}
_DEADLINE, _MODEL, _VERSION, _TRACEPARENT, _TRACESTATE, _FAULT = 4, 7, 8, 9, 10, 11
_BLANK: list[Any] = [*NO_HEADERS, None, ("", "")]


# --- an answer's headers ----------------------------------------------------------------------


OWN_HEADERS = frozenset(
    {
        HeaderName.ATTEMPT,
        HeaderName.CANCEL,
        HeaderName.CLAIM,
        HeaderName.CLAIM_EXPIRES_MS,
        HeaderName.DEADLINE_MS,
        HeaderName.MODEL,
        HeaderName.PRIORITY,
        HeaderName.RECORD_OF,
        HeaderName.REQUEST,
        HeaderName.STAGE,
        HeaderName.STATUS,
        HeaderName.TENANT,
        HeaderName.TIMEOUT_MS,
    }
)
"""The `x-*` headers that Headrace defines, besides `x-replay-*`; all others are copied."""

OWN_ANSWER_HEADERS = 3
"""Number of Headrace's own headers, which come first in an answer: content-type, x-status and
x-request.
"""

_STAY = OWN_HEADERS | {"spring_json_header_types"} | _RULES.keys()
_STAYING_PREFIXES = ("content-", "ce_", "kafka_", "retry_topic-", "x-replay-")


def answer_content_type(request_content_type: str) -> str:
    """Return the content type of an answer: the request's own, or JSON for a raw payload."""
    if request_content_type in MSGPACK_TYPES:
        return request_content_type or MSGPACK
    return JSON


def tensor_types(request_content_type: str) -> tuple[str, ...]:
    """Return the content types of answers with tensors, the one without `accept` first."""
    usual = answer_content_type(request_content_type)
    return (usual, *[each for each in _TENSOR_TYPES if each != usual])


def tensors_content_type(envelope: Envelope) -> str:
    """Return the content type of an answer with tensors; the usual one if `accept` accepts none."""
    content_type, accept = envelope.content_type, envelope.accept
    chosen = choose_content_type(accept, tensor_types(content_type)) if accept else ""
    return chosen or answer_content_type(content_type)


def begins_as_json(value: bytes | memoryview | None) -> bool:
    """Return True if a value can only be a JSON object: no MessagePack map begins with a brace."""
    return value is not None and bytes(value[:_LOOKED_AT_BYTES]).lstrip()[:1] == b"{"


def begins_as_map(value: bytes | memoryview) -> bool:
    """Return True if a value begins as a MessagePack map does."""
    return value[0] >> 4 == 0x8 or value[0] in (0xDE, 0xDF)


def error_content_type(request: Request) -> str:
    """Return the content type of the error answer to a request.

    JSON without its content type is answered in JSON, the only format that its caller reads.
    """
    content_type, accept = request.envelope.content_type, request.envelope.accept
    if accept and (chosen := choose_content_type(accept, tensor_types(content_type))):
        return chosen
    if content_type in MSGPACK_TYPES and begins_as_json(request.value):
        return JSON
    return answer_content_type(content_type)


def answer_headers(request: Request, status: str, request_topic: str) -> list[Header]:
    """Return the headers of a response record.

    `x-status` is `ok` or the code, `x-request` the identity of the request. The caller's own
    headers are copied, except those that concern only the request. `traceparent` is the context
    of the span that sends the answer, or the caller's own if the request is not sampled.
    """
    return answers_headers([request], status, request_topic)[0]


def answers_headers(
    requests: Iterable[Request], status: str, request_topic: str
) -> list[list[Header]]:
    """Return the `answer_headers` of each request, in order."""
    found: list[list[Header]] = []
    content_type, partition, place = "", -1, b""
    request_header = HeaderName.REQUEST
    first, second = _first_two(content_type, status)
    before: Envelope | None = None
    for request in requests:
        envelope = request.envelope
        if envelope is not before or status != "ok":  # those without headers share one
            before = envelope
            if status != "ok":
                own_type = error_content_type(request)
            elif envelope.accept:
                own_type = tensors_content_type(envelope)
            else:
                own_type = envelope.content_type
            if own_type != content_type:
                content_type = own_type
                first, second = _first_two(content_type, status)
        if request.partition != partition:
            partition = request.partition
            place = f"{request_topic}/{partition}/".encode()
        headers = [first, second, (request_header, place + b"%d" % request.offset)]
        if envelope is not NO_HEADERS or request.trace is not None or request.stored is not None:
            _add_callers(headers, request, envelope)
        found.append(headers)
    return found


def _add_callers(headers: list[Header], request: Request, envelope: Envelope) -> None:
    """Add the headers of an answer that come from the caller's."""
    if request.failure is None and is_whole_answer(request.output_metadata):
        _describe_whole(headers, request)
    if request.failure is None and (request.compressed or request.stored):
        _add_coding(headers, request, envelope)
    if envelope.correlation_id is not None:
        headers.append((HeaderName.CORRELATION_ID, envelope.correlation_id))
    trace = request.trace
    if trace is not None:
        headers.append((HeaderName.TRACEPARENT, trace.traceparent(trace.answer_id).encode()))
    elif envelope.traceparent is not None:
        headers.append((HeaderName.TRACEPARENT, envelope.traceparent))
    if envelope.traceparent is not None and envelope.tracestate is not None:
        headers.append((HeaderName.TRACESTATE, envelope.tracestate))
    for name, value in request.headers:
        if name not in _STAY and value is not None and travels(name):
            headers.append((name, value))


def _add_coding(headers: list[Header], request: Request, envelope: Envelope) -> None:
    """Add the headers of a value that is in a store, or compressed."""
    stored, coding = request.stored, envelope.answer_encoding
    if stored is not None:
        headers.append((HeaderName.CLAIM, stored.claim))
        headers.append((HeaderName.CLAIM_EXPIRES_MS, b"%d" % stored.expires_ms))
        coding = stored.coding
    if coding:
        headers.append((HeaderName.CONTENT_ENCODING, coding.encode()))


def _describe_whole(headers: list[Header], request: Request) -> None:
    """Add the headers of an answer that is a record, JSON or a file instead of tensors."""
    content_type = whole_answer_type(request.output_metadata).encode()
    if not content_type:
        content_type = dict(request.headers).get(HeaderName.CONTENT_TYPE) or b""
    headers[0] = (HeaderName.CONTENT_TYPE, content_type)
    record_of = f"{request.model}/{request.version}"
    headers.append((HeaderName.RECORD_OF, record_of.encode()))


@lru_cache(maxsize=_TUNING.cached_content_types)
def _first_two(request_content_type: str, status: str) -> tuple[Header, Header]:
    content_type = answer_content_type(request_content_type)
    return (HeaderName.CONTENT_TYPE, content_type.encode()), (HeaderName.STATUS, status.encode())


def travels(name: str) -> bool:
    """Return True if a header of a request is copied to its answer.

    A header whose name is not UTF-8 is not copied: most clients cannot read it.
    """
    # Callers choose the names, so long names are not cached: that bounds the cache in bytes.
    return _travels(name) if len(name) <= MAX_NAME_LENGTH else _may_travel(name)


def _may_travel(name: str) -> bool:
    return not (
        name in _STAY
        or name.startswith(_STAYING_PREFIXES)
        or (name.startswith("__") and name.endswith("__"))
        or not is_utf8(name)
    )


_travels = lru_cache(maxsize=_TUNING.cached_header_values)(_may_travel)


def dead_letter_headers(
    request: Request, failure: Failure, request_topic: str
) -> list[tuple[str, bytes | None]]:
    """Return the headers of a dead letter: the request's, unchanged, and where and why it failed.

    Those of an earlier failure are replaced, so that they do not accumulate over redrives; only
    `x-attempt` continues from the request's value, which a redrive has incremented. The
    `kafka_dlt-*` headers have the format of Spring's `DeadLetterPublishingRecoverer`: the topic
    as text, numbers big-endian (int32 or int64).
    """
    attempt = dict(request.headers).get(HeaderName.ATTEMPT) or b""
    kept = [header for header in request.headers if not _is_of_dead_letter(header[0])]
    return [
        *kept,
        (HeaderName.DLT_TOPIC, request_topic.encode()),
        (HeaderName.DLT_PARTITION, INT32.pack(request.partition)),
        (HeaderName.DLT_OFFSET, INT64.pack(request.offset)),
        (HeaderName.DLT_TIMESTAMP, INT64.pack(request.timestamp_ms)),
        (HeaderName.DLT_CODE, str(failure.code).encode()),
        (HeaderName.DLT_MESSAGE, failure.message.encode()),
        (HeaderName.STAGE, failure.stage.encode()),
        (HeaderName.ATTEMPT, attempt if attempt.isdigit() and len(attempt) <= _MAX_COUNT else b"1"),
    ]


def _is_of_dead_letter(name: str) -> bool:
    return name.startswith("kafka_dlt-") or name in {HeaderName.STAGE, HeaderName.ATTEMPT}
