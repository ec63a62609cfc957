"""Confluent's framing of records: a byte 0, the schema's id in 4 bytes, and the record.

Source: https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/
(wire format).
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.inputs.avro import AvroSchema, is_list
from headrace.models.schema_registry import Bounded, RegisteredSchema, SchemaRegistry
from headrace.models.signature import TensorSpec
from headrace.tuning import TUNING, SchemaTuning

_HEAD = struct.Struct(">bI")
_MAGIC = 0


class Framing(NamedTuple):
    """How payloads with one schema are read, and how their answers are written.

    Attributes:
        avro: schema of the payloads; None if they are JSON.
        answers: schema of the answers; None for JSON.
        answer_head: bytes before each answer.
    """

    avro: AvroSchema | None
    answers: AvroSchema | None = None
    answer_head: bytes = b""


class FramedSchemas:
    """The schemas in the payloads of one version, by their ids.

    Args:
        registry: has the schemas.
        outputs: further fields of the answers.
        subject: subject in the registry under which the schemas of answers are; empty if answers
            are no records.
    """

    def __init__(
        self,
        registry: SchemaRegistry,
        outputs: Sequence[TensorSpec],
        subject: str,
        tuning: SchemaTuning = TUNING.schemas,
    ) -> None:
        self._registry = registry
        self._outputs = tuple(outputs)
        self._subject = subject
        self._framings: Bounded[int, Framing] = Bounded(tuning.framings_per_version)

    def read_id(self, payload: bytes | memoryview) -> int | None:
        """Return the id of a payload's schema; None if there is none."""
        if len(payload) < _HEAD.size or payload[0] != _MAGIC:
            return None
        return int(_HEAD.unpack_from(payload)[1])

    def find_unknown(self, payload: bytes | memoryview) -> int | None:
        """Return the id of a payload's schema if it has one and it must be learnt."""
        schema_id = self.read_id(payload)
        if schema_id is None or self._framings.get(schema_id) is not None:
            return None
        return schema_id

    async def learn_alone(self, payload: bytes) -> None:
        """Learn the schema of a payload where the registry is not open. Raises as `learn` does."""
        schema_id = self.find_unknown(payload)
        if schema_id is not None:
            async with self._registry:
                await self.learn(schema_id)

    async def learn(self, schema_id: int) -> None:
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
        if answers is not None:
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
        return framing, payload[_HEAD.size :]

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
                return Framing(avro, answers), RegisteredSchema("AVRO", answers.text)
            if registered.form == "JSON":
                if not self._subject:
                    return Framing(None), None
                text = _extend_json_schema(registered.text, self._outputs, name)
                return Framing(None), RegisteredSchema("JSON", text)
        except ConfigurationError as error:
            raise Rejected(Code.INVALID_REQUEST, str(error)) from error
        raise Rejected.mismatch(
            Code.INVALID_REQUEST, name, expected="Avro or JSON Schema", got=registered.form
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
