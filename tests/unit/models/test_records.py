"""Business records on their way to a model's inputs."""

from __future__ import annotations

import io
import json
import sys
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.config import make_settings
from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.config import make_model_config
from headrace.models.inputs.records import CsvReader, Records, read_json
from headrace.models.inputs.transforms import Transform, make_transform
from headrace.models.signature import Signature, TensorSpec, make_signature
from headrace.protocol.messages import Tensor
from headrace.protocol.tensors import to_array
from tests.support.traced_memory import peak_bytes_of
from tests.unit.models.requests import spec

JSON = "application/json"
CSV = "text/csv"
ONE_COLUMN = {"transform": {"record": {"inputs": {"x": [{"path": "v"}]}}}}
ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "amount", "type": "double"},
        {"name": "country", "type": ["null", "string"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}


def model_of(*inputs: TensorSpec) -> Signature:
    """A model with these inputs."""
    return make_signature(inputs, [spec("y", "FP32", [-1])])


def records_of(
    columns: str, datatype: str = "FP32", *, more: str = "", directory: Path = Path()
) -> Transform:
    """A transform to the input `x`, which has these columns."""
    text = f"[transform.record]\n{more}\n[transform.record.inputs]\nx = [{columns}]\n"
    config = make_model_config(tomllib.loads(text), make_settings({}))
    return make_transform(directory, config, model_of(spec("x", datatype, [-1, -1])))


def array_of(transform: Transform, payload: bytes, content_type: str = JSON) -> NDArray[Any]:
    """The only input of a payload."""
    (given,) = transform(payload, content_type)
    return to_array(Tensor(given.name, given.datatype, tuple(given.shape), given.data))


def refusal(transform: Transform, payload: bytes, content_type: str = JSON) -> Rejected:
    """The error of a payload."""
    with pytest.raises(Rejected) as caught:
        transform(payload, content_type)
    return caught.value


def fault(columns: str, datatype: str = "FP32", *, more: str = "") -> str:
    """Return the message with which a configuration is refused."""
    with pytest.raises(ConfigurationError) as caught:
        records_of(columns, datatype, more=more)
    return str(caught.value)


TWO = '{ path = "amount" }, { path = "customer.age", default = 40 }'


def test_object_becomes_row_and_array_of_objects_rows() -> None:
    """Fields are found by path; one that is missing or null has its default."""
    transform = records_of(TWO)
    rows = b'[{"amount": 1, "customer": {"age": 30}}, {"amount": 2.5}, '
    rows += b'{"amount": 3, "customer": {"age": null}}, {"amount": 4, "customer": 5}]'

    assert array_of(transform, b'{"amount": 7.5}').tolist() == [[7.5, 40]]
    assert array_of(transform, rows).tolist() == [[1, 30], [2.5, 40], [3, 40], [4, 40]]


def test_string_that_is_not_utf8_is_refused_with_its_byte() -> None:
    """The library tells the place in the string, which reads as one in the payload."""
    error = refusal(records_of(TWO), b'{"amount": "1\xff"}')

    expected = "payload: expected JSON, got a string with byte 0xff, which is not UTF-8"
    assert error.message == expected


def test_half_of_surrogate_pair_near_end_is_not_taken_for_record_cut_short() -> None:
    """A program cut a text within an emoji."""
    error = refusal(records_of(TWO), rb'{"amount": "\ud83d"}')

    assert error.message == "payload: expected JSON, got malformed JSON: half of a surrogate pair"


def test_lines_of_json_become_rows() -> None:
    """One object a line."""
    lines = b'{"amount": 1}\n{"amount": 2}\n'

    assert array_of(records_of(TWO), lines, "application/x-ndjson")[:, 0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("column", "told"),
    [
        ('default = "none"', 'expected a number, got "none"'),
        ("default = 1e39", "expected a number of FP32, got 1e39"),
        ('vocabulary = ["DE"], default = "XX"', 'expected an entry of the vocabulary, got "XX"'),
        ('date = "hour", default = 0', "expected a date as in ISO 8601, got 0"),
    ],
)
def test_default_that_column_cannot_have_is_fault(column: str, told: str) -> None:
    """It is no error of the callers whose records lack the field."""
    assert fault(f'{{ path = "v", {column} }}') == f"transform.record.inputs.x: v: default: {told}"


def test_elements_of_lists_are_found_by_number() -> None:
    """A path may lead through lists."""
    transform = records_of('{ path = "items.1.price", default = -1 }')
    payload = b'[{"items": [{"price": 1}, {"price": 2}]}, {"items": []}]'

    assert array_of(transform, payload).tolist() == [[2], [-1]]


@pytest.mark.parametrize(
    ("more", "payload"),
    [
        ("", b"amount,customer.age\r\n1,30\r\n2.5,\r\n"),
        ('columns = ["amount", "customer.age"]', b"1,30\n2.5,\n"),
        ('columns = ["customer.age", "amount"]\ndelimiter = ";"', b'"30";"1"\n;2.5'),
    ],
    ids=["header", "names", "delimiter"],
)
def test_lines_of_csv_become_rows(more: str, payload: bytes) -> None:
    """Names are in the first line or in the configuration; an empty field is missing."""
    transform = records_of(TWO, more=more)

    assert array_of(transform, payload, CSV).tolist() == [[1, 30], [2.5, 40]]


def avro_of(value: Any, schema: Any = ORDER) -> bytes:
    """A value in Avro."""
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return stream.getvalue()


def avro_transform(directory: Path, schema: Any = ORDER) -> Transform:
    """A transform of orders in Avro."""
    (directory / "order.avsc").write_text(json.dumps(schema))
    columns = '{ path = "amount" }, { path = "country", vocabulary = ["DE", "FR"], unknown = -1,'
    columns += ' default = "" }, { path = "at", date = "hour" }'
    return records_of(columns, more='avro_schema = "order.avsc"', directory=directory)


def test_avro_record_becomes_row(tmp_path: Path) -> None:
    """Dates are those of the logical type, and null is a missing field."""
    at = datetime(2026, 3, 1, 17, 30, tzinfo=UTC)
    transform = avro_transform(tmp_path)

    order = avro_of({"amount": 2.5, "country": "FR", "at": at})
    assert array_of(transform, order, "avro/binary").tolist() == [[2.5, 1, 17]]
    order = avro_of({"amount": 1, "country": None, "at": at})
    assert array_of(transform, order, "application/avro").tolist() == [[1, -1, 17]]


def test_avro_array_of_records_becomes_rows(tmp_path: Path) -> None:
    """Its schema is that of an array."""
    schema = {"type": "array", "items": ORDER}
    orders = [{"amount": number, "country": "DE", "at": 0} for number in range(3)]
    transform = avro_transform(tmp_path, schema)

    assert array_of(transform, avro_of(orders, schema), "avro/binary")[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("change", [lambda one: one[:-1], lambda one: one + b"x"])
def test_avro_of_other_length_is_refused(tmp_path: Path, change: Any) -> None:
    """A value that ends early, or with bytes behind it, has another schema."""
    payload = change(avro_of({"amount": 1, "country": "DE", "at": 0}))
    error = refusal(avro_transform(tmp_path), payload, "avro/binary")

    assert error.code == Code.INVALID_REQUEST
    assert "order.avsc" in error.message


def test_missing_fastavro_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version cannot be served, and the reason says what to install."""
    monkeypatch.setitem(sys.modules, "fastavro", None)
    with pytest.raises(ConfigurationError, match=r"fastavro: pip install 'headrace\[avro\]'"):
        avro_transform(tmp_path)


def test_recursive_avro_schema_is_fault(tmp_path: Path) -> None:
    """A few bytes could exhaust the stack."""
    schema = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": "Node"}]}
    with pytest.raises(ConfigurationError, match="does not contain itself, got Node in itself"):
        avro_transform(tmp_path, schema)


def test_avro_union_whose_integers_would_be_written_as_floats_is_fault(tmp_path: Path) -> None:
    """Only where records are written: the library reads numbers without their types."""
    inner = {"type": "array", "items": ["null", "double", {"type": "long"}]}
    field = {"name": "ids", "type": ["null", inner]}
    schema = {"type": "record", "name": "Order", "fields": [field]}
    (tmp_path / "order.avsc").write_text(json.dumps(schema))
    settings = 'avro_schema = "order.avsc"\npass_through = '
    records_of('{ path = "ids.0" }', more=settings + "false", directory=tmp_path)

    with pytest.raises(ConfigurationError) as caught:
        records_of('{ path = "ids.0" }', more=settings + "true", directory=tmp_path)

    assert str(caught.value) == (
        "transform.record.avro_schema: order.avsc: expected int and long before float and double "
        'in a union, with pass_through, got ["null", "double", {"type": "long"}]'
    )


def test_numbers_are_scaled_by_column() -> None:
    """Mean and deviation are applied before numbers are rounded to the input's datatype."""
    transform = records_of('{ path = "a", mean = 10, deviation = 4 }, { path = "b" }')

    assert array_of(transform, b'[{"a": 12, "b": 1}, {"a": 6, "b": 2}]').tolist() == [
        [0.5, 1],
        [-1, 2],
    ]


@pytest.mark.parametrize(
    ("value", "got"), [('{"name": "DE"}', "an object of 1"), ('["DE"]', "an array of 1")]
)
def test_vocabulary_takes_no_lists_and_objects(value: str, got: str) -> None:
    """With a path that ends too early, all of them would be unknown."""
    transform = records_of('{ path = "a", vocabulary = ["DE"], unknown = 9 }', "INT64")

    caught = refusal(transform, f'{{"a": {value}}}'.encode())
    assert caught.message == f"rows[0].a: expected a string, got {got}"


@pytest.mark.parametrize("content", ["\ufeffx\na\u2028b\ny\n", "x\r\na\u2028b\r\ny"])
def test_only_line_ends_divide_vocabulary(tmp_path: Path, content: str) -> None:
    """An entry may hold what else a line could end at, and a mark may be before the first."""
    (tmp_path / "kinds.txt").write_bytes(content.encode())
    columns = '{ path = "kind", vocabulary = "kinds.txt", unknown = 9 }'
    transform = records_of(columns, "INT64", directory=tmp_path)

    payload = '[{"kind": "x"}, {"kind": "a\u2028b"}, {"kind": "y"}]'.encode()
    assert array_of(transform, payload).tolist() == [[0], [1], [2]]


def test_strings_become_places_in_vocabulary(tmp_path: Path) -> None:
    """From a file, one string a line; numbers and truth values as JSON writes them."""
    (tmp_path / "kinds.txt").write_text("red\n7\ntrue\n")
    columns = '{ path = "kind", vocabulary = "kinds.txt", unknown = 9 }'
    transform = records_of(columns, "INT64", directory=tmp_path)
    payload = b'[{"kind": "red"}, {"kind": 7}, {"kind": true}, {"kind": "blue"}]'

    assert array_of(transform, payload).tolist() == [[0], [1], [2], [9]]


@pytest.mark.parametrize(
    ("form", "number"),
    [
        ("seconds", 1772366400.0),
        ("days", 20513.5),
        ("year", 2026),
        ("month", 3),
        ("day", 1),
        ("weekday", 6),
        ("hour", 12),
    ],
)
def test_dates_become_numbers_in_utc(form: str, number: float) -> None:
    """With an offset, and without one."""
    transform = records_of(f'{{ path = "at", date = "{form}" }}', "FP64")
    payload = b'[{"at": "2026-03-01T13:00:00+01:00"}, {"at": "2026-03-01T12:00:00"}]'

    assert array_of(transform, payload).tolist() == [[number], [number]]


@pytest.mark.parametrize(
    ("datatype", "payload", "expected"),
    [
        ("INT64", b'{"v": 9007199254740993}', 9007199254740993),
        ("INT64", b'{"v": 3.0}', 3),
        ("UINT64", b'{"v": 18446744073709551615}', 2**64 - 1),
        ("BOOL", b'{"v": true}', True),
        ("BYTES", '{"v": "Grün"}'.encode(), "Grün".encode()),
        ("FP64", b'{"v": 0.1}', 0.1),
    ],
)
def test_value_keeps_precision_of_input(datatype: str, payload: bytes, expected: object) -> None:
    """Integers do not pass through floats."""
    transform = records_of('{ path = "v" }', datatype)

    assert array_of(transform, payload).tolist() == [[expected]]


@pytest.mark.parametrize(
    ("datatype", "text", "expected"),
    [
        ("INT32", b"-7", -7),
        ("INT32", b"3.0", 3),
        ("BOOL", b"True", True),
        ("BYTES", b"x", b"x"),
        ("FP32", b"1e3", 1e3),
    ],
)
def test_texts_of_csv_become_values(datatype: str, text: bytes, expected: object) -> None:
    """CSV has no other values."""
    transform = records_of('{ path = "v" }', datatype)

    assert array_of(transform, b"v\n" + text, CSV).tolist() == [[expected]]


@pytest.mark.parametrize("text", ["3.5", "nan", "9007199254740993.0"])
def test_text_that_is_no_exact_integer_is_refused_for_integers(text: str) -> None:
    """FP64 would round the last one."""
    error = refusal(records_of('{ path = "v" }', "INT64"), f"v\n{text}".encode(), CSV)

    assert error.message == f'rows[0].v: expected an integer, got "{text}"'


@pytest.mark.parametrize(
    ("datatype", "text"), [("INT32", "2024_01"), ("FP32", "1_0"), ("FP64", "1e999")]
)
def test_text_that_only_python_reads_as_number_is_refused(datatype: str, text: str) -> None:
    """It would silently become 202401, 10, or infinity; other formats refuse it."""
    error = refusal(records_of('{ path = "v" }', datatype), f"v\n{text}".encode(), CSV)

    assert error.code == Code.INVALID_TENSOR
    assert text in error.message


def test_infinity_in_csv_is_read() -> None:
    """Only digits that FP64 cannot hold are refused."""
    transform = records_of('{ path = "v" }')

    assert array_of(transform, b"v\n-inf", CSV).tolist() == [[-np.inf]]


def test_long_text_in_csv_is_read() -> None:
    """A text is as long as the payload may be, and not as the library's limit of 131,072."""
    transform = records_of('{ path = "v" }', "BYTES")
    text = b"x" * 200_000

    assert array_of(transform, b"v\n" + text, CSV).tolist() == [[text]]


@pytest.mark.parametrize(
    ("columns", "datatype", "value", "message"),
    [
        ('{ path = "a.b" }', "FP32", "null", "rows[1].a.b: expected a number, got nothing"),
        ('{ path = "a.b" }', "FP32", '"1"', 'rows[1].a.b: expected a number, got "1"'),
        ('{ path = "a.b" }', "FP32", "true", "rows[1].a.b: expected a number, got true"),
        ('{ path = "a.b" }', "FP32", "[]", "rows[1].a.b: expected a number, got an array of 0"),
        ('{ path = "a.b" }', "FP16", "1e6", "a number of FP16, got 1000000.0"),
        ('{ path = "a.b" }', "INT8", "300", "a number of INT8, got 300"),
        ('{ path = "a.b" }', "UINT8", "-1", "an integer of UINT8, got -1"),
        ('{ path = "a.b" }', "INT64", "1.5", "rows[1].a.b: expected an integer, got 1.5"),
        ('{ path = "a.b" }', "INT64", "9" * 30, "an integer of INT64"),
        ('{ path = "a.b" }', "BOOL", "1", "rows[1].a.b: expected true or false, got 1"),
        ('{ path = "a.b" }', "BYTES", "1", "rows[1].a.b: expected a string, got 1"),
        (
            '{ path = "a.b", vocabulary = ["0", "x"] }',
            "FP32",
            '"y"',
            'expected an entry of the vocabulary, got "y"',
        ),
        ('{ path = "a.b", date = "days", default = "2026-01-01" }', "FP32", "7", "ISO 8601, got 7"),
        (
            '{ path = "a.b", date = "days", default = "2026-01-01" }',
            "FP32",
            '"0001-01-01T00:00:00+14:00"',
            "as in ISO 8601",
        ),
    ],
)
def test_wrong_value_is_refused_with_row_and_path(
    columns: str, datatype: str, value: str, message: str
) -> None:
    """The message names the row, the path, the expected value and the value found."""
    good = '"2026-01-01"' if "date" in columns else "0"
    good = {"BOOL": "true", "BYTES": '"x"'}.get(datatype, good)
    payload = f'[{{"a": {{"b": {good}}}}}, {{"a": {{"b": {value}}}}}]'.encode()
    error = refusal(records_of(columns, datatype), payload)

    assert error.code == Code.INVALID_TENSOR
    assert message in error.message


@pytest.mark.parametrize(
    ("payload", "content_type", "message"),
    [
        (b'{"amount": 1', JSON, "payload: expected JSON, got "),
        (b"[" * 100_000, JSON, "payload: expected JSON, got "),
        (b"a,b", JSON, "payload: expected JSON, got malformed JSON: invalid character (byte 0)"),
        (b"[]", JSON, "payload: expected at least one record, got none"),
        (b"\xff", CSV, "payload: expected UTF-8, got byte 0xff at 0"),
        (b"", CSV, "payload: expected at least one record, got none"),
        (b"amount\n1\n1,2\n", CSV, "rows[1]: expected 1 fields, got 2"),
        (b'amount\n"1', CSV, "payload: expected CSV, got unexpected end of data in line 2"),
        (
            b"1",
            "image/jpeg",
            "header content-type: expected one of application/json, application/x-ndjson, text/csv",
        ),
        (b"1", "avro/binary", "header content-type: expected"),
    ],
)
def test_unreadable_payload_is_refused(payload: bytes, content_type: str, message: str) -> None:
    """The code is INVALID_REQUEST, and the message says where the fault is."""
    error = refusal(records_of(TWO), payload, content_type)

    assert error.code == Code.INVALID_REQUEST
    assert error.message.startswith(message)


def test_record_that_is_no_object_is_refused() -> None:
    """The row is told."""
    error = refusal(records_of(TWO), b'[{"amount": 1}, 2]')

    assert error.message == "rows[1]: expected an object, got 2"


def test_too_many_records_are_refused() -> None:
    """A short payload could become a large tensor by its defaults."""
    error = refusal(records_of('{ path = "v", default = 0 }', more="max_rows = 2"), b"[{},{},{}]")

    assert (error.code, error.message) == (
        Code.TOO_LARGE,
        "payload: expected at most max_rows = 2 records, got 3",
    )


@pytest.mark.parametrize(
    ("values", "is_read"),
    [
        (b"{}", False),
        (b"[]", False),
        (b"0", False),
        (b'"%b"' % (b"x" * 100), True),
    ],
    ids=["objects", "lists", "numbers", "texts"],
)
@pytest.mark.parametrize("content_type", [JSON, "application/x-ndjson"])
def test_json_whose_values_would_take_too_much_memory_is_too_large(
    content_type: str, values: bytes, is_read: bool
) -> None:
    """Two bytes may become hundreds. Texts take what they take in the payload."""
    payload = b'{"v": [%b]}\n' % b",".join([values] * 20_000)

    if is_read:
        assert len(read_json(payload, content_type, 1000, memory_bytes=1_000_000).rows) == 1
    else:
        with pytest.raises(Rejected, match="memory of its values") as caught:
            read_json(payload, content_type, 1000, memory_bytes=700_000)
        assert caught.value.code == Code.TOO_LARGE


@pytest.mark.parametrize(
    "text", ["0,", "00,", "\u0100,", "0\n", "\U0001f600\n", "0\r", "00,00\r\n"], ids=ascii
)
def test_csv_whose_fields_would_take_too_much_memory_is_too_large(text: str) -> None:
    """The estimate is at least what the fields take, besides their texts in the widest form."""
    payload = text.encode() * 10_000
    read = CsvReader((), ",")
    most_bytes = peak_bytes_of(lambda: read(payload, CSV)) - 16 * len(payload)

    def refuse() -> None:
        with pytest.raises(Rejected, match="memory of its values") as caught:
            read(payload, CSV, memory_bytes=most_bytes)
        assert caught.value.code == Code.TOO_LARGE

    assert peak_bytes_of(refuse) < 10 * len(payload) + 100_000


def test_long_csv_is_refused_before_memory_is_taken() -> None:
    """6 MB would take 350."""
    transform = records_of(TWO)
    payload = b"1\n" * 3_100_000

    assert peak_bytes_of(lambda: refusal(transform, payload, CSV)) < len(payload)
    assert refusal(transform, payload, CSV).code == Code.TOO_LARGE


def test_one_column_fills_flat_input() -> None:
    """An input of one dimension has no room for more."""
    config = make_model_config(ONE_COLUMN, make_settings({}))
    transform = make_transform(Path(), config, model_of(spec("x", "FP32", [-1])))

    assert array_of(transform, b'[{"v": 1}, {"v": 2}]').tolist() == [1, 2]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            'columns = ["amount", "amount"]',
            "columns: expected distinct names, none of them empty, got 'amount', 'amount'",
        ),
        (
            'columns = ["amount", ""]',
            "columns: expected distinct names, none of them empty, got 'amount', ''",
        ),
        (
            "delimiter = '\"'",
            "delimiter: expected neither a quotation mark nor a line end, got '\"'",
        ),
        (
            'format = "csv"\ncolumns = ["amuont", "customer.age"]',
            "inputs: expected each path among columns, amuont, customer.age, or with a default "
            "beside it, got amount",
        ),
    ],
)
def test_csv_that_no_record_can_be_read_from_is_fault_of_configuration(
    keys: str, message: str
) -> None:
    """Each record would be refused, or have the value of another column."""
    assert message in fault(TWO, more=keys)


