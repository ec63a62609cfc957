"""Orders with Confluent's framing: their schemas are in a registry, and those of the answers."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import fastavro
import pytest
from msgspec.structs import replace

from headrace.client import Client, InferenceError, InferenceTimeout
from headrace.config import Settings, make_settings
from headrace.crash_isolation.markers import NOBODY, CrashMarkers
from headrace.crash_isolation.poison_search import CrashMarker
from headrace.log.port import NewRecord, TopicPartition
from headrace.runtime.process import Pipeline
from headrace.topics import STAGES, Topic
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.logs import write_to
from tests.support.pipelines import Caller, log_for, serving
from tests.support.schema_registry import StandInRegistry
from tests.support.tree import ROOT
from tests.support.visible import answered

EXAMPLE = ROOT / "examples" / "orders"
ORDERS = json.loads((EXAMPLE / "orders.json").read_bytes())
TOGETHER, APART = [STAGES], [[stage] for stage in STAGES]
AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "string"},
        {"name": "amount", "type": "double"},
        {"name": "country", "type": "string"},
        {"name": "ordered_at", "type": "string"},
        {
            "name": "customer",
            "type": {
                "type": "record",
                "name": "Customer",
                "fields": [{"name": "age", "type": ["null", "int"], "default": None}],
            },
        },
    ],
}
JSON_SCHEMA = {"type": "object", "properties": {"id": {"type": "string"}}}
AVRO_ID, JSON_ID, PROTOBUF_ID = 7, 8, 9


def registry_of() -> StandInRegistry:
    """A registry with the schemas of orders."""
    return StandInRegistry(
        {
            AVRO_ID: ("AVRO", AVRO),
            JSON_ID: ("JSON", JSON_SCHEMA),
            PROTOBUF_ID: ("PROTOBUF", "message Order {}"),
        }
    )


def settings_of(directory: Path, registry: StandInRegistry, **more: Any) -> Settings:
    """Settings with the example's model as `framed`, and as it is as `fraud`."""
    shutil.copytree(EXAMPLE / "models" / "fraud", directory / "fraud")
    shutil.copytree(EXAMPLE / "models" / "fraud", directory / "framed")
    path = directory / "framed" / "model.toml"
    text = path.read_text().replace(
        'avro_schema = "order.avsc"', 'framing = "confluent"\nsubject = "scored-value"'
    )
    path.write_text(text)
    return make_settings(
        {
            "topics": {"partitions": 4},
            "models": {"repository": str(directory)},
            "schema_registry": {"url": registry.url, "timeout_ms": 500},
            **more,
        }
    )


def framed(order: dict[str, Any], schema_id: int = AVRO_ID) -> bytes:
    """An order in Avro, behind the id of its schema."""
    stream = io.BytesIO(struct.pack(">bI", 0, schema_id))
    stream.seek(5)
    named = {each["name"] for each in AVRO["fields"]}  # type: ignore[index]
    fields = {name: value for name, value in order.items() if name in named}
    fastavro.schemaless_writer(stream, fastavro.parse_schema(AVRO), fields)
    return stream.getvalue()


def unframed(content: bytes, registry: StandInRegistry) -> dict[str, Any]:
    """An answer, read by the schema that the registry has for its id."""
    magic, schema_id = struct.unpack_from(">bI", content)
    assert magic == 0
    schema = fastavro.parse_schema(json.loads(registry.schemas[schema_id][1]))
    found: Any = fastavro.schemaless_reader(io.BytesIO(content[5:]), schema, None)
    assert isinstance(found, dict)
    return found


async def enriched(client: Client, order: bytes, content_type: str = "application/avro") -> bytes:
    """The record that an order becomes."""
    answer = await client.infer_raw("framed", order, content_type, timeout_s=20)
    content = answer.outputs["record"].item()
    assert isinstance(content, bytes)
    return content


@pytest.mark.parametrize("grouping", [TOGETHER, APART], ids=["together", "apart"])
@pytest.mark.parametrize("compression", ["", "gzip"])
async def test_framed_orders_come_back_with_schema_that_has_score(
    tmp_path: Path, grouping: Any, compression: str
) -> None:
    """In Avro and in JSON; each process asks once for each schema."""
    async with registry_of() as registry:
        settings = settings_of(tmp_path, registry)
        log = await log_for(settings)
        async with (
            serving(settings, log, grouping),
            Client(log=log, settings=settings, compression=compression) as client,
        ):
            plain = await client.infer_raw("fraud", json.dumps(ORDERS).encode(), "application/json")
            answers = await asyncio.gather(
                *(enriched(client, framed(order)) for order in ORDERS * 5)
            )
            in_json = struct.pack(">bI", 0, JSON_ID) + json.dumps(ORDERS[0]).encode()
            answer = await enriched(client, in_json, "application/json")
        scores = {each["id"]: each["score"] for each in json.loads(plain.outputs["record"].item())}
        found = [unframed(each, registry) for each in answers]
        registered = json.loads(registry.schemas[struct.unpack_from(">bI", answer)[1]][1])

    assert [each["id"] for each in found] == [order["id"] for order in ORDERS * 5]
    assert found[0]["score"] == pytest.approx(scores[ORDERS[0]["id"]], rel=1e-4)
    assert json.loads(answer[5:]) == ORDERS[0] | {"score": found[0]["score"]}
    assert registered["properties"]["score"] == {"type": ["number", "null"]}
    most = 1 if grouping == TOGETHER else 2  # ingest and the executor
    assert registry.requests.count(f"GET /schemas/ids/{AVRO_ID}") <= most
    assert registry.requests.count("POST /subjects/scored-value/versions") <= 2 * most
    assert json.loads(registry.schemas[max(registry.schemas)][1])


