"""Dead letters: parsing, selection, and formatting as text and as plain values.

No record makes this code raise, whatever wrote it: missing or unreadable fields are empty.
"""

from __future__ import annotations

import base64
import codecs
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from headrace.config import LimitSettings
from headrace.errors import Rejected
from headrace.log.port import Record, TopicPartition
from headrace.printable import printable
from headrace.protocol.codec import decode_request, plain_value
from headrace.protocol.headers import (
    DECODED_TYPES,
    INT32,
    INT64,
    HeaderName,
    parse_envelope,
    shown_name,
)
from headrace.protocol.messages import Envelope, InputTensor, Tensor
from headrace.protocol.tensors import to_array
from headrace.tools.replay.recording import model_of

_MAX_ATTEMPT_DIGITS = 4


class RecordIdentity(NamedTuple):
    """Topic, partition and offset of a record, which identify it."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


class DeadLetter(NamedTuple):
    """A dead letter.

    Attributes:
        record: as read, with the request's key, value and headers, and the headers of the failure.
        origin: the request that failed; None if the headers do not name it.
        code: a `headrace.errors.Code`, or another program's value.
        attempt: number of attempts, counted from 1.
        model, version: as requested; empty if unreadable.
    """

    record: Record
    origin: RecordIdentity | None
    code: str
    message: str
    stage: str
    attempt: int
    model: str
    version: str

    @property
    def identity(self) -> RecordIdentity:
        """Identity of the dead letter itself."""
        return RecordIdentity(self.record.topic, self.record.partition, self.record.offset)

    @property
    def partition(self) -> TopicPartition:
        """Partition that contains the dead letter."""
        return TopicPartition(self.record.topic, self.record.partition)


def parse_dead_letter(record: Record) -> DeadLetter:
    """Parse a record of the dead-letter topic."""
    headers = {name: value for name, value in record.headers if value is not None}
    model, version = model_of(record)
    return DeadLetter(
        record,
        _origin(headers),
        _text(headers, HeaderName.DLT_CODE),
        _text(headers, HeaderName.DLT_MESSAGE),
        _text(headers, HeaderName.STAGE),
        attempts(headers.get(HeaderName.ATTEMPT)),
        model,
        version,
    )


def attempts(value: bytes | None) -> int:
    """Return the value of an `x-attempt` header; 1 if it is unreadable."""
    if value is None or not value.isdigit() or len(value) > _MAX_ATTEMPT_DIGITS:
        return 1
    return max(int(value), 1)


def _text(headers: Mapping[str, bytes], name: str) -> str:
    return headers.get(name, b"").decode(errors="replace")


def _origin(headers: Mapping[str, bytes]) -> RecordIdentity | None:
    topic = _text(headers, HeaderName.DLT_TOPIC)
    partition = headers.get(HeaderName.DLT_PARTITION, b"")
    offset = headers.get(HeaderName.DLT_OFFSET, b"")
    if not topic or len(partition) != INT32.size or len(offset) != INT64.size:
        return None
    return RecordIdentity(topic, INT32.unpack(partition)[0], INT64.unpack(offset)[0])


@dataclass(frozen=True, slots=True)
class DeadLetterSelection:
    """A selection of dead letters; empty fields and None select all.

    Attributes:
        codes, models, stages: any of these. A model is selected with all its versions.
        since_ms, until_ms: time at which the request became a dead letter, in epoch milliseconds;
            `until_ms` is exclusive.
        positions: single dead letters, by partition and offset.
    """

    codes: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    stages: frozenset[str] = frozenset()
    since_ms: int | None = None
    until_ms: int | None = None
    positions: frozenset[tuple[int, int]] = frozenset()

    def takes(self, dead_letter: DeadLetter) -> bool:
        """Return whether the dead letter is selected."""
        record = dead_letter.record
        return (
            (not self.codes or dead_letter.code in self.codes)
            and (not self.models or dead_letter.model in self.models)
            and (not self.stages or dead_letter.stage in self.stages)
            and (self.since_ms is None or record.timestamp >= self.since_ms)
            and (self.until_ms is None or record.timestamp < self.until_ms)
            and (not self.positions or (record.partition, record.offset) in self.positions)
        )


# --- formatting ----------------------------------------------------------------------------------


SHOWN_ELEMENTS = 16
SHOWN_TEXT_BYTES = 512
SHOWN_BINARY_BYTES = 256
SHOWN_FIELD_BYTES = 64
"""Of a key or a header that is not text, which is shown on one line."""

_DUMPED_BYTES = 16
"""On one line of a dump."""

_NO_LIMITS = LimitSettings(max_request_bytes=2**31 - 1)
"""Limits that admit every request: one too large to be served can be a dead letter."""

_NUMBERS = {
    HeaderName.DLT_PARTITION,
    HeaderName.DLT_OFFSET,
    HeaderName.DLT_TIMESTAMP,
    HeaderName.REPLY_PARTITION,
}


def time_text(timestamp_ms: int) -> str:
    """Format epoch milliseconds as RFC 3339 in UTC; `-` if there are none.

    A number that is no date stays one: some producers write microseconds.
    """
    if timestamp_ms < 0:
        return "-"
    try:
        moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{timestamp_ms} ms since 1970"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def summary(dead_letter: DeadLetter, redriven: bool) -> dict[str, Any]:
    """Return a dead letter's row in a list."""
    return {
        "letter": str(dead_letter.identity),
        "time": time_text(dead_letter.record.timestamp),
        "code": dead_letter.code,
        "model": "/".join(part for part in (dead_letter.model, dead_letter.version) if part),
        "stage": dead_letter.stage,
        "attempt": dead_letter.attempt,
        "redriven": redriven,
        "request": str(dead_letter.origin) if dead_letter.origin else "",
        "message": dead_letter.message,
    }