@pytest.mark.parametrize(
    ("columns", "datatype", "message"),
    [
        ('{ path = "a", mean = 1 }', "INT64", "for an input of floats, got INT64"),
        ('{ path = "a", vocabulary = ["x"], mean = 1 }', "FP32", "only without a vocabulary"),
        ('{ path = "a", vocabulary = ["x"] }', "BYTES", "only for an input of numbers, got BYTES"),
        ('{ path = "a", vocabulary = ["x", "x"] }', "FP32", "each entry once, got 'x' again"),
        ('{ path = "a", vocabulary = "none.txt" }', "FP32", "vocabulary: expected a file"),
        ('{ path = "a", unknown = 1 }', "FP32", "unknown: expected vocabulary beside it"),
        ('{ path = "a", date = "days", vocabulary = ["x"] }', "FP32", "expected only one of them"),
        ('{ path = "a", deviation = 0 }', "FP32", "transform.record.inputs.x.0.deviation: "),
        ('{ path = "" }', "FP32", "transform.record.inputs.x.0.path: "),
        ("", "FP32", "transform.record.inputs.x: "),
    ],
)
def test_column_not_fitting_input_is_fault(columns: str, datatype: str, message: str) -> None:
    """Found when the model is read, not with the first record."""
    assert message in fault(columns, datatype)


