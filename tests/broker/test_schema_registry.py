"""The client against a real schema registry: the same answers as the stand-in gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.config import SchemaRegistrySettings
from headrace.errors import Code, Rejected
from headrace.models.inputs.framing import FramedSchemas
from headrace.models.schema_registry import RegisteredSchema, SchemaRegistry
from headrace.models.signature import TensorSpec
from tests.support.apicurio import Apicurio, install_apicurio

RECORD = {"type": "record", "name": "R", "fields": [{"name": "v", "type": "double"}]}
OBJECT = {"type": "object", "properties": {"v": {"type": "number"}}}
MESSAGE = 'syntax = "proto3"; package shop; message Order { double v = 1; }'
SCHEMAS = {
    "avro": RegisteredSchema("AVRO", json.dumps(RECORD)),
    "json": RegisteredSchema("JSON", json.dumps(OBJECT)),
    "protobuf": RegisteredSchema("PROTOBUF", MESSAGE),
}


@pytest.fixture(scope="module")
def registry_program() -> Path:
    """The registry, fetched before the test's time runs."""
    return install_apicurio()


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.timeout(120)
async def test_registry_places_schemas_of_each_kind_and_refuses_others(
    registry_program: Path,
) -> None:
    """Registered by one client, and found by another."""
    async with Apicurio(registry_program) as registry:

        def client(**more: Any) -> SchemaRegistry:
            settings = {"url": registry.url, **more}
            return SchemaRegistry(SchemaRegistrySettings.model_validate(settings))

        async with client() as first, client() as second, client(auto_register=False) as third:
            ids = {name: await first.find_id(name, schema) for name, schema in SCHEMAS.items()}
            fetched = {name: await second.fetch(number) for name, number in ids.items()}
            looked_up = {
                name: await third.find_id(name, schema) for name, schema in SCHEMAS.items()
            }
            latest = await second.find_latest_id("protobuf")
            framed = FramedSchemas(second, [TensorSpec("y", "FP32", (-1,))], "scored")
            await framed.fetch(ids["json"])
            refused: list[Rejected] = []
            for asked in (
                second.fetch(9999),
                second.find_latest_id("none"),
                third.find_id("json", RegisteredSchema("JSON", '{"type": "string"}')),
                third.find_id("none", SCHEMAS["avro"]),
            ):
                with pytest.raises(Rejected) as raised:
                    await asked
                refused.append(raised.value)

    assert fetched == SCHEMAS
    assert looked_up == ids
    assert latest == ids["protobuf"]
    assert framed.find_unknown(bytes([0, 0, 0, 0, ids["json"]])) is None
    assert [each.code for each in refused] == [
        Code.INVALID_REQUEST,
        *[Code.MODEL_FAILED] * 3,
    ]
