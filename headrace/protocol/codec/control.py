"""Encode and decode the records on `control`."""

from __future__ import annotations

import msgspec

from headrace.errors import Code, Fatal, Rejected
from headrace.protocol.codec.faults import DECODE_ERRORS
from headrace.protocol.control import FORMAT, ControlRecord

_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decode = msgspec.msgpack.Decoder(ControlRecord).decode


class _Formatted(msgspec.Struct):
    format: int


_decode_format = msgspec.msgpack.Decoder(_Formatted).decode


class UnknownFormat(Fatal):
    """A control record was written by a later release."""


def encode_control(record: ControlRecord) -> bytes:
    """Return the value of a `control` record."""
    return _encode(record)


def decode_control(value: bytes) -> ControlRecord:
    """Decode the value of a `control` record.

    Raises:
        Rejected: `INTERNAL`: the record was not written by Headrace.
        UnknownFormat: it was written by a later release.
    """
    try:
        # The format first: later ones may have other fields.
        format_ = _decode_format(value).format
        if format_ > FORMAT:
            raise UnknownFormat(
                f"control record: expected a format up to {FORMAT}, got {format_}; "
                "upgrade this process"
            )
        return _decode(value)
    except DECODE_ERRORS as error:
        raise Rejected(Code.INTERNAL, f"value: expected a control record: {error}") from error