def full(dead_letter: DeadLetter, redriven: bool) -> dict[str, Any]:
    """Return all of a dead letter as JSON values: bytes that are not text in base64."""
    record = dead_letter.record
    return {
        **summary(dead_letter, redriven),
        "timestamp_ms": record.timestamp,
        "key": _base64(record.key),
        "headers": [[name, _base64(value)] for name, value in record.headers],
        "value": _base64(record.value),
    }


def paragraphs(dead_letter: DeadLetter, redriven: bool) -> Iterator[str]:
    """Yield the lines of a dead letter in full: the failure, the headers, the request."""
    record = dead_letter.record
    yield f"letter   {dead_letter.identity}, written {time_text(record.timestamp)}"
    yield f"request  {dead_letter.origin or 'unknown'}"
    yield f"error    {dead_letter.code} in {dead_letter.stage or 'unknown'}: {dead_letter.message}"
    yield f"attempt  {dead_letter.attempt}" + (", redriven since" if redriven else "")
    yield f"key      {'none' if record.key is None else _show_bytes(record.key)}"
    yield "headers"
    for name, value in record.headers:
        yield f"  {shown_name(name)}: {_header(name, value)}"
    yield "value"
    for line in _value(dead_letter):
        yield f"  {line}"


def _header(name: str, value: bytes | None) -> str:
    if value is None:
        return "null"
    if name in _NUMBERS and len(value) in (4, 8):
        return str(int.from_bytes(value, "big", signed=True))
    return _show_bytes(value)


def _show_bytes(value: bytes) -> str:
    """Return text on one line, and the beginning of other bytes in hexadecimal."""
    text = _as_text(value)
    if text is not None:
        return printable(text)
    return f"0x{value[:SHOWN_FIELD_BYTES].hex()}{_more(value, SHOWN_FIELD_BYTES)}"


def _as_text(value: bytes, *, is_whole: bool = True) -> str | None:
    """Return bytes as text, which may have several lines; None if they are not text.

    Args:
        value: the bytes.
        is_whole: False if the last character may be cut off, which is left out then.
    """
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(value, final=is_whole)
    except UnicodeDecodeError:
        return None
    return text if text.translate(_LINES_AND_TABS).isprintable() else None


_LINES_AND_TABS = str.maketrans("", "", "\n\r\t")


def _value(dead_letter: DeadLetter) -> Iterator[str]:
    value = dead_letter.record.value
    if value is None:
        yield "null"
        return
    envelope = parse_envelope(dead_letter.record.headers, dead_letter.record.timestamp, 0)
    try:
        yield from _decoded(value, envelope)
    except Rejected as error:
        yield f"{len(value)} bytes that cannot be read as a request: {error}"
        yield from _beginning(value)


def _decoded(value: bytes, envelope: Envelope) -> Iterator[str]:
    if envelope.content_type not in DECODED_TYPES:
        yield f"{len(value)} bytes of {envelope.content_type}"
        yield from _beginning(value)
        return
    # Faults in other headers must not keep the body from being shown.
    plain = plain_value(value, envelope, _NO_LIMITS.max_request_bytes)
    request = decode_request(plain, envelope._replace(fault=None), _NO_LIMITS)
    version = f"/{request.model_version}" if request.model_version else ""
    yield f"model {request.model_name}{version}, {len(value)} bytes"
    if request.id is not None:
        yield f"id {request.id}"
    for name, parameter in (request.parameters or {}).items():
        yield f"parameter {name} = {parameter!r}"
    for tensor in request.inputs:
        yield from _tensor(tensor)
    for output in request.outputs or ():
        yield f"output {output.name}"


def _tensor(tensor: InputTensor) -> Iterator[str]:
    array = to_array(Tensor(tensor.name, tensor.datatype, tuple(tensor.shape), tensor.data))
    yield f"input {tensor.name} {tensor.datatype} {tensor.shape}"
    shown = np.array2string(array.ravel()[:SHOWN_ELEMENTS], separator=", ", max_line_width=92)
    more = f" and {array.size - SHOWN_ELEMENTS} more" if array.size > SHOWN_ELEMENTS else ""
    yield from (f"  {line}" for line in f"{shown}{more}".splitlines())


def _beginning(value: bytes) -> Iterator[str]:
    """Yield the first lines of a text, or a dump of the first bytes as `hexdump -C` writes it."""
    begun = value[:SHOWN_TEXT_BYTES]
    text = _as_text(begun, is_whole=len(begun) == len(value))
    most_bytes = SHOWN_BINARY_BYTES if text is None else SHOWN_TEXT_BYTES
    yield from _dump(value[:most_bytes]) if text is None else text.splitlines()
    if more := _more(value, most_bytes):
        yield more.strip()


def _dump(value: bytes) -> Iterator[str]:
    for at in range(0, len(value), _DUMPED_BYTES):
        row = value[at : at + _DUMPED_BYTES]
        text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in row)
        yield f"{at:08x}  {row.hex(' '):{3 * _DUMPED_BYTES - 1}}  |{text}|"


def _more(value: bytes, shown_bytes: int) -> str:
    hidden = len(value) - shown_bytes
    return f" and {hidden} bytes more" if hidden > 0 else ""


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode("ascii")
