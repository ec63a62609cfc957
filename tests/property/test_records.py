"""Any payload becomes inputs that fit the model, or is refused."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import fastavro
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.config import make_settings
from headrace.errors import Rejected
from headrace.models.config import make_model_config
from headrace.models.inputs.avro import AvroSchema
from headrace.models.inputs.binding import Binder
from headrace.models.inputs.records import Table, read_json
from headrace.models.inputs.transforms import Transform, make_transform
from headrace.models.signature import TensorSpec, make_signature
from headrace.protocol.tensors import DATATYPES, to_array
from tests.support.protoc import write_descriptors

SCHEMA = {
    "type": "record",
    "name": "Row",
    "fields": [
        {"name": "a", "type": ["null", "double", "string"]},
        {"name": "b", "type": {"type": "array", "items": "long"}},
        {"name": "c", "type": {"type": "int", "logicalType": "date"}},
        {"name": "d", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "e", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9}},
        {"name": "f", "type": {"type": "map", "values": "float"}},
    ],
}
PROTO = """
syntax = "proto3";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
message Row {
  optional double a = 1;
  repeated int64 b = 2;
  google.protobuf.StringValue c = 3;
  google.protobuf.Timestamp d = 4;
  bytes e = 5;
  map<string, float> f = 6;
}
"""
OUTPUT = TensorSpec("y", "FP32", (-1,))
relaxed = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
    max_examples=50,
)
PARTS = [
    b"\x09\0\0\0\0\0\0\xf8\x7f",  # a: NaN
    b"\x12\x02\x01\x7f",  # b: packed
    b"\x1a\x03\x0a\x01x",  # c
    b"\x22\x0b\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # d: a second before 1970
    b"\x22\x0a\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # d: the last of all
    b"\x2a\x01\xff",  # e
    b"\x32\x08\x0a\x01a\x15\0\0\x80?",  # f: a is 1.0
    b"\x78\x01",  # unknown
]
"""Fields of a message."""
TYPES = [
    "text/csv",
    "application/json",
    "application/x-ndjson",
    "avro/binary",
    "avro/container",
    "application/x-protobuf",
]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["1", "-2.5", "1e999", "true", "2026-03-01", "2026-03-01T12:00:00Z", "DE"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd0"), inner, max_size=3)
    ),
    max_leaves=8,
)
rows = st.lists(st.dictionaries(st.sampled_from("abcdef"), values, max_size=4), max_size=4)
paths = st.sampled_from(["a", "b", "c", "d", "e", "f", "b.0", "f.a", "a.b.0", "missing"])
datatypes = st.sampled_from(list(DATATYPES))


@st.composite
def columns(draw: st.DrawFn, datatype: str) -> dict[str, Any]:
    """A column that an input of this datatype may have."""
    column: dict[str, Any] = {"path": draw(paths)}
    is_number = datatype not in ("BYTES", "BOOL")
    kind = draw(st.sampled_from(["plain", "default", "vocabulary", "date"] if is_number else [""]))
    if kind == "default":
        column["default"] = draw(st.sampled_from([0, 1, "1"]))
    elif kind == "vocabulary":
        column |= {"vocabulary": ["DE", "1", "true"], "unknown": draw(st.integers(-1, 300))}
    elif kind == "date":
        column |= {"date": draw(st.sampled_from(["seconds", "days", "weekday", "hour"]))}
    return column


@st.composite
def transforms(draw: st.DrawFn, directory: Path) -> tuple[Transform, Binder]:
    """A transform to two columns of one input, and the check of what it makes."""
    datatype = draw(datatypes)
    own = [draw(columns(datatype)), draw(columns(datatype))]
    record = {
        "inputs": {"x": own},
        "avro_schema": "row.avsc",
        "protobuf_descriptors": "row.desc",
        "protobuf_message": "Row",
    }
    config = make_model_config({"transform": {"record": record}}, make_settings({}))
    signature = make_signature([TensorSpec("x", datatype, (-1, 2))], [OUTPUT])
    return make_transform(directory, config, signature, directory), Binder(signature)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With the schema of the rows."""
    (tmp_path / "row.avsc").write_text(json.dumps(SCHEMA))
    (tmp_path / "row.proto").write_text(PROTO)
    write_descriptors(tmp_path, "row.proto", "row.desc", "--include_imports")
    return tmp_path


def check(data: st.DataObject, directory: Path, payload: bytes, content_type: str) -> None:
    """Convert a payload, and read what it became."""
    transform, binder = data.draw(transforms(directory))
    with suppress(Rejected):
        bound = binder.bind(transform(payload, content_type))
        array = to_array(bound.tensors[0])
        assert array.shape == (bound.rows, 2)


