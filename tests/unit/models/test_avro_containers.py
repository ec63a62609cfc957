"""Object container files of Avro as payloads, with several records and their schema."""

from __future__ import annotations

import io
import json
import tomllib
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest

from headrace.config import make_settings
from headrace.errors import Code, Rejected
from headrace.models.config import make_model_config
from headrace.models.inputs.avro import AvroContainers, AvroSchema
from headrace.models.inputs.records import Records
from headrace.models.inputs.transforms import make_transform
from headrace.models.signature import make_signature
from headrace.protocol.messages import Tensor
from headrace.protocol.tensors import to_array
from headrace.tuning import SchemaTuning
from tests.unit.models.requests import spec

CONTAINER = "avro/container"
SCHEMA = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "amount", "type": "double"}, {"name": "note", "type": "bytes"}],
}
ROWS = [{"amount": float(number), "note": b"n"} for number in range(50)]


def records_of(more: str = "") -> Records:
    """A transform of orders to the input `x`."""
    text = f'[transform.record]\n{more}\n[transform.record.inputs]\nx = [{{ path = "amount" }}]\n'
    transform = make_transform(
        Path(),
        make_model_config(tomllib.loads(text), make_settings({})),
        make_signature([spec("x", "FP64", [-1, 1])], [spec("score", "FP32", [-1])]),
    )
    assert isinstance(transform, Records)
    return transform


def container_of(rows: list[dict[str, Any]], codec: str = "null", schema: Any = SCHEMA) -> bytes:
    """A file, with blocks of about 100 bytes."""
    stream = io.BytesIO()
    fastavro.writer(stream, fastavro.parse_schema(schema), rows, codec=codec, sync_interval=100)
    return stream.getvalue()


def refusal(payload: bytes, more: str = "") -> Rejected:
    """The error of a payload."""
    with pytest.raises(Rejected) as caught:
        records_of(more)(payload, CONTAINER)
    return caught.value


@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_records_of_all_blocks_become_rows_and_come_back_in_container(codec: str) -> None:
    """With the outputs as last fields of their schema, and in the same codec."""
    records = records_of("pass_through = true")
    payload = container_of(ROWS, codec)
    (given,) = records(payload, CONTAINER)
    array = to_array(Tensor(given.name, given.datatype, tuple(given.shape), given.data))
    written = records.merge(payload, CONTAINER, {"score": np.arange(50, dtype=np.float32)})

    assert array[:, 0].tolist() == [row["amount"] for row in ROWS]
    reader = fastavro.reader(io.BytesIO(written))
    assert list(reader) == [row | {"score": row["amount"]} for row in ROWS]
    assert reader.codec == codec


@pytest.mark.parametrize("length", [0, 3, 20, 150, 400, -1])
def test_container_that_ends_early_is_refused(length: int) -> None:
    """Wherever it ends."""
    assert refusal(container_of(ROWS)[:length]).code == Code.INVALID_REQUEST


def test_damaged_container_is_refused() -> None:
    """A block without its mark, one with other records, a codec or a schema that is not read."""
    good = container_of(ROWS[:3])
    schema = b'"double"'
    wrong = {
        "a whole block": good[:-1] + bytes([good[-1] ^ 1]),
        "one of the codecs null, deflate, got bzip2": container_of(ROWS, "bzip2"),
        "3 records in a block": good.replace(schema, b'"string"'),
        "a container with a schema": good.replace(schema, b'"dooble"'),
        "an object": container_of([1.0], schema="double"),  # type: ignore[list-item]
    }
    for expected, payload in wrong.items():
        error = refusal(payload)
        assert error.code in (Code.INVALID_REQUEST, Code.INVALID_TENSOR)
        assert expected in error.message


def test_bomb_is_too_large() -> None:
    """No more is made of it than the bound."""
    bomb = container_of([{"amount": 0.0, "note": bytes(70 << 20)}], "deflate")

    assert len(bomb) < 200_000
    assert refusal(bomb).code == Code.TOO_LARGE


def test_more_records_than_allowed_are_too_large_before_they_are_read() -> None:
    """A record without fields takes no bytes."""
    nothing = {"type": "record", "name": "Nothing", "fields": []}
    payload = container_of([{}] * 2000, schema=nothing)

    assert refusal(payload, "max_rows = 1999").code == Code.TOO_LARGE


def record_of(field: Any, kind: str = "record", name: str = "Outer") -> dict[str, Any]:
    """A schema with one field."""
    return {"type": kind, "name": name, "fields": [{"name": "a", "type": field}]}


def doubling(depth: int) -> Any:
    """A schema whose values have two of the next one, which is empty at last, and no bytes."""
    field: Any = {"type": "record", "name": "Empty", "fields": []}
    for number in range(depth):
        name = f"Twice{number}"
        again = field["name"]
        fields = [{"name": "a", "type": field}, {"name": "b", "type": again}]
        field = {"type": "record", "name": name, "fields": fields}
    return field


