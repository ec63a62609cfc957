"""Encode and decode the records on `events`."""

from __future__ import annotations

import msgspec

from headrace.errors import Code, Rejected
from headrace.protocol.codec.faults import DECODE_ERRORS
from headrace.protocol.events import ExecutorEvent

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ExecutorEvent).decode


def encode_event(event: ExecutorEvent) -> bytes:
    """Return the value of an `events` record."""
    return _encode(event)


def decode_event(value: bytes) -> ExecutorEvent:
    """Decode the value of an `events` record.

    Raises:
        Rejected: `INTERNAL`: the record was not written by Headrace.
    """
    try:
        return _decode(value)
    except DECODE_ERRORS as error:
        raise Rejected(Code.INTERNAL, f"value: expected an event: {error}") from error