def test_inputs_and_widths_must_be_those_of_model() -> None:
    """Each input has as many columns as it takes."""
    config = make_model_config(ONE_COLUMN, make_settings({}))
    with pytest.raises(ConfigurationError, match=r"for 1 columns, got \[-1, 2\]"):
        make_transform(Path(), config, model_of(spec("x", "FP32", [-1, 2])))
    with pytest.raises(ConfigurationError, match="expected the inputs z, got x"):
        make_transform(Path(), config, model_of(spec("z", "FP32", [-1, 1])))


def test_thousand_records_have_values_of_numpy() -> None:
    """Columns are what NumPy makes of the same numbers."""
    numbers = np.random.default_rng(3).standard_normal((1000, 2))
    payload = json.dumps([{"a": a, "b": b} for a, b in numbers.tolist()]).encode()
    transform = records_of('{ path = "a", mean = 0.5, deviation = 2 }, { path = "b" }')
    expected = np.stack([(numbers[:, 0] - 0.5) / 2, numbers[:, 1]], axis=1).astype(np.float32)

    assert np.array_equal(array_of(transform, payload), expected)


# --- pass_through -------------------------------------------------------------------------------


def merged(
    payload: bytes,
    content_type: str,
    outputs: Mapping[str, Any],
    *specs: TensorSpec,
    more: str = "",
    directory: Path = Path(),
) -> bytes:
    """Merge these outputs into a payload, for a model that takes the field `v`."""
    text = f"[transform.record]\npass_through = true\n{more}\n"
    text += '[transform.record.inputs]\nx = [{ path = "v" }]\n'
    config = make_model_config(tomllib.loads(text), make_settings({}))
    signature = make_signature([spec("x", "FP32", [-1, 1])], specs)
    transform = make_transform(directory, config, signature)
    assert isinstance(transform, Records)
    return transform.merge(payload, content_type, outputs)


