"""Conversion of business records to a model's inputs: JSON objects, CSV, Avro and Protobuf.

A payload holds one record or several, which become rows. With `pass_through` the answer is the same
records with the outputs as further fields. Each field becomes a column of an input,
as `[transform.record]` in `model.toml` says. Columns are converted whole, with NumPy where a column
has one type; a value that does not fit is then looked for.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from datetime import time as clock_time
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias
from uuid import UUID

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import Code, ConfigurationError, NotLoadableHere, Rejected, describe_error
from headrace.models.config import RecordColumn, RecordTransform
from headrace.models.inputs.avro import INSTALL, AvroContainers, AvroSchema, AvroWriter, is_list
from headrace.models.inputs.framing import FramedSchemas, Framing
from headrace.models.processing import read_beside, read_in_version, read_lines
from headrace.models.schema_registry import SchemaRegistry
from headrace.models.signature import Signature, TensorSpec
from headrace.protocol.codec.faults import DECODE_ERRORS, describe_json_error, shown
from headrace.protocol.compression import too_large
from headrace.protocol.headers import JSON
from headrace.protocol.messages import InputTensor
from headrace.protocol.tensors import DATATYPES, from_array
from headrace.tuning import TUNING

if TYPE_CHECKING:
    from headrace.models.inputs.protobuf import ProtobufSchema

CSV = "text/csv"
JSON_LINES = frozenset({"application/x-ndjson", "application/ndjson", "application/jsonl"})
AVRO_BINARY = "avro/binary"
AVRO = frozenset({AVRO_BINARY, "application/avro", "application/vnd.apache.avro"})

AVRO_CONTAINER = "avro/container"
PROTOBUF = frozenset(
    {"application/x-protobuf", "application/protobuf", "application/vnd.google.protobuf"}
)

# The limit of the library is that of the process, and less than a text may have.
csv.field_size_limit(2**31 - 1)

_NUMBERS = frozenset({int, float, Decimal})
_WITH_KEY = (str, int, float, Decimal, date, clock_time, UUID)
"""Types of values that may be in a vocabulary, with those of Avro's logical types."""
_GROUPED = "_"
"""Python reads digits with it between them as a number, so that 2024_01 would be 202401."""
_INEXACT = 2**sys.float_info.mant_dig
"""FP64 has every integer below it, and this may be another one rounded."""
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}

Array: TypeAlias = NDArray[Any]


class Table(NamedTuple):
    """The records of a payload.

    Attributes:
        rows: one for each record: an object, the fields of a line, or a message of Protobuf.
        form: format of the payload.
        is_list: False if the payload is one record and no list of them.
        names: place of each field in a line; None if the rows are objects. Of fields with one name
            it is that of the last.
        header: names of all fields in a line, in order.
        write: writes rows with the outputs in them, if they are of a container of Avro.
    """

    rows: Sequence[Any]
    form: Literal["json", "lines", "csv", "avro", "container", "protobuf"]
    is_list: bool = True
    names: Mapping[str, int] | None = None
    header: Sequence[str] = ()
    write: Callable[[Sequence[Any]], bytes] | None = None


Reader: TypeAlias = Callable[[bytes, str], Table]


