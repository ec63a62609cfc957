"""The client of a schema registry, against a stand-in, and what names it in `model.toml`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.config import SchemaRegistrySettings, make_settings
from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.config import make_model_config
from headrace.models.inputs.framing import FramedSchemas
from headrace.models.inputs.transforms import make_transform
from headrace.models.schema_registry import RegisteredSchema, RegistryUnavailable, SchemaRegistry
from headrace.models.signature import make_signature
from headrace.tuning import SchemaTuning
from tests.support.schema_registry import StandInRegistry
from tests.unit.models.requests import spec

RECORD = {"type": "record", "name": "R", "fields": [{"name": "v", "type": "double"}]}
STRING = RegisteredSchema("AVRO", '"string"')


def client_of(registry: StandInRegistry, tuning: Any = None, **more: Any) -> SchemaRegistry:
    """A client with these settings."""
    settings = SchemaRegistrySettings.model_validate({"url": registry.url, **more})
    return SchemaRegistry(settings, tuning or SchemaTuning())


async def test_schema_is_asked_for_once() -> None:
    """An id never changes its schema; a schema in a subject keeps its id."""
    async with StandInRegistry({3: ("AVRO", RECORD)}) as registry, client_of(registry) as client:
        found = [await client.fetch(3) for _ in range(2)]
        ids = [await client.find_id("a/b", STRING) for _ in range(2)]

    assert [json.loads(each.text) for each in found] == [RECORD, RECORD]
    assert ids == [4, 4]
    assert registry.requests == ["GET /schemas/ids/3", "POST /subjects/a/b/versions"]


async def test_no_more_schemas_are_kept_than_the_bound() -> None:
    """The one that was not used for the longest time is asked for again."""
    schemas: dict[int, tuple[str, Any]] = dict.fromkeys(range(3), ("AVRO", "string"))
    async with (
        StandInRegistry(schemas) as registry,
        client_of(registry, SchemaTuning(cached_schemas=2)) as client,
    ):
        for number in (0, 1, 0, 2, 0, 1):
            await client.fetch(number)

    assert [each[-1] for each in registry.requests] == ["0", "1", "2", "1"]


async def test_unknown_id_is_asked_for_again_after_a_while() -> None:
    """Producers may have registered it since."""
    now_s = [0.0]
    async with StandInRegistry() as registry:
        settings = SchemaRegistrySettings(url=registry.url)
        async with SchemaRegistry(settings, clock_s=lambda: now_s[0]) as client:
            for _ in range(3):
                with pytest.raises(Rejected, match="the id of a schema in the registry, got 3"):
                    await client.fetch(3)
            now_s[0] = 11.0
            registry.schemas[3] = ("AVRO", '"string"')
            found = await client.fetch(3)

    assert found == STRING
    assert len(registry.requests) == 2


@pytest.mark.parametrize("fault", ["away", "holds", "login", "path", "gone"])
async def test_registry_that_does_not_answer_is_unavailable(fault: str) -> None:
    """The request may succeed later: nothing is wrong with the record."""
    async with StandInRegistry({1: ("AVRO", RECORD)}) as registry:
        more: dict[str, Any] = {"timeout_ms": 100}
        registry.is_unavailable, registry.holds = fault == "away", fault == "holds"
        registry.login = ("ada", "secret") if fault == "login" else None
        if fault in ("path", "gone"):
            more["url"] = f"{registry.url}/old" if fault == "path" else "http://127.0.0.1:1"
        async with client_of(registry, **more) as client:
            with pytest.raises(RegistryUnavailable):
                await client.fetch(1)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"[" * 100_000),
        (200, b'{"schema": "\\"string\\"", "references": 5}'),
        (200, b'{"schema": "\\"string\\"", "more": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
        (404, b'{"error_code": []}'),
    ],
)
async def test_response_that_is_not_of_registry_is_unavailable(status: int, body: bytes) -> None:
    """A proxy may have answered; the process that asks must not end."""
    async with StandInRegistry() as registry, client_of(registry) as client:
        registry.answers_with = status, body
        with pytest.raises(RegistryUnavailable, match=f"got status {status}"):
            await client.fetch(1)


@pytest.mark.parametrize("number", ["-1", "4294967296", "true"])
async def test_id_that_framing_cannot_hold_is_unavailable(number: str) -> None:
    """It has 4 bytes in each record."""
    async with StandInRegistry() as registry, client_of(registry) as client:
        registry.answers_with = 200, f'{{"id": {number}}}'.encode()
        with pytest.raises(RegistryUnavailable, match="subject s: got status 200"):
            await client.find_id("s", STRING)


async def test_schema_that_is_too_large_is_refused_and_not_read_again() -> None:
    """It will not become smaller."""
    async with (
        StandInRegistry({1: ("AVRO", RECORD)}) as registry,
        client_of(registry, SchemaTuning(max_response_bytes=20)) as client,
    ):
        for _ in range(2):
            with pytest.raises(Rejected, match="at most 20 bytes"):
                await client.fetch(1)

    assert len(registry.requests) == 1


async def test_login_is_sent() -> None:
    """The login is sent as HTTP's basic authentication."""
    async with StandInRegistry({1: ("AVRO", "string")}) as registry:
        registry.login = ("ada", "secret")
        async with client_of(registry, username="ada", password="secret") as client:
            assert await client.fetch(1) == STRING


