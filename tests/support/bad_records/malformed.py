"""Values that are no request at all, or too large to be looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgpack

from headrace.errors import Code
from tests.support.bad_records.building import (
    JSON_HEADERS,
    MAX_REQUEST_BYTES,
    BadRecord,
    as_json,
    json_input,
    other_types,
    packed,
    packed_input,
    refused,
)


def malformed_msgpack() -> Iterator[BadRecord]:
    good = packed()
    for cut in (1, 2, 8, 12, 20, 40, 60, 80, 200, len(good) - 1):
        yield refused(f"MessagePack cut after {cut} bytes", good[:cut], "value: ")
    for kind, value in other_types("a map"):
        yield refused(f"MessagePack that is {kind}", msgpack.packb(value), "value: ")
    announced = {"list": b"\xdd", "map": b"\xdf", "string": b"\xdb", "binary": b"\xc6"}
    for kind, opcode in announced.items():
        huge = b"\x81\xa7unknown" + opcode + b"\xff\xff\xff\xff"
        yield refused(f"MessagePack that announces a huge {kind}", huge, "value: ")
    nested = b"\x81\xa7unknown" + b"\x91" * 20_000
    yield from (
        refused("an empty value", b"", "value: "),
        refused("no value", None, "value: "),
        refused("MessagePack with a byte more", good + b"\x00", "value: "),
        refused("two requests in one value", good + good, "value: "),
        refused("MessagePack binary at the top", b"\xc4\x01a", "value: "),
        refused("a MessagePack extension", b"\xd4\x01\x00", "value: "),
        refused("an opcode that MessagePack never uses", b"\xc1", "value: "),
        refused("that opcode in an unknown field", b"\x81\xa1a\xc1", "value: "),
        refused("MessagePack nested without end", nested, "value: expected no more than"),
        refused("MessagePack nested too deeply", nested + b"\xc0", "value: expected no more"),
        refused("maps nested too deeply", b"\x81\xa1a" * 20_000 + b"\xc0", "value: expected no"),
        refused("a field's name that is no string", b"\x81\x01\x02", "value (a key)"),
        refused("a model's name that is not UTF-8", b"\x81\xaamodel_name\xa2\xff\xfe", "UTF-8"),
        refused("Avro's first bytes", b"\x00\x00\x00\x00\x01digits", "value: "),
        refused("text", b"hello, world", "without content-type a value is MessagePack"),
        refused("JSON without its header", as_json(), "header content-type: "),
        refused("gzip", b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "value: "),
    )


def malformed_json() -> Iterator[BadRecord]:
    good = as_json()
    for cut in (1, 10, 30, 60, 100, 200, len(good) - 1):
        yield refused(f"JSON cut after {cut} bytes", good[:cut], "value: ", JSON_HEADERS)
    for kind, value in other_types("a map"):
        text = json.dumps(value).encode()
        yield refused(f"JSON that is {kind}", text, "value: ", JSON_HEADERS)
    faults = {
        "an empty value": b"",
        "JSON with more behind it": good + b"{}",
        "JSON behind a byte order mark": b"\xef\xbb\xbf" + good,
        "JSON in UTF-16": good.decode().encode("utf-16"),
        "MessagePack under the header of JSON": packed(),
        "JSON with a trailing comma": b'{"inputs": [],}',
        "JSON with single quotes": b"{'inputs': []}",
        "JSON with a comment": b'{"inputs": [] /* none */}',
        "JSON with a bare NaN": good.replace(b"0.0", b"NaN", 1),
        "JSON with a bare Infinity": good.replace(b"0.0", b"Infinity", 1),
        "JSON with a leading zero": good.replace(b"0.0", b"01", 1),
        "JSON with a wrong escape": b'{"id": "\\x"}',
        "JSON with half a surrogate": b'{"id": "\\ud800"}',
        "JSON with a control character": b'{"id": "a\x01"}',
        "JSON lists nested without end": b'{"unknown": ' + b"[" * 20_000,
        "JSON objects nested too deeply": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        "JSON data nested too deeply": b'{"inputs":[{"name":"pixels","datatype":"FP32",'
        b'"shape":[1,64],"data":' + b"[" * 20_000 + b"]" * 20_000 + b"}]}",
    }
    for name, value in faults.items():
        yield refused(f"{name} (JSON)", value, "value: ", JSON_HEADERS)
    not_utf8 = b'{"id": "\xff"}'
    yield refused("JSON that is not UTF-8", not_utf8, "UTF-8", JSON_HEADERS)


def too_large() -> Iterator[BadRecord]:
    filler = bytes(MAX_REQUEST_BYTES)
    for name, headers, value in (
        ("a request over the limit", (), packed_input(data=filler)),
        ("bytes over the limit that are no request", (), filler + b"\x00"),
        ("JSON over the limit", JSON_HEADERS, json_input(data=[0.125] * 20_000)),
        (
            "a payload over the limit",
            (("content-type", b"image/jpeg"), ("x-model", b"digits")),
            filler + b"\x00",
        ),
    ):
        yield BadRecord(name, headers, value, Code.TOO_LARGE, "value: expected at most")
    grown = json_input(datatype="FP64", shape=[1, 10_000], data=[0] * 10_000)
    yield BadRecord(
        "JSON that grows over the limit", JSON_HEADERS, grown, Code.TOO_LARGE, "inputs: expected"
    )