class Records:
    """Converts payloads to the inputs of one version.

    Args:
        directory: directory of the version, for files of vocabularies and schemas.
        registry: has the schemas of framed payloads.

    Attributes:
        pass_through: answers are the records with the outputs in them, see `merge`.
        framed: schemas of payloads with Confluent's framing, which must be fetched before a payload
            is converted or merged; None without framing.

    Raises:
        ConfigurationError: the columns do not fit the inputs, or a file or package is missing.
    """

    def __init__(
        self,
        config: RecordTransform,
        signature: Signature,
        directory: Path,
        registry: SchemaRegistry | None = None,
    ) -> None:
        specs = {spec.name: spec for spec in signature.inputs}
        if config.inputs.keys() != specs.keys():
            raise ConfigurationError(
                f"transform.record.inputs: expected the inputs {', '.join(sorted(specs))}, "
                f"got {', '.join(sorted(config.inputs)) or 'none'}"
            )
        if config.pass_through and not signature.batched:
            raise ConfigurationError(
                f"transform.record.pass_through: expected a row of outputs for each record, but "
                f"{signature.unbatched_reason}"
            )
        self.pass_through = config.pass_through
        self._config = config
        self._is_list = {spec.name: is_list(spec) for spec in signature.outputs}
        self._max_rows = config.max_rows
        protobuf = _read_descriptors(config, signature, directory)
        self._protobuf = protobuf
        self.framed: FramedSchemas | None = None
        if config.framing is not None:
            if registry is None:
                raise NotLoadableHere(
                    "transform.record.framing: expected schema_registry.url in the settings"
                )
            self.framed = FramedSchemas(registry, signature.outputs, config.subject, protobuf)
        avro = _read_avro_schema(config, directory)
        self._read = _make_reader(config, signature.outputs, avro, protobuf)
        self._write_avro = (
            avro.extend(signature.outputs).write if avro and config.pass_through else None
        )
        self._inputs = [
            _Input(spec, config.inputs[spec.name], directory) for spec in signature.inputs
        ]

    def __call__(self, payload: bytes, content_type: str) -> list[InputTensor]:
        """Return the inputs of a payload.

        Raises:
            Rejected: `INVALID_REQUEST` if it cannot be read, `INVALID_TENSOR` for a value that does
                not fit, `TOO_LARGE` for too many records.
        """
        if self.framed is None:
            table = self._read(payload, content_type)
        else:
            table = _read_framed(*self.framed.open(payload))
        if len(table.rows) > self._max_rows:
            expected = f"at most max_rows = {self._max_rows} records"
            raise Rejected.mismatch(
                Code.TOO_LARGE, "payload", expected=expected, got=str(len(table.rows))
            )
        if not table.rows:
            raise _unreadable("at least one record", "none")
        return [each.convert(table) for each in self._inputs]

    def expands(self, content_type: str) -> bool:
        """Return True if a payload may become many times its bytes."""
        form = self._config.format or _format_of(content_type)
        return self.framed is None and form == "avro_container"

    def is_slow(self, payload: bytes, content_type: str, inline_bytes: int) -> bool:
        """See `headrace.models.inputs.transforms.Transform`."""
        return len(payload) > inline_bytes or self.expands(content_type)

    def merge(self, payload: bytes, content_type: str, outputs: Mapping[str, Array]) -> bytes:
        """Return the records of a payload, in its format, with the outputs as further fields.

        An output with one value for each row is a number, a truth value or a string there, any
        other a flat list of them.

        Raises:
            Rejected: see `__call__`; `MODEL_FAILED` if an output has another number of rows.
        """
        if self.framed is None:
            return self._merge(
                self._read(payload, content_type), payload, self._write_avro, outputs
            )
        framing, record = self.framed.open(payload)
        write = None if framing.answers is None else framing.answers.write
        table = _read_framed(framing, record)
        return framing.answer_head + self._merge(table, record, write, outputs)

    def _merge(
        self,
        table: Table,
        payload: bytes,
        write_avro: AvroWriter | None,
        outputs: Mapping[str, Array],
    ) -> bytes:
        raw = self._protobuf.answer_bytes if self._protobuf and table.form == "protobuf" else ()
        count = len(table.rows)
        columns = {
            name: _values_of(
                name, array, count, is_list=self._is_list[name], is_text=name not in raw
            )
            for name, array in outputs.items()
        }
        if table.form == "csv":
            return self._write_csv(table, columns)
        added = [
            dict(zip(columns, fields, strict=True))
            for fields in zip(*columns.values(), strict=True)
        ]
        if table.form == "protobuf":
            assert self._protobuf is not None
            return self._protobuf.append(payload, added[0])
        write = table.write or (write_avro if table.form == "avro" else None)
        if write is not None:
            rows = [row | fields for row, fields in zip(table.rows, added, strict=True)]
            try:
                return write(rows if table.write or table.is_list else rows[0])
            except Rejected:
                raise
            except Exception as error:  # fastavro reads values that it does not write
                raise _unwritable(outputs, error) from error
        texts: Sequence[bytes | msgspec.Raw] = [payload]
        if table.form == "lines":
            texts = _split_json_lines(payload)
        elif table.is_list:
            texts = _split_json(payload)
        objects = list(map(_add_fields, texts, table.rows, added))
        if table.form == "lines":
            return b"".join([each + b"\n" for each in objects])
        return b"[" + b",".join(objects) + b"]" if table.is_list else objects[0]

    def _write_csv(self, table: Table, columns: Mapping[str, Sequence[Any]]) -> bytes:
        text = io.StringIO(newline="")
        writer = csv.writer(text, delimiter=self._config.delimiter)
        kept = [place for place, name in enumerate(table.header) if name not in columns]
        if not self._config.columns:
            writer.writerow([*(table.header[place] for place in kept), *columns])
        added = zip(*columns.values(), strict=True)
        writer.writerows(
            [*(row[place] for place in kept), *map(_text_of, fields)]
            for row, fields in zip(table.rows, added, strict=True)
        )
        return text.getvalue().encode()