def test_outputs_become_fields_of_records() -> None:
    """One value is a scalar, several are a list, text is a string; NaN is null."""
    found = merged(
        b'[{"v": 1, "n": "a"}, {"v": 2}]',
        JSON,
        {
            "p": np.array([[0.5], [np.nan]], np.float32),
            "q": np.array([[1, 2], [3, 4]], np.int64),
            "label": np.array([b"good", "größer".encode()], object),
            "flag": np.array([True, False]),
        },
        spec("p", "FP32", [-1, 1]),
        spec("q", "INT64", [-1, 2]),
        spec("label", "BYTES", [-1]),
        spec("flag", "BOOL", [-1]),
    )

    assert json.loads(found) == [
        {"v": 1, "n": "a", "p": 0.5, "q": [1, 2], "label": "good", "flag": True},
        {"v": 2, "p": None, "q": [3, 4], "label": "größer", "flag": False},
    ]


@pytest.mark.parametrize(
    ("payload", "content_type", "expected"),
    [
        (b' { "v": 1, "n": 1e2 }\n', JSON, b'{ "v": 1, "n": 1e2 ,"p":0.5}'),
        (b'[{"v":1.10,"n":123456789012345678901234567890}]', JSON, None),
        (b'{"v": 1.10}\n', "application/x-ndjson", b'{"v": 1.10,"p":0.5}\n'),
    ],
)
def test_fields_of_json_stay_as_they_are_written(
    payload: bytes, content_type: str, expected: bytes | None
) -> None:
    """Digits and spaces as well: an identifier may be a number that no float holds."""
    outputs = {"p": np.array([[0.5]], np.float32)}
    expected = expected or payload[:-2] + b',"p":0.5}]'

    assert merged(payload, content_type, outputs, spec("p", "FP32", [-1, 1])) == expected


