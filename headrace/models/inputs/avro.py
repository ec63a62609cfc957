"""Avro's binary encoding of records: read by a schema, and written with outputs as fields."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable, Sequence
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from functools import cache
from typing import Any, NamedTuple

from headrace.errors import Code, ConfigurationError, Rejected, describe_error
from headrace.models.schema_registry import Bounded
from headrace.models.signature import TensorSpec
from headrace.protocol.compression import too_large
from headrace.tuning import TUNING, SchemaTuning

CONTAINER = b"Obj\x01"
"""First bytes of an object container file."""
_SYNC_BYTES = 16
_CODECS = ("null", "deflate")
_DICT_BYTES, _FIELD_BYTES, _LIST_BYTES, _PAIR_BYTES = 250, 50, 64, 56
_NUMBERS = {"null": 0, "float": 4, "double": 8}
INSTALL = "pip install 'headrace[avro]'"


class AvroSchema:
    """A schema of payloads: of a record, or of an array of records.

    Args:
        text: the schema in JSON.
        name: where it comes from, for messages.

    Attributes:
        expansion: bytes of memory that a byte of records and lists in arrays and maps may take.

    Raises:
        ConfigurationError: it is no such schema, it contains itself, few bytes may be very many
            values by it, or fastavro is missing.
    """

    def __init__(self, text: str, name: str, tuning: SchemaTuning = TUNING.schemas) -> None:
        try:
            import fastavro
        except ImportError as error:
            raise ConfigurationError(
                f"transform.record: Avro needs the package fastavro: {INSTALL}"
            ) from error
        _replace_decimals(fastavro)
        self._fastavro = fastavro
        self._text = text
        self._name = name
        self._max_empty = tuning.max_empty_values
        self._limit_memory_bytes = tuning.max_avro_memory_bytes
        self.expansion = 0.0
        self._schema = self._parse(text)
        self._longs = fastavro.parse_schema("long")
        self._items = self._find_items()
        # Where the records of an array are read one by one, their number bounds their memory.
        of_items = None if self._items is None else _measure(self._items, {}, self._max_empty)
        self._item_bytes = 0 if of_items is None else of_items.memory_bytes
        self._inner_expansion = self.expansion if of_items is None else of_items.expansion

    def _find_items(self) -> Any:
        """Return the schema of the records in an array; None for another schema."""
        schema = self._schema
        if not isinstance(schema, dict) or schema.get("type") != "array":
            return None
        items = json.loads(self._text)["items"]
        is_record = isinstance(items, dict) and items.get("type") == "record"
        return self._fastavro.parse_schema(items) if is_record else None

    def _parse(self, text: str) -> Any:
        try:
            schema = self._fastavro.parse_schema(json.loads(text))
            _refuse_recursion(schema, ())
            self.expansion = _measure(schema, {}, self._max_empty).expansion
        except Exception as error:  # fastavro has no common class for what a wrong schema may raise
            raise ConfigurationError(
                f"transform.record.avro_schema: {self._name}: {describe_error(error)}"
            ) from error
        return schema

    def read(self, payload: bytes | memoryview) -> Any:
        """Return the value of a payload. Raises `Rejected`.

        A record, enum or fixed in a union is a pair of its type's name and the value: types of a
        union may have equal fields, so that it could not be written as the same type without it.
        """
        if len(payload) * self._inner_expansion > self._limit_memory_bytes:
            raise _too_much_memory(self._limit_memory_bytes)
        stream = io.BytesIO(payload)
        found = self._read_items(stream) or self.read_next(stream)
        if stream.tell() != len(payload):
            got = f"{len(payload)} bytes, of which {stream.tell()} are a value"
            raise _unreadable(f"one value as in {self._name}", got)
        return found

    def _read_items(self, stream: io.BytesIO) -> list[Any]:
        """Return the records of an array. They are read one by one, so that the thread releases the
        interpreter lock in between.

        The list is empty, and the stream is at its beginning, if they cannot be read in this way.
        """
        if self._items is None:
            return []
        read: Any = self._fastavro.schemaless_reader
        found: list[Any] = []
        try:
            while count := read(stream, self._longs, None):
                if count < 0:
                    read(stream, self._longs, None)  # the size of the block in bytes
                if (len(found) + abs(count)) * self._item_bytes > self._limit_memory_bytes:
                    raise _too_much_memory(self._limit_memory_bytes)
                found += [
                    read(stream, self._items, None, return_named_type=True)
                    for _ in range(abs(count))
                ]
        except Rejected:
            raise
        except Exception:  # noqa: BLE001 - `read_next` finds and describes it
            stream.seek(0)
            return []
        if not found:
            stream.seek(0)
        return found

    def read_next(self, stream: io.BytesIO) -> Any:
        """Return the next value of a stream, see `read`. Raises `Rejected`."""
        try:
            return self._fastavro.schemaless_reader(
                stream, self._schema, None, return_named_type=True
            )
        except Exception as error:  # whatever bytes may make the library raise is the caller's
            end = len(stream.getbuffer())
            got = f"{describe_error(error)} at byte {stream.tell()}"
            if isinstance(error, EOFError | IndexError) and stream.tell() == end:
                got = f"a value that ends at byte {end}"
            raise _unreadable(f"Avro as in {self._name}", got) from error

    def write_container(self, rows: Sequence[Any], codec: str) -> bytes:
        """Return an object container file with values in this schema."""
        stream = io.BytesIO()
        self._fastavro.writer(stream, self._schema, rows, codec=codec)
        return stream.getvalue()

    def extend(self, outputs: Sequence[TensorSpec]) -> AvroSchema:
        """Return the schema of the same records with these outputs as their last fields, which
        replace fields of the same names.

        Raises:
            ConfigurationError: they cannot be fields, or a record cannot be written as it was read.
        """
        _refuse_inexact_unions(json.loads(self._text), self._name)
        added = [{"name": spec.name, "type": _type_of(spec)} for spec in outputs]
        names = {spec.name for spec in outputs}
        schema = json.loads(self._text)
        is_array = isinstance(schema, dict) and schema.get("type") == "array"
        record = schema["items"] if is_array else schema
        if not isinstance(record, dict) or "fields" not in record:
            raise ConfigurationError(
                f"transform.record.avro_schema: {self._name}: expected a record, or an array of "
                "records"
            )
        record["fields"] = [each for each in record["fields"] if each["name"] not in names] + added
        return AvroSchema(json.dumps(schema), self._name)

    @property
    def text(self) -> str:
        """The schema in JSON."""
        return self._text

    def write(self, value: Any) -> bytes:
        """Return a value in this schema."""
        stream = io.BytesIO()
        self._fastavro.schemaless_writer(stream, self._schema, value)
        return stream.getvalue()


@cache
def _replace_decimals(fastavro: Any) -> None:
    """Replace the library's reader of decimals.

    Python takes time by the square of their size: one of 100 KB takes seconds, and deflate makes
    100 bytes of it. And the library rounds them, to a precision that all threads share.
    """
    for kind in ("bytes-decimal", "fixed-decimal"):
        fastavro.read.LOGICAL_READERS[kind] = _read_decimal


_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)


def _read_decimal(data: bytes, schema: Any, _readers_schema: Any = None) -> Decimal:
    most = TUNING.schemas.max_decimal_bytes
    if len(data) > most:
        raise ValueError(f"a decimal of {len(data)} bytes, expected at most {most}")
    unscaled = Decimal(int.from_bytes(data, "big", signed=True))
    return unscaled.scaleb(-schema.get("scale", 0), _EXACT)


class AvroContainers:
    """Object container files as payloads: records behind their own schema, in blocks.

    Sizes are bounded before the bytes are made, which fastavro does not do. Source: Avro 1.12,
    https://avro.apache.org/docs/1.12.0/specification/#object-container-files

    Args:
        outputs: further fields of the answers.
        max_rows: most records of a file.
    """

    def __init__(
        self, outputs: Sequence[TensorSpec], max_rows: int, tuning: SchemaTuning = TUNING.schemas
    ) -> None:
        self._outputs = tuple(outputs)
        self._max_rows = max_rows
        self._limit_bytes = tuning.max_container_bytes
        self._limit_memory_bytes = tuning.max_avro_memory_bytes
        self._longs = AvroSchema('"long"', "container")
        self._maps = AvroSchema('{"type": "map", "values": "bytes"}', "container")
        self._schemas: Bounded[str, AvroSchema] = Bounded(tuning.container_schemas)

    def read(self, payload: bytes) -> tuple[list[Any], AvroSchema, str]:
        """Return the records of a file, their schema, and the name of its codec.

        Raises:
            Rejected: `INVALID_REQUEST` for a file that is damaged, `TOO_LARGE` for one that yields
                too much.
        """
        if payload[: len(CONTAINER)] != CONTAINER:
            got = payload[: len(CONTAINER)].hex() or "nothing"
            raise _unreadable(f"an Avro container, which begins with {CONTAINER.hex()}", got)
        stream = io.BytesIO(payload)
        stream.seek(len(CONTAINER))
        metadata = _read_part(self._maps, stream, "metadata")
        sync = _read_bytes(stream, _SYNC_BYTES, "the mark behind the metadata")
        codec = metadata.get("avro.codec", b"null").decode("utf-8", "replace")
        if codec not in _CODECS:
            raise _unreadable(f"a container with one of the codecs {', '.join(_CODECS)}", codec)
        schema = self._find_schema(metadata.get("avro.schema", b""))
        rows: list[Any] = []
        left_bytes, left_memory_bytes = self._limit_bytes, self._limit_memory_bytes
        while stream.tell() < len(payload):
            head = "the head of a block"
            count = _read_part(self._longs, stream, head)
            size = _read_part(self._longs, stream, head)
            start = stream.tell()
            block = _read_bytes(stream, max(0, size), "a block")
            mark = _read_bytes(stream, _SYNC_BYTES, "the mark behind a block")
            if size < 0 or mark != sync or count < 0:
                raise _unreadable("a whole block of an Avro container", f"none at byte {start}")
            if len(rows) + count > self._max_rows:
                expected, got = f"at most max_rows = {self._max_rows} records", "more"
                raise Rejected.mismatch(Code.TOO_LARGE, "payload", expected=expected, got=got)
            content = io.BytesIO(_inflate(block, codec, left_bytes))
            if len(content.getbuffer()) * schema.expansion > left_memory_bytes:
                raise _too_much_memory(self._limit_memory_bytes)
            rows += (found := [schema.read_next(content) for _ in range(count)])
            if content.tell() != len(content.getbuffer()):
                raise _unreadable(f"{count} records in a block", f"bytes behind them at {start}")
            left_bytes -= len(content.getbuffer())
            if schema.expansion > 0:
                left_memory_bytes = max(0, left_memory_bytes - _memory_of(found))
        return rows, schema, codec

    def write(self, rows: Sequence[Any], schema: AvroSchema, codec: str) -> bytes:
        """Return a file with records that have the outputs."""
        return self._find_extended(schema).write_container(rows, codec)

    def _find_schema(self, text: bytes) -> AvroSchema:
        found = self._schemas.get(text.decode("utf-8", "replace"))
        if found is None:
            try:
                found = AvroSchema(text.decode(), "the container")
            except (ConfigurationError, UnicodeDecodeError) as error:
                raise _unreadable("a container with a schema", str(error)) from error
            self._schemas.put(found.text, found)
        return found

    def _find_extended(self, schema: AvroSchema) -> AvroSchema:
        key = f"extended {schema.text}"
        found = self._schemas.get(key)
        if found is None:
            try:
                found = schema.extend(self._outputs)
            except ConfigurationError as error:
                raise _unreadable("a container of records", str(error)) from error
            self._schemas.put(key, found)
        return found


def _read_part(schema: AvroSchema, stream: io.BytesIO, what: str) -> Any:
    """Return the next value of a file. Raises `Rejected`."""
    start = stream.tell()
    try:
        return schema.read_next(stream)
    except Rejected as error:
        end = len(stream.getbuffer())
        if stream.tell() < end:
            raise
        expected = f"{what} from byte {start} on"
        raise _unreadable(expected, f"a file that ends at byte {end}") from error


def _read_bytes(stream: io.BytesIO, size: int, what: str) -> bytes:
    """Return the next bytes of a file. Raises `Rejected` if it has fewer."""
    start = stream.tell()
    content = stream.read(size)
    if len(content) < size:
        end = start + len(content)
        expected = f"{what} in bytes {start} to {start + size}"
        raise _unreadable(expected, f"a file that ends at byte {end}")
    return content


def _memory_of(value: dict[str, Any] | list[Any] | tuple[str, Any]) -> int:
    """Return the bytes that records and lists take in memory, besides numbers and texts in them."""
    own, inner = _LIST_BYTES, value
    if isinstance(value, dict):
        own, inner = _DICT_BYTES + _FIELD_BYTES * len(value), list(value.values())
    elif isinstance(value, tuple):
        own = _PAIR_BYTES
    return own + sum([_memory_of(each) for each in inner if isinstance(each, dict | list | tuple)])


def _inflate(block: bytes, codec: str, limit_bytes: int) -> bytes:
    """Return what a block holds. Raises `Rejected`."""
    content = block
    if codec != "null":
        stream = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            content = stream.decompress(block, limit_bytes + 1)
        except zlib.error as error:
            raise _unreadable("a block in deflate", str(error)) from error
    if len(content) > limit_bytes:
        raise too_large("payload: blocks of the container", limit_bytes)
    return content


AvroWriter = Callable[[Any], bytes]


def is_list(spec: TensorSpec) -> bool:
    """Return True if a row of an output may have other than one value."""
    return any(size != 1 for size in spec.shape[1:])


def _type_of(spec: TensorSpec) -> Any:
    simple = {"BOOL": "boolean", "BYTES": "string", "FP64": "double"}.get(spec.datatype)
    kind = simple or ("float" if "F" in spec.datatype else "long")
    return {"type": "array", "items": kind} if is_list(spec) else kind


def _refuse_recursion(schema: Any, outer: tuple[str, ...]) -> None:
    """Refuse a schema that contains itself: fastavro descends without a limit.

    Raises:
        ValueError: it does.
    """
    if isinstance(schema, list):
        for each in schema:
            _refuse_recursion(each, outer)
    elif isinstance(schema, dict):
        # Errors have fields, too.
        inner = (*outer, schema["name"]) if "fields" in schema else outer
        for field in schema.get("fields", ()):
            _refuse_recursion(field["type"], inner)
        for key in ("type", "items", "values"):
            if isinstance(schema.get(key), dict | list | str):
                _refuse_recursion(schema[key], inner)
    elif schema in outer:
        raise ValueError(f"expected a schema that does not contain itself, got {schema} in itself")


def _refuse_inexact_unions(schema: Any, name: str) -> None:
    """Refuse a schema with an integer behind a float in a union: fastavro reads numbers without
    their types, and writes each as the first type that takes it. The integer would be rounded.

    Raises:
        ConfigurationError: it has one.
    """
    if isinstance(schema, list):
        kinds = [each.get("type") if _is_plain(each) else each for each in schema]
        floats = [place for place, kind in enumerate(kinds) if kind in ("float", "double")]
        integers = [place for place, kind in enumerate(kinds) if kind in ("int", "long")]
        if floats and integers and max(integers) > min(floats):
            raise ConfigurationError(
                f"transform.record.avro_schema: {name}: expected int and long before float and "
                f"double in a union, with pass_through, got {json.dumps(schema):.200}"
            )
    parts: list[Any] = []
    if isinstance(schema, list):
        parts = schema
    elif isinstance(schema, dict):
        parts = [schema.get(key) for key in ("type", "items", "values")]
        parts += [field["type"] for field in schema.get("fields", ())]
    for part in parts:
        if isinstance(part, dict | list):
            _refuse_inexact_unions(part, name)


def _is_plain(schema: Any) -> bool:
    """Return True for a type in a table of its own, whose values have no type of Python's own."""
    return isinstance(schema, dict) and "logicalType" not in schema