def _unwritable(outputs: Mapping[str, Array], error: Exception) -> Rejected:
    """Return the refusal of records that cannot be written as Avro with the outputs in them."""
    most = np.iinfo(np.int64).max
    for name, array in outputs.items():
        if array.dtype == np.uint64 and array.size and array.max() > most:
            return Rejected.mismatch(
                Code.MODEL_FAILED,
                f"pass_through: output {name}",
                expected=f"integers up to {most}, as a long of Avro",
                got=str(array.max()),
            )
    return Rejected.mismatch(
        Code.INVALID_REQUEST,
        "payload",
        expected="values of their types in the schema, which pass_through can write again",
        got=describe_error(error),
    )


# --- reading ------------------------------------------------------------------------------------


def _read_avro_schema(config: RecordTransform, directory: Path) -> AvroSchema | None:
    if not config.avro_schema:
        return None
    text = read_beside(directory, config.avro_schema, "transform.record.avro_schema")
    return AvroSchema(text, config.avro_schema)


def _read_framed(framing: Framing, record: bytes) -> Table:
    if framing.protobuf is not None:
        return Table([framing.protobuf.read(record)], "protobuf", is_list=False)
    if framing.avro is None:
        return read_json(record, JSON)
    return _table_of(framing.avro.read(record), "avro")


def _read_descriptors(
    config: RecordTransform, signature: Signature, directory: Path
) -> ProtobufSchema | None:
    if not config.protobuf_message:
        return None
    descriptors = read_in_version(
        directory, config.protobuf_descriptors, "transform.record.protobuf_descriptors"
    )
    from headrace.models.inputs.protobuf import ProtobufSchema  # few models have one

    return ProtobufSchema(
        descriptors, config.protobuf_message, config.protobuf_answer, signature.outputs
    )


class _ProtobufReader:
    """Reads a message, which is one record."""

    def __init__(self, schema: ProtobufSchema) -> None:
        self._schema = schema

    def __call__(self, payload: bytes, _content_type: str) -> Table:
        return Table([self._schema.read(payload)], "protobuf", is_list=False)


def _make_reader(
    config: RecordTransform,
    outputs: Sequence[TensorSpec],
    avro: AvroSchema | None,
    protobuf: ProtobufSchema | None,
) -> Reader:
    """Return the reader of payloads: of one format, or by their content types."""
    readers: dict[str, Reader] = {
        "json": read_json,
        "csv": CsvReader(config.columns, config.delimiter),
    }
    if avro is not None:
        readers["avro"] = _AvroReader(avro)
    if importlib.util.find_spec("fastavro") is not None:
        readers["avro_container"] = _ContainerReader(AvroContainers(outputs, config.max_rows))
    if protobuf is not None:
        readers["protobuf"] = _ProtobufReader(protobuf)
    if config.format is not None:
        if config.format not in readers:
            needed = "avro_schema" if config.format == "avro" else f"fastavro ({INSTALL})"
            raise ConfigurationError(
                f"transform.record: expected {needed} beside format = {config.format}"
            )
        return readers[config.format]
    expected = ", ".join(_SHOWN_TYPES[form] for form in readers)

    def read(payload: bytes, content_type: str) -> Table:
        reader = readers.get(_format_of(content_type))
        if reader is None:
            raise Rejected.mismatch(
                Code.INVALID_REQUEST,
                "header content-type",
                expected=f"one of {expected}",
                got=content_type or "none",
            )
        return reader(payload, content_type)

    return read