def test_output_replaces_field_of_its_name() -> None:
    """A second pass of the same model leaves one score, and all digits of the other fields."""
    outputs = {"p": np.array([[0.5]], np.float32)}
    payload = b'{"v":1.10,"p":7,"n":123456789012345678901234567890}'

    found = merged(payload, JSON, outputs, spec("p", "FP32", [-1, 1]))
    assert found == b'{"v":1.10,"p":0.5,"n":123456789012345678901234567890}'


@pytest.mark.parametrize(
    ("more", "payload", "expected"),
    [
        ("", b'v,n\n1,"a,b"\n', b'v,n,p,q\r\n1,"a,b",0.5,"[1,2]"\r\n'),
        ('columns = ["v", "n"]\ndelimiter = ";"', b"1;a\n", b"1;a;0.5;[1,2]\r\n"),
        ("", b"p,v,n\n7,1,a\n", b'v,n,p,q\r\n1,a,0.5,"[1,2]"\r\n'),
        ("", b"v,,\n1,a,b\n", b'v,,,p,q\r\n1,a,b,0.5,"[1,2]"\r\n'),
    ],
    ids=["header", "names", "replaced", "names twice"],
)
def test_outputs_become_last_columns_of_csv(more: str, payload: bytes, expected: bytes) -> None:
    """With their names, if the fields have theirs; all columns stay that have other names."""
    outputs = {"p": np.array([[0.5]], np.float32), "q": np.array([[1, 2]], np.int64)}
    specs = (spec("p", "FP32", [-1, 1]), spec("q", "INT64", [-1, 2]))

    assert merged(payload, CSV, outputs, *specs, more=more) == expected


