"""Values that were made to cost memory cost little of it."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import pytest

from headrace.config import LimitSettings
from headrace.errors import Rejected
from headrace.protocol.codec import callers_id, decode_request
from headrace.protocol.headers import JSON, MSGPACK
from headrace.protocol.messages import Envelope
from headrace.protocol.tensors import join_elements
from tests.support.bad_records.building import json_input, packed, packed_input

SIZE = 500_000
LIMITS = LimitSettings()
MAX_FACTOR = 64
"""Bytes of memory for each byte of a value: lists of one-digit numbers and of empty objects in
JSON are the worst."""


def in_json(element: bytes) -> bytes:
    """A request in JSON whose data is as many of one element as there is room for."""
    count = SIZE // (len(element) + 1)
    data = b",".join([element] * count)
    return json_input(shape=[1, count], data=["DATA"]).replace(b'"DATA"', data)


COSTLY = {
    "JSON numbers": (JSON, in_json(b"0")),
    "JSON floats": (JSON, in_json(b".5".replace(b".", b"0."))),
    "JSON empty lists": (JSON, in_json(b"[]")),
    "JSON lists of lists": (JSON, in_json(b"[[[]]]")),
    "JSON objects": (JSON, in_json(b'{"":0}')),
    "JSON empty objects": (JSON, in_json(b"{}")),
    "JSON empty strings": (JSON, in_json(b'""')),
    "JSON nulls": (JSON, in_json(b"null")),
    "JSON inputs": (JSON, b'{"inputs":[' + b"{}," * (SIZE // 3) + b"{}]}"),
    "JSON numbers for inputs": (JSON, b'{"inputs":[' + b"0," * (SIZE // 2) + b"0]}"),
    "JSON shape": (JSON, json_input(shape=[1] * (SIZE // 3))),
    "lists that announce much": (MSGPACK, b"\x81\xa1a" + b"\xdd\x00\x0f\xff\xff" * 900),
    "inputs that announce much": (MSGPACK, b"\x81\xa6inputs" + b"\xdd\x00\x0f\xff\xff" * 900),
    "a map of many fields": (
        MSGPACK,
        b"\xdf" + (SIZE // 4).to_bytes(4, "big") + b"".join(
            b"\xa2%c%c\x00" % (number // 100 % 100 + 1, number % 100 + 1)
            for number in range(SIZE // 4)
        ),
    ),
    "a list for a name": (MSGPACK, packed(model_name=[0] * SIZE)),
    "a list for a dimension": (MSGPACK, packed_input(shape=[1, [0] * SIZE])),
    "BYTES of nothing": (
        MSGPACK,
        packed_input(
            datatype="BYTES", shape=[SIZE // 4], data=join_elements([b""] * (SIZE // 4))
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTLY)
def test_costly_value_is_refused_within_bounds(name: str) -> None:
    """The peak is a multiple of the value's size that does not depend on what it announces."""
    content_type, value = COSTLY[name]
    envelope = Envelope(content_type=content_type)

    tracemalloc.start()
    try:
        with suppress(Rejected):
            decode_request(value, envelope, LIMITS)
        callers_id(value, envelope)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak <= MAX_FACTOR * len(value) + 65_536