_SHOWN_TYPES = {
    "json": f"{JSON}, application/x-ndjson",
    "csv": CSV,
    "avro": AVRO_BINARY,
    "avro_container": AVRO_CONTAINER,
    "protobuf": "application/x-protobuf",
}


def _format_of(content_type: str) -> str:
    if content_type == JSON or content_type.endswith("+json") or content_type in JSON_LINES:
        return "json"
    if content_type == CSV:
        return "csv"
    if content_type in AVRO:
        return "avro"
    if content_type == AVRO_CONTAINER:
        return "avro_container"
    return "protobuf" if content_type in PROTOBUF else ""


_decode_json = msgspec.json.Decoder().decode
_decode_json_lines = msgspec.json.Decoder().decode_lines
_split_json = msgspec.json.Decoder(list[msgspec.Raw]).decode
_split_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_split_json_lines = msgspec.json.Decoder(msgspec.Raw).decode_lines


_JSON_MEMORY = {b"{": 250, b"[": 64, b",": 40}
"""Bytes that the object, the list or the value takes for which such a character stands."""
_FIELD_BYTES, _LINE_BYTES = 88, 176
"""Bytes that a field of CSV takes besides its text, and a line with its last field."""


def read_json(
    payload: bytes,
    content_type: str,
    part_bytes: int = TUNING.protocol.payload_part_bytes,
    memory_bytes: int = TUNING.protocol.record_memory_bytes,
) -> Table:
    """Return the records of JSON. Those of more than `part_bytes` are decoded one by one, so that
    the thread releases the interpreter lock in between.

    Raises:
        Rejected: `INVALID_REQUEST` if they cannot be read, `TOO_LARGE` if their values would take
            more than `memory_bytes` of memory, besides their texts.
    """
    is_lines = content_type in JSON_LINES
    form: Literal["json", "lines"] = "lines" if is_lines else "json"
    if len(payload) > part_bytes:
        check_json_memory(payload, part_bytes, memory_bytes)
        # An error is raised again below, with its place in the payload.
        with suppress(*DECODE_ERRORS):
            texts = (_split_json_lines if is_lines else _split_json)(payload)
            return _table_of([_decode_json(text) for text in texts], form)
    try:
        found = (_decode_json_lines if is_lines else _decode_json)(payload)
    except DECODE_ERRORS as error:
        raise _unreadable("JSON", describe_json_error(error, payload)) from error
    return _table_of(found, form)


def check_json_memory(
    payload: bytes,
    part_bytes: int = TUNING.protocol.payload_part_bytes,
    memory_bytes: int = TUNING.protocol.record_memory_bytes,
) -> None:
    """Refuse JSON whose values would take too much memory, before any of them is made.

    Raises:
        Rejected: `TOO_LARGE`.
    """
    _check_memory(payload, _JSON_MEMORY, part_bytes, memory_bytes)


def _check_memory(
    payload: bytes, memory_of: Mapping[bytes, int], part_bytes: int, memory_bytes: int
) -> None:
    """Refuse records whose values would take too much memory, before any of them is made. Each
    character of `memory_of` stands for so many bytes of memory.
    """
    found = 0
    for start in range(0, len(payload), part_bytes):
        part = payload[start : start + part_bytes]
        found += sum([part.count(mark) * size for mark, size in memory_of.items()])
        if found > memory_bytes:
            raise too_large("payload: memory of its values", memory_bytes)