@pytest.mark.parametrize(
    "schema",
    [
        record_of("Outer", "error"),
        record_of({"type": "array", "items": "null"}),
        record_of({"type": "array", "items": {"type": "fixed", "name": "F", "size": 0}}),
        record_of({"type": "array", "items": record_of("null", name="Inner")}),
        record_of({"type": "map", "values": {"type": "array", "items": "null"}}),
        record_of(["null", {"type": "array", "items": "null"}]),
        doubling(40),
    ],
    ids=["error in itself", "nulls", "no bytes", "records", "map", "union", "doubling"],
)
def test_schema_by_which_few_bytes_make_any_number_of_values_is_refused(schema: Any) -> None:
    """Callers choose it, and fastavro makes whatever the file counts, or descends for ever."""
    assert refusal(container_of([], schema=schema)).code == Code.INVALID_REQUEST


@pytest.mark.parametrize(
    ("field", "rows", "items", "is_read"),
    [
        ("int", 1, 100_000, False),
        ("int", 1000, 20, False),
        (["null", "int"], 1000, 20, False),
        ("string", 1000, 5, True),
    ],
    ids=["in one record", "in many", "of two bytes", "longer and fewer"],
)
@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_many_short_records_in_arrays_are_too_large(
    codec: str, field: Any, rows: int, items: int, is_read: bool
) -> None:
    """A dict of hundreds of bytes is made of each, however few bytes it takes in the file."""
    array = {"type": "array", "items": record_of(field, name="Item")}
    value = "twenty bytes of text" if field == "string" else 7
    payload = container_of([{"a": [{"a": value}] * items}] * rows, codec, record_of(array))
    containers = AvroContainers((), 1000, SchemaTuning(max_avro_memory_bytes=4_000_000))

    if is_read:
        assert len(containers.read(payload)[0]) == rows
    else:
        with pytest.raises(Rejected) as caught:
            containers.read(payload)
        assert caught.value.code == Code.TOO_LARGE


@pytest.mark.parametrize(
    ("is_array", "items", "is_read"),
    [(False, 20_000, False), (False, 10_000, True), (True, 20_000, False), (True, 10_000, True)],
)
def test_many_short_records_of_value_are_too_large(
    is_array: bool, items: int, is_read: bool
) -> None:
    """In an array that is the value, or in a field of one record."""
    array = {"type": "array", "items": record_of("int", name="Item")}
    schema = array if is_array else record_of(array)
    value: Any = [{"a": 7}] * items
    stream = io.BytesIO()
    fastavro.schemaless_writer(
        stream, fastavro.parse_schema(schema), value if is_array else {"a": value}
    )
    limited = AvroSchema(json.dumps(schema), "s", SchemaTuning(max_avro_memory_bytes=4_000_000))

    if is_read:
        found = limited.read(stream.getvalue())
        assert len(found if is_array else found["a"]) == items
    else:
        with pytest.raises(Rejected) as caught:
            limited.read(stream.getvalue())
        assert caught.value.code == Code.TOO_LARGE


@pytest.mark.parametrize("kind", ["bytes", "fixed"])
def test_long_decimal_is_refused_before_it_is_made(kind: str) -> None:
    """Its digits take time by the square of their number, and deflate makes them of few bytes."""
    size = {"size": 129, "name": "Amount"} if kind == "fixed" else {}
    decimal = {"type": kind, "logicalType": "decimal", "precision": 300, **size}
    payload = b"\x01" + bytes(128)
    schema = AvroSchema(json.dumps(record_of(decimal)), "s")

    with pytest.raises(Rejected, match="a decimal of 129 bytes, expected at most 128") as caught:
        schema.read(payload if kind == "fixed" else b"\x82\x02" + payload)
    assert caught.value.code == Code.INVALID_REQUEST


def test_decimal_with_more_digits_than_its_precision_is_not_rounded() -> None:
    """With `pass_through` the answer would have another amount than the request."""
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}
    schema = AvroSchema(json.dumps(record_of(decimal)), "s")

    read = schema.read(b"\x04\x7f\xff")
    assert read == {"a": Decimal("327.67")}
    with pytest.raises(ValueError, match="precision"):
        schema.write(read)


def test_schema_with_some_values_without_bytes_is_read() -> None:
    """Unions with null are in most schemas, and a field may be null alone."""
    items = {"type": "array", "items": ["null", record_of("double", name="Item")]}
    fields = [{"name": "amount", "type": "double"}, {"name": "items", "type": items}]
    fields += [{"name": f"n{number}", "type": "null"} for number in range(4)]
    schema = {"type": "record", "name": "Order", "fields": fields}
    rows = [{"amount": 2.0, "items": [None, {"a": 1.0}], **{f"n{i}": None for i in range(4)}}]

    inputs = records_of()(container_of(rows, schema=schema), CONTAINER)
    assert np.frombuffer(inputs[0].data, "<f8").tolist() == [2.0]


def test_damaged_deflate_is_refused() -> None:
    """The error says that the container is damaged, and is not the library's own."""
    payload = container_of(ROWS[:3], "deflate")
    block = zlib.compress(b"x" * 5)
    damaged = payload[:-26] + block[:10] + payload[-16:]

    assert refusal(damaged).code == Code.INVALID_REQUEST


def test_container_may_expand_and_others_do_not() -> None:
    """It is read on a thread, however small it is."""
    records = records_of()

    assert [records.expands(each) for each in (CONTAINER, "application/json")] == [True, False]
    assert records_of('format = "avro_container"').expands("")
