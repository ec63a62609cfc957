"""Confluent's framing of records: a byte 0, the schema's id in 4 bytes, and the record.

Source: https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/
(wire format).
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.inputs.avro import AvroSchema, is_list
from headrace.models.schema_registry import Bounded, RegisteredSchema, SchemaRegistry
from headrace.models.signature import TensorSpec
from headrace.tuning import TUNING, SchemaTuning

if TYPE_CHECKING:
    from headrace.models.inputs.protobuf import ProtobufSchema

_HEAD = struct.Struct(">bI")
_MAGIC = 0


class Framing(NamedTuple):
    """Schemas that decode the payloads with one schema id and encode their answers.

    Attributes:
        avro: schema of payloads in Avro.
        protobuf: schema of payloads in Protobuf. Without both they are JSON.
        answers: schema of answers in Avro.
        answer_head: bytes before each answer.
    """

    avro: AvroSchema | None = None
    protobuf: ProtobufSchema | None = None
    answers: AvroSchema | None = None
    answer_head: bytes = b""


class FramedSchemas:
    """The schemas in the payloads of one version, by their ids.

    Args:
        registry: has the schemas.
        outputs: further fields of the answers.
        subject: subject in the registry under which the schemas of answers are; empty if answers
            are no records.
        protobuf: messages of payloads and answers in Protobuf, whose schemas in the registry are
            text that cannot be compiled here.
    """

    def __init__(
        self,
        registry: SchemaRegistry,
        outputs: Sequence[TensorSpec],
        subject: str,
        protobuf: ProtobufSchema | None = None,
        tuning: SchemaTuning = TUNING.schemas,
    ) -> None:
        self._registry = registry
        self._outputs = tuple(outputs)
        self._subject = subject
        self._protobuf = protobuf
        self._framings: Bounded[int, Framing] = Bounded(tuning.framings_per_version)

    def read_id(self, payload: bytes | memoryview) -> int | None:
        """Return the id of a payload's schema; None if there is none."""
        if len(payload) < _HEAD.size or payload[0] != _MAGIC:
            return None
        return int(_HEAD.unpack_from(payload)[1])

    def find_unknown(self, payload: bytes | memoryview) -> int | None:
        """Return the id of a payload's schema if it has one and it must be fetched."""
        schema_id = self.read_id(payload)
        if schema_id is None or self._framings.get(schema_id) is not None:
            return None
        return schema_id

    async def fetch_alone(self, payload: bytes) -> None:
        """Fetch the schema of a payload where the registry is not open. Raises as `fetch` does."""
        schema_id = self.find_unknown(payload)
        if schema_id is not None:
            async with self._registry:
                await self.fetch(schema_id)

    async def fetch(self, schema_id: int) -> None:
        """Fetch a schema, and find or register that of its answers, unless that was done before.

        Raises:
            RegistryUnavailable: it may succeed later.
            Rejected: `INVALID_REQUEST` for a schema that is not there or cannot be used,
                `MODEL_FAILED` if the registry refuses that of the answers.
        """
        if self._framings.get(schema_id) is not None:
            return
        registered = await self._registry.fetch(schema_id)
        # A large schema takes a while to parse.
        framing, answers = await asyncio.to_thread(self._make, schema_id, registered)
        if framing.protobuf is not None and self._subject:
            answer_id = await self._registry.find_latest_id(self._subject)
            head = _HEAD.pack(_MAGIC, answer_id)
            framing = framing._replace(
                answer_head=head + _write_indexes(framing.protobuf.answer_indexes)
            )
        elif answers is not None:
            answer_id = await self._registry.find_id(self._subject, answers)
            framing = framing._replace(answer_head=_HEAD.pack(_MAGIC, answer_id))
        self._framings.put(schema_id, framing)

    def open(self, payload: bytes) -> tuple[Framing, bytes]:
        """Return how a payload is read, and its record. Raises `Rejected`."""
        schema_id = self.read_id(payload)
        if schema_id is None:
            expected = "a byte 0 and the id of a schema in 4 bytes before the record"
            raise Rejected.mismatch(
                Code.INVALID_REQUEST,
                "payload",
                expected=expected,
                got=f"{len(payload)} bytes that begin with {payload[: _HEAD.size].hex() or 'none'}",
            )
        framing = self._framings.get(schema_id)
        if framing is None:  # more ids are in use at once than are kept
            raise Rejected.mismatch(
                Code.INTERNAL, "payload", expected="a schema that was fetched", got=str(schema_id)
            )
        record = payload[_HEAD.size :]
        if framing.protobuf is not None:
            indexes, record = _read_indexes(record)
            if indexes != framing.protobuf.indexes:
                raise Rejected.mismatch(
                    Code.INVALID_REQUEST,
                    "payload: message indexes",
                    expected=str(list(framing.protobuf.indexes)),
                    got=str(list(indexes)),
                )
        return framing, record

    def _make(
        self, schema_id: int, registered: RegisteredSchema
    ) -> tuple[Framing, RegisteredSchema | None]:
        """Return how payloads with a schema are read, and the schema of their answers."""
        name = f"schema {schema_id} of the registry"
        try:
            if registered.form == "AVRO":
                avro = AvroSchema(registered.text, name)
                if not self._subject:
                    return Framing(avro), None
                answers = avro.extend(self._outputs)
                return Framing(avro, answers=answers), RegisteredSchema("AVRO", answers.text)
            if registered.form == "JSON":
                if not self._subject:
                    return Framing(), None
                text = _extend_json_schema(registered.text, self._outputs, name)
                return Framing(), RegisteredSchema("JSON", text)
        except ConfigurationError as error:
            raise Rejected(Code.INVALID_REQUEST, str(error)) from error
        if registered.form == "PROTOBUF" and self._protobuf is not None:
            return Framing(protobuf=self._protobuf), None
        expected = "Avro or JSON Schema" if self._protobuf is None else "Avro, JSON or Protobuf"
        raise Rejected.mismatch(Code.INVALID_REQUEST, name, expected=expected, got=registered.form)