def _table_of(found: object, form: Literal["json", "lines", "avro", "container"]) -> Table:
    """Return the records of a value that is one, or a list of them."""
    rows = found if isinstance(found, list) else [found]
    if form in ("avro", "container"):
        rows = [_untyped(row) for row in rows]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise _misfit(number, "", "an object", row)
    return Table(rows, form, is_list=isinstance(found, list))


class _AvroReader:
    """Reads values in Avro's binary encoding."""

    def __init__(self, schema: AvroSchema) -> None:
        self._schema = schema

    def __call__(self, payload: bytes, _content_type: str) -> Table:
        return _table_of(self._schema.read(payload), "avro")


class _ContainerReader:
    """Reads Avro's object container files, whose schemas are in them."""

    def __init__(self, containers: AvroContainers) -> None:
        self._containers = containers

    def __call__(self, payload: bytes, _content_type: str) -> Table:
        rows, schema, codec = self._containers.read(payload)
        table = _table_of(rows, "container")
        return table._replace(write=partial(self._containers.write, schema=schema, codec=codec))


class CsvReader:
    """Reads lines of comma-separated values (RFC 4180).

    Args:
        names: names of the fields; empty: the first line has them.
        delimiter: the character between fields.
    """

    def __init__(self, names: Sequence[str], delimiter: str) -> None:
        self._names = tuple(names)
        self._delimiter = delimiter
        # Of a character that is several bytes, the last one; parts may end within it.
        ends = {b"\n": _LINE_BYTES, b"\r": _LINE_BYTES}
        self._memory_of = {delimiter.encode()[-1:]: _FIELD_BYTES, **ends}

    def __call__(
        self,
        payload: bytes,
        _content_type: str,
        part_bytes: int = TUNING.protocol.payload_part_bytes,
        memory_bytes: int = TUNING.protocol.record_memory_bytes,
    ) -> Table:
        """Return the lines.

        Raises:
            Rejected: `INVALID_REQUEST` if they cannot be read, `TOO_LARGE` if their fields would
                take more than `memory_bytes` of memory, besides their texts.
        """
        _check_memory(payload, self._memory_of, part_bytes, memory_bytes)
        try:
            text = payload.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            got = f"byte {payload[error.start]:#04x} at {error.start}"
            raise _unreadable("UTF-8", got) from error
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=self._delimiter, strict=True)
        try:
            rows = [line for line in lines if line]
        except csv.Error as error:
            raise _unreadable("CSV", f"{error} in line {lines.line_num}") from error
        names = self._names
        if not names and rows:
            names, rows = tuple(rows[0]), rows[1:]
        for number, row in enumerate(rows):
            if len(row) != len(names):
                expected, got = f"{len(names)} fields", str(len(row))
                raise Rejected.mismatch(
                    Code.INVALID_REQUEST, f"rows[{number}]", expected=expected, got=got
                )
        places = {name: place for place, name in enumerate(names)}
        return Table(rows, "csv", names=places, header=names)


def _values_of(
    name: str, array: Array, rows: int, *, is_list: bool, is_text: bool = True
) -> list[Any]:
    """Return the values of an output for each record; `is_text` if those of BYTES are strings."""
    if array.shape[:1] != (rows,):
        raise Rejected.mismatch(
            Code.MODEL_FAILED,
            f"output {name}",
            expected=f"{rows} rows, one for each record",
            got=f"shape {list(array.shape)}",
        )
    if array.dtype.kind == "O" and is_text:
        texts = np.empty(array.shape, dtype=object)
        texts.ravel()[:] = [each.decode("utf-8", "replace") for each in array.ravel()]
        array = texts
    elif array.dtype.kind not in "biufO":  # BF16
        array = array.astype(np.float32)
    values: list[Any] = array.reshape(rows, -1).tolist()
    return values if is_list else [row[0] for row in values]