async def test_schema_of_answers_is_looked_up_alone_without_auto_register() -> None:
    """An operator registers it."""
    async with (
        StandInRegistry({1: ("AVRO", "string")}) as registry,
        client_of(registry, SchemaTuning(refusal_s=0.0), auto_register=False) as client,
    ):
        with pytest.raises(Rejected) as raised:
            await client.find_id("s", STRING)
        registry.subjects["s"] = [1]
        found = await client.find_id("s", STRING)

    assert raised.value.code == Code.MODEL_FAILED
    assert found == 1
    assert registry.requests == ["POST /subjects/s"] * 2


@pytest.mark.parametrize(
    ("form", "schema", "expected"),
    [
        ("AVRO", {"type": "record"}, "schema 1 of the registry"),
        ("AVRO", "string", "expected a record"),
        ("JSON", {"type": "string"}, "expected a schema with properties"),
        ("PROTOBUF", "", "expected Avro or JSON Schema, got PROTOBUF"),
    ],
)
async def test_schema_that_cannot_be_used_is_refused(form: str, schema: Any, expected: str) -> None:
    """It is the producer's, so the request is wrong."""
    async with StandInRegistry({1: (form, schema)}) as registry, client_of(registry) as client:
        framed = FramedSchemas(client, [spec("y", "FP32", [-1])], "s")
        with pytest.raises(Rejected, match=expected) as raised:
            await framed.fetch(1)

    assert raised.value.code == Code.INVALID_REQUEST
    assert framed.find_unknown(b"\0\0\0\0\1") == 1


async def test_output_replaces_field_of_its_name() -> None:
    """The schema of the answers has it once, with the output's type."""
    signature = [spec("v", "INT64", [-1, 3])]
    async with StandInRegistry({1: ("AVRO", RECORD)}) as registry, client_of(registry) as client:
        await FramedSchemas(client, signature, "s").fetch(1)
        registered = json.loads(registry.schemas[2][1])

    assert registered["fields"] == [{"name": "v", "type": {"type": "array", "items": "long"}}]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "schema_registry.url"),
        ({"format": "json"}, "neither format nor avro_schema"),
        ({"avro_schema": "r.avsc"}, "neither format nor avro_schema"),
        ({"pass_through": True}, "expected subject"),
        ({"subject": "s"}, "expected framing and pass_through"),
    ],
)
def test_incomplete_framing_is_fault(keys: dict[str, Any], expected: str) -> None:
    """It is found when the version is opened."""
    record = {"framing": "confluent", "inputs": {"x": [{"path": "v"}]}, **keys}
    signature = make_signature([spec("x", "FP32", [-1, -1])], [spec("y", "FP32", [-1])])
    with pytest.raises(ConfigurationError, match=expected):
        make_transform(
            Path(),
            make_model_config({"transform": {"record": record}}, make_settings({})),
            signature,
        )