EVENT = {
    "type": "record",
    "name": "Event",
    "namespace": "shop",
    "fields": [
        {"name": "v", "type": "double"},
        {
            "name": "what",
            "type": [
                {"type": "record", "name": each, "fields": [{"name": "id", "type": "long"}]}
                for each in ("Placed", "Cancelled")
            ],
        },
        {"name": "by", "type": ["string", {"type": "enum", "name": "By", "symbols": ["A", "B"]}]},
    ],
}
EVENT_BYTES = b"\0\0\0\0\0\0\xf8\x3f" + b"\x02\x0a" + b"\x02\x02"
"""1.5, Cancelled with the id 5, B."""


@pytest.mark.parametrize(
    ("datatype", "values", "number", "code"),
    [
        ("FP32", np.array([[0.5]], np.float32), 2**40, Code.INVALID_REQUEST),
        ("UINT64", np.array([[2**64 - 1]], np.uint64), 1, Code.MODEL_FAILED),
    ],
    ids=["record", "output"],
)
def test_avro_that_cannot_be_written_says_whose_value_it_is(
    tmp_path: Path, datatype: str, values: Any, number: int, code: Code
) -> None:
    """Values beyond their types can be read: those of an `int` are as those of a `long`."""
    fields = [{"name": "v", "type": ["null", "int"]}]
    schema = {"type": "record", "name": "Order", "fields": fields}
    (tmp_path / "order.avsc").write_text(json.dumps(schema))
    longs = {**schema, "fields": [{"name": "v", "type": ["null", "long"]}]}
    payload = io.BytesIO()
    fastavro.schemaless_writer(payload, longs, {"v": number})

    with pytest.raises(Rejected, match="pass_through") as error:
        merged(
            payload.getvalue(),
            "avro/binary",
            {"p": values},
            spec("p", datatype, [-1, 1]),
            more='avro_schema = "order.avsc"',
            directory=tmp_path,
        )
    assert error.value.code == code