def _add_fields(
    text: bytes | msgspec.Raw, row: Mapping[str, Any], fields: Mapping[str, Any]
) -> bytes:
    """Return a JSON object with further fields, which replace those of the same names. All others
    stay as they are written, so that no number loses digits.
    """
    if fields.keys() & row.keys():
        return msgspec.json.encode({**_split_fields(text), **fields})
    added = msgspec.json.encode(fields)
    return bytes(text).strip()[:-1] + (b"," if row else b"") + added[1:]


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


# --- columns ------------------------------------------------------------------------------------


class _Input:
    """One input of the model, and its columns."""

    def __init__(self, spec: TensorSpec, columns: Sequence[RecordColumn], directory: Path) -> None:
        where = f"transform.record.inputs.{spec.name}"
        is_flat = len(spec.shape) == 1 and len(columns) == 1
        if not is_flat and (len(spec.shape) != 2 or spec.shape[1] not in (-1, len(columns))):
            raise ConfigurationError(
                f"{where}: expected an input of [-1, {len(columns)}] for {len(columns)} columns, "
                f"got {list(spec.shape)}"
            )
        self._name = spec.name
        self._is_flat = is_flat
        self._columns = [_Column(each, spec.datatype, where, directory) for each in columns]

    def convert(self, table: Table) -> InputTensor:
        """Return the input, with a row for each record."""
        is_text = table.names is not None
        columns = [
            column.convert(column.extract(table), is_text=is_text) for column in self._columns
        ]
        array = columns[0] if self._is_flat else np.stack(columns, axis=1)
        tensor = from_array(self._name, array)
        return InputTensor(
            name=tensor.name,
            datatype=tensor.datatype,
            shape=list(tensor.shape),
            data=memoryview(tensor.data),
        )