class _Measure(NamedTuple):
    """Bytes and memory of values of a schema: the bytes at least, the memory at most."""

    fewest_bytes: int
    """Bytes of the shortest value."""
    empty_values: int
    """Values in it that take no bytes, at most."""
    memory_bytes: int
    """Memory of the dict or list that a value is, and of those in its fields."""
    expansion: float
    """Memory for each byte of the records and lists in its arrays and maps, at most."""


def _measure(schema: Any, named: dict[str, _Measure], most: int) -> _Measure:
    """Return bytes and memory of values of a schema. The bytes of a payload alone do not bound the
    memory of the values in it.

    Args:
        schema: as fastavro has parsed it.
        named: the results for types that have names, to which it may refer.
        most: limit for the values without bytes in a record.

    Raises:
        ValueError: a few bytes could make any number of values, or very many.
    """
    if isinstance(schema, str):
        fewest = _NUMBERS.get(schema, 1)
        return named.get(schema) or _Measure(fewest, int(fewest == 0), 0, 0.0)
    if isinstance(schema, list):  # a union: the number of one of them, and that
        found = [_measure_in_union(each, named, most) for each in schema]
        return _Measure(
            1 + min([each.fewest_bytes for each in found], default=0),
            max([each.empty_values for each in found], default=0),
            max([each.memory_bytes for each in found], default=0),
            max([each.expansion for each in found], default=0.0),
        )
    kind = schema["type"]
    if "fields" in schema:
        fields = [_measure(field["type"], named, most) for field in schema["fields"]]
        fewest = sum([each.fewest_bytes for each in fields])
        empty = sum([each.empty_values for each in fields]) + (fewest == 0)
        if empty > most:
            raise ValueError(f"expected at most {most} values without bytes, got {empty}")
        memory = _DICT_BYTES + sum([_FIELD_BYTES + each.memory_bytes for each in fields])
        expansion = max([each.expansion for each in fields], default=0.0)
        measure = _Measure(fewest, empty, memory, expansion)
    elif kind in ("array", "map"):
        items = schema.get("items", schema.get("values"))
        is_union = isinstance(items, list)
        found = (
            [_measure_in_union(each, named, most) for each in items]
            if is_union
            else [_measure(items, named, most)]
        )
        besides = is_union + (kind == "map")  # the number of one of them, the length of a key
        if besides + min([each.fewest_bytes for each in found], default=1) == 0:
            raise ValueError("expected items that take bytes, got an array of some that take none")
        densities = [each.memory_bytes / (besides + each.fewest_bytes) for each in found]
        expansion = max([each.expansion for each in found] + densities, default=0.0)
        measure = _Measure(1, 0, _LIST_BYTES, expansion)
    elif kind == "fixed":
        measure = _Measure(schema["size"], int(schema["size"] < 1), 0, 0.0)
    elif kind == "enum":
        measure = _Measure(1, 0, 0, 0.0)
    else:
        measure = _measure(kind, named, most)
    if "name" in schema:
        named[schema["name"]] = measure
    return measure


def _measure_in_union(schema: Any, named: dict[str, _Measure], most: int) -> _Measure:
    """Return the same of a type of a union: with its name, if it has one."""
    measure = _measure(schema, named, most)
    name = schema if isinstance(schema, str) else schema.get("name")
    if name not in named:
        return measure
    return measure._replace(memory_bytes=measure.memory_bytes + _PAIR_BYTES)


def _too_much_memory(limit_bytes: int) -> Rejected:
    return too_large("payload: memory of records and lists in its arrays and maps", limit_bytes)


def _unreadable(expected: str, got: str) -> Rejected:
    return Rejected.mismatch(Code.INVALID_REQUEST, "payload", expected=expected, got=got)
