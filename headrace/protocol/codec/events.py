"""Records on `events`."""

from __future__ import annotations

import msgspec

from headrace.errors import Code, Rejected
from headrace.protocol.codec.faults import DECODE_ERRORS
from headrace.protocol.events import ExecutorEvent

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ExecutorEvent).decode


def encode_event(event: ExecutorEvent) -> bytes:
    """The value of an `events` record."""
    return _encode(event)


def decode_event(value: bytes) -> ExecutorEvent:
    """What an `events` record says.

    Raises:
        Rejected: `INTERNAL`: the record is none of Headrace's.
    """
    try:
        return _decode(value)
    except DECODE_ERRORS as error:
        raise Rejected(Code.INTERNAL, f"value: expected an event: {error}") from error