async def test_orders_wait_while_registry_is_unavailable_and_others_do_not(tmp_path: Path) -> None:
    """A late one is answered when its time has come, the others when the registry is back."""
    async with registry_of() as registry:
        settings = settings_of(tmp_path, registry)
        registry.is_unavailable = True
        log = await log_for(settings)
        async with (
            serving(settings, log, TOGETHER),
            Client(log=log, settings=settings) as client,
            asyncio.TaskGroup() as tasks,
        ):
            waiting = [tasks.create_task(enriched(client, framed(order))) for order in ORDERS]
            await eventually(lambda: bool(registry.requests), what="the registry was asked")
            plain = await client.infer_raw("fraud", json.dumps(ORDERS).encode(), "application/json")
            # The answer DEADLINE_EXCEEDED and the end of the call come at the same time.
            with pytest.raises((InferenceError, InferenceTimeout)):
                await client.infer_raw("framed", framed(ORDERS[0]), "avro/binary", timeout_s=0.3)
            caller = Caller(settings, log)
            await eventually(lambda: caller.answered() > 1, what="the late order is answered")
            statuses = [
                dict(record.headers)["x-status"] or b"" for record in await caller.answers()
            ]
            assert not any(each.done() for each in waiting)
            registry.is_unavailable = False
        found = [unframed(each.result(), registry) for each in waiting]

    assert sorted(statuses) == [b"DEADLINE_EXCEEDED", b"ok"]
    assert len(json.loads(plain.outputs["record"].item())) == len(ORDERS)
    assert [each["id"] for each in found] == [order["id"] for order in ORDERS]


async def test_orders_wait_in_executor_apart_while_registry_is_unavailable(tmp_path: Path) -> None:
    """It asks for the schema of the answers itself, after ingest did; the run is not repeated."""
    async with registry_of() as registry:
        settings = settings_of(tmp_path, registry)
        registry.away_after = 2  # those of ingest
        log = await log_for(settings)
        async with (
            serving(settings, log, APART),
            Client(log=log, settings=settings) as client,
            asyncio.TaskGroup() as tasks,
        ):
            waiting = tasks.create_task(enriched(client, framed(ORDERS[0])))
            await eventually(lambda: len(registry.requests) > 3, what="the executor asked again")
            plain = await client.infer_raw("fraud", json.dumps(ORDERS).encode(), "application/json")
            assert not waiting.done()
            registry.away_after = None
        found = unframed(waiting.result(), registry)

    assert len(json.loads(plain.outputs["record"].item())) == len(ORDERS)
    assert found["id"] == ORDERS[0]["id"]


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize("order", ["none", "key"])
async def test_orders_that_wait_at_stop_are_answered_once_by_next_process(
    tmp_path: Path, guarantee: str, order: str
) -> None:
    """They were left in the log, and the stop did not wait for the registry."""
    async with registry_of() as registry:
        settings = settings_of(
            tmp_path,
            registry,
            limits={"drain_timeout_s": 3600},
            delivery={"guarantee": guarantee, "order": order},
        )
        registry.is_unavailable = True
        log = await log_for(settings)
        async with Client(log=log, settings=settings) as client, asyncio.TaskGroup() as tasks:
            async with serving(settings, log, TOGETHER):
                waiting = [tasks.create_task(enriched(client, framed(order))) for order in ORDERS]
                await eventually(lambda: bool(registry.requests), what="the registry was asked")
            registry.is_unavailable = False
            async with serving(settings, log, TOGETHER):
                await asyncio.wait(waiting)
            answers = await answered(log, settings)
        found = [unframed(each.result(), registry) for each in waiting]

    assert [each["id"] for each in found] == [each["id"] for each in ORDERS]
    assert list(answers.values()) == [1] * len(ORDERS)