def _read_indexes(record: bytes) -> tuple[tuple[int, ...], bytes]:
    """Return the place of a message in its schema, and the message. Raises `Rejected`."""
    count, end = _read_number(record, 0)
    if not 0 <= count <= TUNING.schemas.nested_messages:
        raise _no_indexes(record)
    indexes = []
    for _ in range(count):
        index, end = _read_number(record, end)
        indexes.append(index)
    return tuple(indexes) or (0,), record[end:]  # a 0 stands for the first message alone


def _read_number(record: bytes, start: int) -> tuple[int, int]:
    """Return a number in Protobuf's zigzag encoding, and its end."""
    value = 0
    for place, byte in enumerate(record[start : start + 5]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), start + place + 1
    raise _no_indexes(record)


def _write_indexes(indexes: Sequence[int]) -> bytes:
    if tuple(indexes) == (0,):
        return b"\0"
    written = bytearray()
    for number in (len(indexes), *indexes):
        value = number << 1
        while value >= 0x80:
            written.append(value & 0x7F | 0x80)
            value >>= 7
        written.append(value)
    return bytes(written)


def _no_indexes(record: bytes) -> Rejected:
    return Rejected.mismatch(
        Code.INVALID_REQUEST,
        "payload",
        expected="the indexes of a message behind the id of its schema",
        got=record[:8].hex() or "nothing",
    )


def _extend_json_schema(text: str, outputs: Sequence[TensorSpec], name: str) -> str:
    """Return a schema of objects, or of arrays of them, with outputs as further properties.

    Raises:
        ConfigurationError: it is no such schema.
    """
    try:
        schema: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{name}: expected JSON Schema: {error}") from error
    objects = schema
    if isinstance(schema, dict) and schema.get("type") == "array":
        objects = schema.get("items")
    if not isinstance(objects, dict) or not isinstance(objects.get("properties"), dict):
        raise ConfigurationError(
            f"{name}: expected a schema with properties, or of an array of such objects"
        )
    objects["properties"] |= {spec.name: _property_of(spec) for spec in outputs}
    return json.dumps(schema)


def _property_of(spec: TensorSpec) -> dict[str, Any]:
    kind: Any = {"BOOL": "boolean", "BYTES": "string"}.get(spec.datatype, "integer")
    if "F" in spec.datatype:
        kind = ["number", "null"]  # NaN and infinities are null
    return {"type": "array", "items": {"type": kind}} if is_list(spec) else {"type": kind}