class _Column:
    """One field of the records, and its conversion."""

    def __init__(self, config: RecordColumn, datatype: str, where: str, directory: Path) -> None:
        self._config = config
        self._path = config.parts
        self._shown_path = ".".join(config.parts)
        self._dtype = DATATYPES[datatype].dtype
        self._datatype = datatype
        self._vocabulary = _read_vocabulary(config, directory)
        kind = self._dtype.kind
        is_scaled = config.mean != 0 or config.deviation != 1
        if is_scaled and (kind in "biu" or datatype == "BYTES" or self._vocabulary is not None):
            raise ConfigurationError(
                f"{where}: {self._shown_path}: expected mean and deviation only without a "
                f"vocabulary, for an input of floats, got {datatype}"
            )
        if datatype in ("BYTES", "BOOL") and (self._vocabulary is not None or config.date):
            raise ConfigurationError(
                f"{where}: {self._shown_path}: expected vocabulary and date only for an input of "
                f"numbers, got {datatype}"
            )
        if config.default is not None:
            self._check_default(config.default, where)

    def _check_default(self, default: object, where: str) -> None:
        # Otherwise it would be an error of each caller whose record lacks the field.
        try:
            self.convert([default], is_text=True)
        except Rejected as error:
            _, _, fault = error.message.partition(": ")
            raise ConfigurationError(f"{where}: {self._shown_path}: default: {fault}") from error

    def extract(self, table: Table) -> list[Any]:
        """Return the field of each record; None where it is missing or null."""
        path, rows = self._path, table.rows
        if table.form == "protobuf":
            from headrace.models.inputs.protobuf import follow

            return [follow(row, path) for row in rows]
        if table.names is None:
            if len(path) == 1 and table.form in ("json", "lines"):
                (name,) = path
                return [row.get(name) for row in rows]
            return [_follow(row, path) for row in rows]
        place = table.names.get(self._shown_path)
        if place is None:
            return [None] * len(rows)
        if self._datatype == "BYTES" and self._config.default is None:
            return [row[place] for row in rows]
        return [row[place] or None for row in rows]

    def convert(self, values: list[Any], *, is_text: bool) -> Array:
        """Return the column of these values; `is_text` if numbers are texts, as in CSV."""
        config = self._config
        if None in values:
            if config.default is None:
                self._fail(values, lambda value: value is not None, self._expected())
            values = [config.default if value is None else value for value in values]
        if self._datatype == "BYTES":
            return self._texts(values)
        if self._datatype == "BOOL":
            return self._truths(values, is_text=is_text)
        if self._vocabulary is not None:
            return self._fit(np.array(self._look_up(values, self._vocabulary)), values)
        if config.date is not None:
            values = self._dates(values)
        numbers = self._numbers(values, is_text=is_text and config.date is None)
        if numbers.dtype.kind == "f":
            numbers = (numbers - config.mean) / config.deviation
        return self._fit(numbers, values)

    def _expected(self) -> str:
        if self._vocabulary is not None or self._datatype == "BYTES":
            return "a string"
        if self._config.date is not None:
            return "a date"
        return {"b": "true or false", "f": "a number"}.get(self._dtype.kind, "an integer")

    def _texts(self, values: list[Any]) -> Array:
        column = np.empty(len(values), dtype=object)
        for number, value in enumerate(values):
            if not isinstance(value, str | bytes):
                raise _misfit(number, self._shown_path, "a string", value)
            column[number] = value.encode() if isinstance(value, str) else value
        return column

    def _truths(self, values: list[Any], *, is_text: bool) -> Array:
        read = [_as_truth(value) for value in values] if is_text else values
        self._fail(read, lambda value: isinstance(value, bool), "true or false")
        return np.array(read, dtype=np.bool_)

    def _look_up(self, values: list[Any], vocabulary: Mapping[str, int]) -> list[int]:
        keys = [_key(value) for value in values]
        if None in keys:  # or a path that ends too early would give unknown strings alone
            number = keys.index(None)
            raise _misfit(number, self._shown_path, "a string", values[number])
        found = [vocabulary.get(key or "", self._config.unknown) for key in keys]
        if None in found:
            number = found.index(None)
            raise _misfit(number, self._shown_path, "an entry of the vocabulary", values[number])
        return [index for index in found if index is not None]

    def _dates(self, values: list[Any]) -> list[Any]:
        return [self._date(number, value) for number, value in enumerate(values)]

    def _date(self, number: int, value: Any) -> float:
        moment = value
        try:
            if isinstance(value, str):
                moment = datetime.fromisoformat(value)
            elif isinstance(value, date) and not isinstance(value, datetime):
                moment = datetime(value.year, value.month, value.day, tzinfo=UTC)
            if not isinstance(moment, datetime):
                raise TypeError
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            return _DATES[self._config.date or "seconds"](moment.astimezone(UTC))
        except (TypeError, ValueError, OverflowError):  # the last one near the years 1 and 9999
            raise _misfit(number, self._shown_path, "a date as in ISO 8601", value) from None

    def _numbers(self, values: list[Any], *, is_text: bool) -> Array:
        """Return values as FP64; as integers if the input is of integers."""
        if self._dtype.kind in "iu":
            return self._integers(values, is_text=is_text)
        if is_text:
            values = [_as_float(value) for value in values]
        if not set(map(type, values)) <= _NUMBERS:
            self._fail(values, lambda value: type(value) in _NUMBERS, "a number")
        try:
            return np.array(values, dtype=np.float64)
        except OverflowError:
            self._fail(values, _fits_float, "a number of FP64")
            raise

    def _integers(self, values: list[Any], *, is_text: bool) -> Array:
        if is_text:
            values = [_as_integer_text(value) for value in values]
        if set(map(type, values)) != {int}:
            values = [_as_integer(value) for value in values]
            self._fail(values, lambda value: type(value) is int, "an integer")
        try:
            return np.array(values, dtype=np.uint64 if self._dtype.kind == "u" else np.int64)
        except OverflowError:
            self._fail(values, self._fits_integer, f"an integer of {self._datatype}")
            raise

    def _fits_integer(self, value: int) -> bool:
        info = np.iinfo(self._dtype)
        return int(info.min) <= value <= int(info.max)

    def _fit(self, numbers: Array, values: list[Any]) -> Array:
        """Return numbers in the datatype of the input, which must be able to hold them."""
        if self._dtype.kind in "iu":
            info = np.iinfo(self._dtype)
            fits = (numbers >= info.min) & (numbers <= info.max)
            column = numbers.astype(self._dtype)
        else:
            with np.errstate(over="ignore"):
                column = numbers.astype(self._dtype)
            fits = np.isfinite(column.astype(np.float64)) | ~np.isfinite(numbers)
        if not fits.all():
            number = int(np.argmin(fits))
            raise _misfit(number, self._shown_path, f"a number of {self._datatype}", values[number])
        return column

    def _fail(self, values: list[Any], fits: Callable[[Any], bool], expected: str) -> None:
        """Refuse the first value that does not fit, if there is one."""
        for number, value in enumerate(values):
            if not fits(value):
                raise _misfit(number, self._shown_path, expected, value)