@relaxed
@given(rows, st.data())
def test_any_json_becomes_inputs_or_is_refused(
    directory: Path, rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    """Numbers, strings and dates may be replaced by any JSON value."""
    check(data, directory, msgspec.json.encode(_in_range(rows)), "application/json")


@relaxed
@given(
    rows.filter(bool),
    st.sampled_from(["application/json", "application/x-ndjson"]),
    st.sampled_from([b"", b"\xff", b"\\x", b"1e999", b"[", b"]", b"\n", b",", b"null"]),
    st.integers(0, 10_000),
)
def test_large_json_is_read_or_refused_as_small(
    rows: list[dict[str, Any]], content_type: str, changed: bytes, place: int
) -> None:
    """Decoding records one by one gives the result of decoding them in one call."""
    rows = _in_range(rows)
    ends = b"\n" if content_type != "application/json" else b","
    text = ends.join(map(msgspec.json.encode, rows))
    text = text if ends == b"\n" else b"[%b]" % text
    place %= len(text)
    text = text[:place] + changed + text[place:]

    def outcome(part_bytes: int) -> Table | str:
        try:
            return read_json(text, content_type, part_bytes)
        except Rejected as error:
            return str(error)

    assert outcome(1) == outcome(len(text))


def _in_range(value: Any) -> Any:
    """The value, with integers that msgspec can write."""
    if isinstance(value, list):
        return [_in_range(each) for each in value]
    if isinstance(value, dict):
        return {name: _in_range(each) for name, each in value.items()}
    is_large = type(value) is int and not -(2**63) <= value < 2**64
    return float(np.clip(float(value), -1e300, 1e300)) if is_large else value


@relaxed
@given(
    st.one_of(
        st.text(alphabet=st.sampled_from('ab,"\n1.-eT:Z'), max_size=60).map(str.encode),
        st.binary(max_size=60),
    ),
    st.sampled_from(TYPES),
    st.data(),
)
def test_any_bytes_become_inputs_or_are_refused(
    directory: Path, payload: bytes, content_type: str, data: st.DataObject
) -> None:
    """In each format."""
    check(data, directory, payload, content_type)


@relaxed
@given(
    st.one_of(st.none(), st.floats(), st.text(max_size=5)),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    st.integers(-719_162, 2_932_896),
    st.integers(-(2**50), 2**50),
    st.integers(0, 200),
    st.data(),
)
def test_changed_avro_becomes_inputs_or_is_refused(
    directory: Path,
    first: float | str | None,
    numbers: list[int],
    days: int,
    microseconds: int,
    place: int,
    data: st.DataObject,
) -> None:
    """A sound record, and one with a changed byte."""
    record = {"a": first, "b": numbers, "c": days, "d": microseconds, "e": b"\x01", "f": {"a": 1.5}}
    stream = io.BytesIO()
    schema = json.loads(json.dumps(SCHEMA))
    schema["fields"][4]["type"] = "bytes"
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), record)
    payload = bytearray(stream.getvalue())
    check(data, directory, bytes(payload), "avro/binary")
    payload[place % len(payload)] ^= data.draw(st.integers(1, 255))
    check(data, directory, bytes(payload), "avro/binary")


@relaxed
@given(
    st.lists(st.lists(st.binary(max_size=3), max_size=3), max_size=3),
    st.booleans(),
    st.integers(0, 10_000),
    st.integers(0, 255),
)
def test_avro_array_is_read_or_refused_as_the_library_does(
    blocks: list[list[bytes]], is_sized: bool, place: int, changed: int
) -> None:
    """Its records are read one by one; the blocks may have sizes, and a byte may be changed."""
    record = {"type": "record", "name": "Row", "fields": [{"name": "e", "type": "bytes"}]}
    schema = AvroSchema(json.dumps({"type": "array", "items": record}), "row.avsc")
    content = bytearray()
    for rows in filter(None, blocks):
        body = b"".join(bytes([2 * len(row)]) + row for row in rows)
        count = len(rows)
        content += bytes([2 * count - 1, 2 * len(body)] if is_sized else [2 * count]) + body
    content += b"\0"
    content[place % len(content)] ^= changed
    stream = io.BytesIO(content)
    try:
        expected: Any = schema.read_next(stream)
        if stream.tell() < len(content):
            expected = f"{len(content)} bytes, of which {stream.tell()} are a value"
    except Rejected as error:
        expected = str(error)
    try:
        found = schema.read(bytes(content))
    except Rejected as error:
        found = str(error).removeprefix(
            "INVALID_REQUEST: payload: expected one value as in row.avsc, got "
        )
    assert found == expected


@relaxed
@given(
    st.lists(st.floats(width=32), max_size=4),
    st.sampled_from(["null", "deflate"]),
    st.integers(0, 10_000),
    st.data(),
)
def test_changed_container_becomes_inputs_or_is_refused(
    directory: Path, numbers: list[float], codec: str, place: int, data: st.DataObject
) -> None:
    """A sound file, and one with a changed byte, in its head or in a block."""
    schema = {"type": "record", "name": "Row", "fields": [{"name": "a", "type": "double"}]}
    stream = io.BytesIO()
    rows = [{"a": number} for number in numbers]
    fastavro.writer(stream, fastavro.parse_schema(schema), rows, codec=codec, sync_interval=16)
    payload = bytearray(stream.getvalue())
    check(data, directory, bytes(payload), "avro/container")
    payload[place % len(payload)] ^= data.draw(st.integers(1, 255))
    check(data, directory, bytes(payload), "avro/container")


@relaxed
@given(
    st.lists(st.sampled_from(PARTS), max_size=8).map(b"".join),
    st.integers(0, 10_000),
    st.data(),
)
def test_changed_protobuf_becomes_inputs_or_is_refused(
    directory: Path, message: bytes, place: int, data: st.DataObject
) -> None:
    """Fields in any order and number, and one changed byte."""
    check(data, directory, message, "application/x-protobuf")
    payload = bytearray(message or b"\0")
    payload[place % len(payload)] ^= data.draw(st.integers(1, 255))
    check(data, directory, bytes(payload), "application/x-protobuf")