@pytest.mark.parametrize("is_list", [False, True], ids=["record", "array"])
def test_values_of_unions_of_avro_keep_their_types(tmp_path: Path, *, is_list: bool) -> None:
    """Also those whose fields are equal: an order that was cancelled was not placed."""
    schema = {"type": "array", "items": EVENT} if is_list else EVENT
    (tmp_path / "event.avsc").write_text(json.dumps(schema))
    outputs = {"p": np.array([[0.5]], np.float32)}
    payload = b"\x02%b\0" % EVENT_BYTES if is_list else EVENT_BYTES

    found = merged(
        payload,
        "avro/binary",
        outputs,
        spec("p", "FP32", [-1, 1]),
        more='avro_schema = "event.avsc"',
        directory=tmp_path,
    )

    written = EVENT_BYTES + b"\0\0\0\x3f"
    assert found == (b"\x02%b\0" % written if is_list else written)


def test_columns_are_found_in_unions_of_avro(tmp_path: Path) -> None:
    """In records of a union, and in a union of an enum."""
    (tmp_path / "event.avsc").write_text(json.dumps(EVENT))
    columns = '{ path = "what.id" }, { path = "by", vocabulary = ["A", "B"] }'
    transform = records_of(columns, more='avro_schema = "event.avsc"', directory=tmp_path)

    assert array_of(transform, EVENT_BYTES, "avro/binary").tolist() == [[5, 1]]


def test_output_of_other_rows_is_refused() -> None:
    """No record gets the outputs of another."""
    with pytest.raises(Rejected) as raised:
        merged(b'{"v": 1}', JSON, {"p": np.zeros((2, 1))}, spec("p", "FP64", [-1, 1]))

    assert raised.value.code == Code.MODEL_FAILED
    assert "output p: expected 1 rows, one for each record, got shape [2, 1]" in str(raised.value)


def test_model_without_rows_cannot_pass_through() -> None:
    """Its outputs belong to no record."""
    with pytest.raises(ConfigurationError, match="expected a row of outputs for each record"):
        merged(b'{"v": 1}', JSON, {}, spec("p", "FP32", [3]))
