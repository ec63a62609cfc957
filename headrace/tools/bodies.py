"""Some fields of the body of a request or an answer, in MessagePack or JSON."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from headrace.client.rpc import last_header
from headrace.errors import Rejected
from headrace.log.port import Headers, Record
from headrace.protocol.codec.faults import DECODE_ERRORS
from headrace.protocol.compression import decompress, read_coding
from headrace.protocol.headers import DECODED_TYPES, JSON, HeaderName

T = TypeVar("T")

_MOST_BYTES = 128 * 1024 * 1024
"""Largest body that is decompressed: few bytes can become any number."""


class BodyReader(Generic[T]):
    """Reads the fields of a struct from the values of records, and skips all others.

    Args:
        kind: a `msgspec.Struct`; fields that a body may lack have defaults.
    """

    def __init__(self, kind: type[T]) -> None:
        self._from_msgpack = msgspec.msgpack.Decoder(kind).decode
        self._from_json = msgspec.json.Decoder(kind).decode

    def read(self, record: Record) -> T | None:
        """Return the fields; None if there is no body, or it cannot be read."""
        given = last_header(record.headers, HeaderName.CONTENT_TYPE) or b""
        content_type = given.decode("utf-8", "replace").partition(";")[0].strip().lower()
        if record.value is None or content_type not in DECODED_TYPES:
            return None
        decode = self._from_json if content_type == JSON else self._from_msgpack
        try:
            return decode(_plain(record.value, record.headers))
        except (*DECODE_ERRORS, Rejected):
            return None


def _plain(value: bytes, headers: Headers) -> bytes:
    """Return a value without its `content-encoding`. Raises `Rejected` if it cannot be read."""
    given = last_header(headers, HeaderName.CONTENT_ENCODING) or b""
    coding = read_coding(given.decode("ascii", "replace"))
    return decompress(value, coding, _MOST_BYTES, "value") if coding else value