@pytest.mark.parametrize("where", ["same chunk", "later"])
async def test_order_that_is_cancelled_waits_no_longer(tmp_path: Path, where: str) -> None:
    """It is answered while the registry is unavailable."""
    async with registry_of() as registry:
        settings = settings_of(tmp_path, registry)
        registry.is_unavailable = True
        log = await log_for(settings)
        caller = Caller(settings, log)
        place = TopicPartition(settings.topic(Topic.REQUESTS), 0)
        headers = [("x-model", b"framed"), ("content-type", b"application/avro")]
        records = [
            NewRecord(None, framed(ORDERS[0]), headers),
            NewRecord(None, None, [("x-cancel", f"{place.topic}/0/0".encode())]),
        ]
        if where == "same chunk":
            await write_to(log, place, *records)
        async with serving(settings, log, TOGETHER):
            if where == "later":
                await write_to(log, place, records[0])
                await eventually(lambda: bool(registry.requests), what="the registry was asked")
                await write_to(log, place, records[1])
            await eventually(lambda: caller.answered() == 1, what="the order is answered")
        (answer,) = await caller.answers()

    assert dict(answer.headers)["x-status"] == b"CANCELLED"


async def test_order_that_runs_alone_does_not_hold_stop(tmp_path: Path) -> None:
    """It stays in the log while the registry is unavailable, and a suspect: it has not run."""
    async with registry_of() as registry:
        settings = settings_of(tmp_path, registry, limits={"drain_timeout_s": 3600})
        registry.is_unavailable = True
        log = await log_for(settings)
        caller = Caller(settings, log)
        place = TopicPartition(settings.topic(Topic.REQUESTS), 0)
        headers = [("x-model", b"framed"), ("content-type", b"application/avro")]
        await write_to(log, place, NewRecord(None, framed(ORDERS[0]), headers))
        markers = CrashMarkers(log, settings.namespace)
        await markers.write({place: CrashMarker(is_open=True, suspects=((0, 1),))}, NOBODY)
        async with serving(settings, log, TOGETHER):
            await eventually(lambda: bool(registry.requests), what="the registry was asked")
        marker, _ = (await markers.read([place]))[place]
        written = caller.answered()
        registry.is_unavailable = False
        async with serving(settings, log, TOGETHER):
            await eventually(lambda: caller.answered() == 1, what="the order is answered")

    assert written == 0
    assert (marker.is_open, marker.suspects) == (False, ((0, 1),))


async def test_orders_that_wait_at_rebalance_do_not_hold_it(tmp_path: Path) -> None:
    """They are left in the log for the next owner of their partitions."""
    async with registry_of() as registry:
        settings = settings_of(tmp_path, registry, limits={"drain_timeout_s": 3600})
        registry.is_unavailable = True
        log = await log_for(settings)
        tuning = replace(TUNING, consumer=replace(TUNING.consumer, revocation_timeout_s=3600))
        async with (
            Client(log=log, settings=settings) as client,
            asyncio.TaskGroup() as tasks,
            serving(settings, log, TOGETHER, tuning) as (pipeline,),
        ):
            waiting = [tasks.create_task(enriched(client, framed(order))) for order in ORDERS]
            await eventually(lambda: bool(registry.requests), what="the registry was asked")
            log.faults.groups.force_rebalance(settings.namespace)
            await eventually(lambda: rebalances(pipeline) == 2, what="the rebalance has ended")
            registry.is_unavailable = False
            await asyncio.wait(waiting)
        found = [unframed(each.result(), registry) for each in waiting]

    assert [each["id"] for each in found] == [each["id"] for each in ORDERS]


def rebalances(pipeline: Pipeline) -> float | None:
    """How often partitions were assigned to a process."""
    return pipeline.metrics.registry.get_sample_value("headrace_rebalances_total")


async def test_order_that_registry_cannot_place_is_refused_with_reason(tmp_path: Path) -> None:
    """Refusals for an unknown schema id, an unsupported kind, no framing, and a value cut short."""
    wrong = {
        "the id of a schema in the registry, got 99": framed(ORDERS[0], 99),
        "expected Avro or JSON Schema, got PROTOBUF": framed(ORDERS[0], PROTOBUF_ID),
        "a byte 0 and the id of a schema": b"{}",
        "Avro as in schema 7 of the registry": framed(ORDERS[0])[:-3],
    }
    async with registry_of() as registry:
        settings = settings_of(tmp_path, registry)
        log = await log_for(settings)
        errors: dict[str, InferenceError] = {}
        async with (
            serving(settings, log, TOGETHER),
            Client(log=log, settings=settings) as client,
        ):
            for expected, order in wrong.items():
                with pytest.raises(InferenceError) as raised:
                    await enriched(client, order)
                errors[expected] = raised.value
            registry.refuses = 409
            in_json = struct.pack(">bI", 0, JSON_ID) + b"{}"
            with pytest.raises(InferenceError) as refused:
                await enriched(client, in_json, "application/json")

    for expected, error in errors.items():
        assert error.code == "INVALID_REQUEST"
        assert expected in error.message
    assert refused.value.code == "MODEL_FAILED"
    assert "subject scored-value" in refused.value.message
