"""Avro's binary encoding of records: read by a schema, and written with outputs as fields."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import Code, ConfigurationError, Rejected, describe_error
from headrace.models.signature import TensorSpec

INSTALL = "pip install 'headrace[avro]'"


class AvroSchema:
    """A schema of payloads: of a record, or of an array of records.

    Args:
        text: the schema in JSON.
        name: where it comes from, for messages.

    Raises:
        ConfigurationError: it is no such schema, it contains itself, or fastavro is missing.
    """

    def __init__(self, text: str, name: str) -> None:
        try:
            import fastavro
        except ImportError as error:
            raise ConfigurationError(
                f"transform.record: Avro needs the package fastavro: {INSTALL}"
            ) from error
        self._fastavro = fastavro
        self._text = text
        self._name = name
        self._schema = self._parse(text)

    def _parse(self, text: str) -> Any:
        try:
            schema = self._fastavro.parse_schema(json.loads(text))
            _refuse_recursion(schema, ())
        except Exception as error:  # fastavro has no common class for what a wrong schema may raise
            raise ConfigurationError(
                f"transform.record.avro_schema: {self._name}: {describe_error(error)}"
            ) from error
        return schema

    def read(self, payload: bytes | memoryview) -> Any:
        """Return the value of a payload. Raises `Rejected`."""
        stream = io.BytesIO(payload)
        try:
            found = self._fastavro.schemaless_reader(stream, self._schema, None)
        except Exception as error:  # whatever bytes may make the library raise is the caller's
            got = f"{describe_error(error)} at byte {stream.tell()} of {len(payload)}"
            raise _unreadable(f"Avro as in {self._name}", got) from error
        if stream.tell() != len(payload):
            got = f"{len(payload)} bytes, of which {stream.tell()} are a value"
            raise _unreadable(f"one value as in {self._name}", got)
        return found

    def extend(self, outputs: Sequence[TensorSpec]) -> AvroSchema:
        """Return the schema of the same records with these outputs as their last fields, which
        replace fields of the same names.

        Raises:
            ConfigurationError: they cannot be fields.
        """
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
        inner = (*outer, schema["name"]) if schema.get("type") == "record" else outer
        for field in schema.get("fields", ()):
            _refuse_recursion(field["type"], inner)
        for key in ("type", "items", "values"):
            if isinstance(schema.get(key), dict | list | str):
                _refuse_recursion(schema[key], inner)
    elif schema in outer:
        raise ValueError(f"expected a schema that does not contain itself, got {schema} in itself")


def _unreadable(expected: str, got: str) -> Rejected:
    return Rejected.mismatch(Code.INVALID_REQUEST, "payload", expected=expected, got=got)
