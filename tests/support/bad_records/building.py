"""Building bad records: a good one, with changes."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack

from headrace.errors import Code

MAX_REQUEST_BYTES = 65_536
"""The limit under which the records that are too large are so."""

Headers = tuple[tuple[str, bytes | None], ...]

ABSENT = object()
"""Stands for a field to be left out."""

JSON_HEADERS: Headers = (("content-type", b"application/json"),)
DATA = bytes(256)


class BadRecord(NamedTuple):
    """A record and its answer.

    Attributes:
        name: what is wrong with it.
        code: of the answer.
        fragment: what its message must contain, which is the place of the fault.
    """

    name: str
    headers: Headers
    value: bytes | None
    code: Code
    fragment: str


def changed(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The fields with others in their place, and without those that are `ABSENT`."""
    return {name: value for name, value in (fields | changes).items() if value is not ABSENT}


def pixels(data: Any = DATA, **changes: Any) -> dict[str, Any]:
    """The input that the model takes, with changes."""
    good = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": data}
    return changed(good, changes)


def body(**changes: Any) -> dict[str, Any]:
    """A request that the model takes, with changes."""
    return changed({"model_name": "digits", "id": "r-1", "inputs": [pixels()]}, changes)


def packed(**changes: Any) -> bytes:
    """A request in MessagePack."""
    content: bytes = msgpack.packb(body(**changes))
    return content


def packed_input(**changes: Any) -> bytes:
    """A request in MessagePack whose only input has changes."""
    return packed(inputs=[pixels(**changes)])


def as_json(**changes: Any) -> bytes:
    """A request in JSON."""
    fields = body(**{"inputs": [pixels([0.0] * 64)], **changes})
    return json.dumps(fields).encode()


def json_input(**changes: Any) -> bytes:
    """A request in JSON whose only input has changes."""
    return as_json(inputs=[pixels(**{"data": [0.0] * 64, **changes})])


def elements(*contents: bytes) -> bytes:
    """The data of a `BYTES` tensor."""
    return b"".join(struct.pack("<I", len(content)) + content for content in contents)


WRONG_TYPES: dict[str, Any] = {
    "nil": None,
    "a boolean": True,
    "an integer": 7,
    "a float": 1.5,
    "a string": "text",
    "a list": [1],
    "a map": {"a": 1},
}


def other_types(*allowed: str) -> Iterator[tuple[str, Any]]:
    return ((kind, value) for kind, value in WRONG_TYPES.items() if kind not in allowed)


_OF_TENSOR = re.compile(r"inputs\[\d+\]\.(datatype|shape|data)")


def refused(name: str, value: bytes | None, fragment: str, headers: Headers = ()) -> BadRecord:
    """A record whose code follows from the place of the fault: `INVALID_TENSOR` for an input's
    datatype, shape or data, `INVALID_REQUEST` otherwise.
    """
    code = Code.INVALID_TENSOR if _OF_TENSOR.match(fragment) else Code.INVALID_REQUEST
    return BadRecord(name, headers, value, code, fragment)
