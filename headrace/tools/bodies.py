"""Some fields of the body of a request or an answer, in MessagePack or JSON."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from headrace.client.rpc import last_header
from headrace.log.port import Record
from headrace.protocol.codec.faults import DECODE_ERRORS
from headrace.protocol.headers import DECODED_TYPES, JSON, HeaderName

T = TypeVar("T")


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
            return decode(record.value)
        except DECODE_ERRORS:
            return None
