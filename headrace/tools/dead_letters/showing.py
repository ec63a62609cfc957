"""Formatting of a letter as text, and as plain values for files."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np

from headrace.config import LimitSettings
from headrace.errors import Rejected
from headrace.protocol.codec import decode_request
from headrace.protocol.headers import DECODED_TYPES, parse_envelope, shown_name
from headrace.protocol.messages import Envelope, InputTensor, Tensor
from headrace.protocol.tensors import to_array
from headrace.tools.dead_letters.letter import Letter

SHOWN_ELEMENTS = 16
HEX_WIDTH = 16
SHOWN_BYTES = 512

_NO_LIMITS = LimitSettings(max_request_bytes=2**31 - 1)
"""Without the usual limit, since a request too large to be served can be a letter."""

_NUMBERS = {
    "kafka_dlt-original-partition",
    "kafka_dlt-original-offset",
    "kafka_dlt-original-timestamp",
    "kafka_replyPartition",
}


def time_text(timestamp_ms: int) -> str:
    """Format epoch milliseconds as RFC 3339 in UTC; `-` if there are none."""
    if timestamp_ms < 0:
        return "-"
    moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def summary(letter: Letter, redriven: bool) -> dict[str, Any]:
    """Return a letter's row in a list."""
    return {
        "letter": str(letter.identity),
        "time": time_text(letter.record.timestamp),
        "code": letter.code,
        "model": "/".join(part for part in (letter.model, letter.version) if part),
        "stage": letter.stage,
        "attempt": letter.attempt,
        "redriven": redriven,
        "request": str(letter.origin) if letter.origin else "",
        "message": letter.message,
    }


def full(letter: Letter, redriven: bool) -> dict[str, Any]:
    """Return all of a letter as JSON values: bytes that are not text in base64."""
    record = letter.record
    return {
        **summary(letter, redriven),
        "timestamp_ms": record.timestamp,
        "key": _base64(record.key),
        "headers": [[name, _base64(value)] for name, value in record.headers],
        "value": _base64(record.value),
    }


def paragraphs(letter: Letter, redriven: bool) -> Iterator[str]:
    """Yield the lines of a letter in full: the failure, the headers, the request."""
    record = letter.record
    yield f"letter   {letter.identity}, written {time_text(record.timestamp)}"
    yield f"request  {letter.origin or 'unknown'}"
    yield f"error    {letter.code} in {letter.stage or 'unknown'}: {letter.message}"
    yield f"attempt  {letter.attempt}" + (", redriven since" if redriven else "")
    yield f"key      {'none' if record.key is None else _text(record.key)}"
    yield "headers"
    for name, value in record.headers:
        yield f"  {shown_name(name)}: {_header(name, value)}"
    yield "value"
    for line in _value(letter):
        yield f"  {line}"


def _header(name: str, value: bytes | None) -> str:
    if value is None:
        return "null"
    if name in _NUMBERS and len(value) in (4, 8):
        return str(int.from_bytes(value, "big", signed=True))
    return _text(value)


def _text(value: bytes) -> str:
    """Return text as it is, and other bytes in hexadecimal."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return f"0x{value.hex()}"
    return text if text.isprintable() else f"0x{value.hex()}"


def _value(letter: Letter) -> Iterator[str]:
    value = letter.record.value
    if value is None:
        yield "null"
        return
    envelope = parse_envelope(letter.record.headers, letter.record.timestamp, 0)
    try:
        yield from _decoded(value, envelope)
    except Rejected as error:
        yield f"{len(value)} bytes that cannot be read as a request: {error}"
        yield from hex_lines(value)


def _decoded(value: bytes, envelope: Envelope) -> Iterator[str]:
    if envelope.content_type not in DECODED_TYPES:
        yield f"{len(value)} bytes of {envelope.content_type}"
        yield from hex_lines(value)
        return
    # Faults in other headers must not keep the body from being shown.
    request = decode_request(value, envelope._replace(fault=None), _NO_LIMITS)
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


def hex_lines(value: bytes, shown_bytes: int = SHOWN_BYTES) -> Iterator[str]:
    """Yield hex dump lines of 16 bytes (offset, hexadecimal, ASCII), and the number of omitted
    bytes.
    """
    for start in range(0, min(len(value), shown_bytes), HEX_WIDTH):
        part = value[start : min(start + HEX_WIDTH, shown_bytes)]
        ascii_text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        yield f"{start:08x}  {part.hex(' '):<{HEX_WIDTH * 3}} {ascii_text}"
    if len(value) > shown_bytes:
        yield f"and {len(value) - shown_bytes} bytes more"


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode("ascii")