_DATES: dict[str, Callable[[datetime], float]] = {
    "seconds": datetime.timestamp,
    "days": lambda moment: moment.timestamp() / 86_400,
    "year": lambda moment: moment.year,
    "month": lambda moment: moment.month,
    "day": lambda moment: moment.day,
    "weekday": lambda moment: moment.weekday(),
    "hour": lambda moment: moment.hour,
}


def _read_vocabulary(config: RecordColumn, directory: Path) -> dict[str, int] | None:
    entries = config.vocabulary
    if not entries:
        return None
    if isinstance(entries, str):
        entries = tuple(read_lines(directory, entries, "transform.record: vocabulary"))
    found: dict[str, int] = {}
    for place, entry in enumerate(entries):
        if entry in found:
            raise ConfigurationError(
                f"transform.record: {'.'.join(config.parts)}: vocabulary: expected each entry "
                f"once, got {entry!r} again"
            )
        found[entry] = place
    return found


def _follow(row: Any, path: Sequence[str]) -> Any:
    """Return the value at a path through objects, and lists by number; None if there is none."""
    for name in path:
        if isinstance(row, dict):
            row = row.get(name)
        elif isinstance(row, list) and name.isdecimal() and len(name) < 10:
            row = row[int(name)] if int(name) < len(row) else None
        else:
            return None
        row = _untyped(row)
    return row


def _untyped(value: Any) -> Any:
    """Return the value that a union of Avro has, without the name of its type."""
    return value[1] if isinstance(value, tuple) else value


def _key(value: object) -> str | None:
    """Return the string that a value is in a vocabulary; None for lists, objects and bytes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, _WITH_KEY) else None


def _as_truth(value: Any) -> Any:
    """Return the truth value in a text; anything else unchanged."""
    return _TRUTHS.get(value.lower(), value) if isinstance(value, str) else value


def _as_float(value: Any) -> Any:
    """Return the number in a text; anything else, and digits beyond FP64, unchanged."""
    if not isinstance(value, str) or _GROUPED in value:
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return value if math.isinf(number) and any(map(str.isdecimal, value)) else number


def _as_integer_text(value: Any) -> Any:
    """Return the integer in a text; anything else unchanged."""
    if not isinstance(value, str) or _GROUPED in value:
        return value
    with suppress(ValueError):
        return int(value)
    # Programs that keep a column with missing values as floats write 3.0.
    number = _as_float(value)
    is_exact = isinstance(number, float) and abs(number) < _INEXACT
    return int(number) if is_exact and number.is_integer() else value


def _fits_float(value: Any) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _as_integer(value: Any) -> Any:
    """Return an integer in its own type; anything else unchanged."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Decimal) and value.is_finite() and value == value.to_integral_value():
        return int(value)
    return value


def _misfit(number: int, path: str, expected: str, got: object) -> Rejected:
    where = f"rows[{number}]" + (f".{path}" if path else "")
    text = "nothing" if got is None else _shown(got)
    return Rejected.mismatch(Code.INVALID_TENSOR, where, expected=expected, got=text)


def _shown(value: object) -> str:
    try:
        return shown(value)
    except (TypeError, ValueError, msgspec.MsgspecError):
        return type(value).__name__


def _unreadable(expected: str, got: str) -> Rejected:
    return Rejected.mismatch(Code.INVALID_REQUEST, "payload", expected=expected, got=got)
