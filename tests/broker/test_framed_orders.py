"""Orders of other clients, enriched once each, with a real broker and a real schema registry."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import aiokafka
import fastavro
import numpy as np
import pytest
import pytest_asyncio
from aiokafka import AIOKafkaConsumer

from headrace.tools.local_kafka import LocalKafka, install
from tests.support.apicurio import Apicurio, install_apicurio, install_avro, install_serdes
from tests.support.processes import Process, create_topics, environment, run_program
from tests.support.protoc import write_descriptors
from tests.support.tree import ROOT

EXAMPLE = ROOT / "examples" / "orders"
COUNT = 4000
FEW = 200
STAGES = "ingest,batcher,executor,responder"
DEADLINE_S = 60.0
CONFLUENT = ROOT / ".venv-clients" / "bin" / "python"
"""The environment with Confluent's serializers, which `make test-tools` makes."""
FORMATS = ("avro", "json", "protobuf")
needs_java = pytest.mark.skipif(shutil.which("javac") is None, reason="not installed: javac")


def expected_score(number: int) -> float:
    """The score of the producer's order with this number; it has no customer."""
    country = number % 4
    logit = 1.5 * (10.0 * (number % 50) - 120) / 80
    logit += 2 * (country == 3) + (number % 24 < 6) - 3
    return float(1 / (1 + np.exp(-logit)))


class ScoredOrders:
    """Enriched orders that a reader sees which reads committed records alone.

    Attributes:
        scores: by number of the order; each time that it was seen.
    """

    def __init__(self, registry_url: str) -> None:
        self._url = registry_url
        self._schemas: dict[int, Any] = {}
        self.scores: dict[int, list[float]] = {}

    async def read(self, consumer: AIOKafkaConsumer, most: int, deadline_s: float) -> None:
        """Read until `most` orders were seen."""
        async with asyncio.timeout(deadline_s):
            while len(self.scores) < most:
                await self._poll(consumer, 200)

    async def read_rest(self, consumer: AIOKafkaConsumer) -> None:
        """Read what still comes after the last one, as far as it comes within a second."""
        while await self._poll(consumer, 1000):
            pass

    async def _poll(self, consumer: AIOKafkaConsumer, timeout_ms: int) -> bool:
        polled = await consumer.getmany(timeout_ms=timeout_ms)
        for records in polled.values():
            for record in records:
                assert dict(record.headers)["x-status"] == b"ok", record.value
                await self._note(record.value)
        return bool(polled)

    async def _note(self, value: bytes) -> None:
        magic, schema_id = struct.unpack_from(">bI", value)
        assert magic == 0
        if schema_id not in self._schemas:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{self._url}/schemas/ids/{schema_id}") as response,
            ):
                text = (await response.json(content_type=None))["schema"]
            self._schemas[schema_id] = fastavro.parse_schema(json.loads(text))
        order: Any = fastavro.schemaless_reader(
            io.BytesIO(value[5:]), self._schemas[schema_id], None
        )
        number = int(order["id"].removeprefix("order-"))
        self.scores.setdefault(number, []).append(order["score"])


async def run_java(file: Path, jars: Sequence[Path], settings: dict[str, str]) -> str:
    """Run a program of the example from its source; return what it prints."""
    class_path = os.pathsep.join(map(str, jars))
    command = ["java", "-XX:TieredStopAtLevel=1", "-cp", class_path, file.name]
    return await run_program(command, settings, file.parent)


def frame_orders(model: Path, subject: str) -> None:
    """Let a copy of the example's model take orders behind the ids of their schemas."""
    path = model / "model.toml"
    path.write_text(
        path.read_text().replace(
            'avro_schema = "order.avsc"', f'framing = "confluent"\nsubject = "{subject}"'
        )
    )


def scores_in(printed: str) -> dict[int, float]:
    """The scores that the program printed, by number of the order."""
    lines = [line.split() for line in printed.splitlines()]
    return {int(name.removeprefix("order-")): float(score) for name, score in lines}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def registry() -> AsyncIterator[Apicurio]:
    """The registry of all tests here, each of which has subjects of its own."""
    install_serdes()
    async with Apicurio(install_apicurio()) as running:
        yield running


@needs_java
@pytest.mark.slow
@pytest.mark.timeout(360)
async def test_framed_orders_of_java_producer_are_enriched_once_across_kill(
    kafka: LocalKafka, unique_name: str, tmp_path: Path, registry: Apicurio
) -> None:
    """Exactly once: a process is killed amid them, and the next one goes on."""
    shutil.copytree(EXAMPLE, tmp_path / "orders")
    subject = f"{unique_name}.responses-value"
    frame_orders(tmp_path / "orders" / "models" / "fraud", subject)
    settings = environment(
        kafka.bootstrap_servers,
        unique_name,
        tmp_path / "orders" / "models",
        DELIVERY__GUARANTEE="exactly_once",
        KAFKA__SESSION_TIMEOUT_MS="6000",
        SCHEMA_REGISTRY__URL=registry.url,
    )
    await create_topics(settings)
    scored = ScoredOrders(registry.url)
    async with AIOKafkaConsumer(
        bootstrap_servers=kafka.bootstrap_servers,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    ) as consumer:
        topic = f"{unique_name}.responses"
        consumer.assign([aiokafka.TopicPartition(topic, each) for each in range(4)])
        async with Process(STAGES, settings) as first, asyncio.TaskGroup() as tasks:
            producing = tasks.create_task(
                run_java(
                    tmp_path / "orders" / "java" / "FramedOrders.java",
                    [*install().jars, install_avro()],
                    {
                        "BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
                        "NAMESPACE": unique_name,
                        "SCHEMA_REGISTRY": registry.url,
                        "COUNT": str(COUNT),
                    },
                ),
                name="java-producer",
            )
            await scored.read(consumer, 1, DEADLINE_S)
            await first.kill()
            seen_at_kill = len(scored.scores)
        async with Process(STAGES, settings):
            await scored.read(consumer, COUNT, DEADLINE_S)
            await scored.read_rest(consumer)
    subjects = await _get(f"{registry.url}/subjects/{subject}/versions")

    assert producing.result().startswith(f"{COUNT} orders")
    assert 0 < seen_at_kill < COUNT
    assert subjects == [1]
    assert {number: len(scores) for number, scores in scored.scores.items()} == dict.fromkeys(
        range(COUNT), 1
    )
    np.testing.assert_allclose(
        [scored.scores[number][0] for number in range(COUNT)],
        [expected_score(number) for number in range(COUNT)],
        rtol=1e-4,
    )


async def _get(url: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.json(content_type=None)


@needs_java
@pytest.mark.slow
@pytest.mark.timeout(360)
async def test_orders_of_java_serializer_come_back_enriched_to_its_deserializer(
    kafka: LocalKafka, unique_name: str, tmp_path: Path, registry: Apicurio
) -> None:
    """Serializers that are not ours write Confluent's framing and read it, registry and all."""
    shutil.copytree(EXAMPLE, tmp_path / "orders")
    frame_orders(tmp_path / "orders" / "models" / "fraud", f"{unique_name}.responses-value")
    settings = environment(
        kafka.bootstrap_servers,
        unique_name,
        tmp_path / "orders" / "models",
        SCHEMA_REGISTRY__URL=registry.url,
    )
    await create_topics(settings)
    async with Process(STAGES, settings):
        printed = await score_orders(
            kafka, unique_name, tmp_path / "orders", SCHEMA_REGISTRY=registry.own_url
        )

    check_scores(printed)


@needs_java
@pytest.mark.slow
@pytest.mark.timeout(360)
async def test_orders_of_confluents_serializers_come_back_enriched_to_its_deserializers(
    kafka: LocalKafka, unique_name: str, tmp_path: Path, registry: Apicurio
) -> None:
    """In Avro, JSON Schema and Protobuf, each with a model of its own."""
    if not CONFLUENT.exists():
        pytest.skip("Confluent's client is not installed: run `make test-tools`")
    models = {form: f"{unique_name}-{form}" for form in FORMATS}
    for model in models.values():
        shutil.copytree(EXAMPLE / "models" / "fraud", tmp_path / model)
        frame_orders(tmp_path / model, f"{model}-scored-value")
    take_messages(tmp_path / models["protobuf"])
    settings = environment(
        kafka.bootstrap_servers, unique_name, tmp_path, SCHEMA_REGISTRY__URL=registry.url
    )
    await create_topics(settings)
    async with Process(STAGES, settings):
        printed = [
            await run_program(
                [CONFLUENT, "scored_orders.py", form],
                {
                    "BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
                    "NAMESPACE": unique_name,
                    "SCHEMA_REGISTRY": registry.url,
                    "ORDER_DESCRIPTORS": str(tmp_path / models["protobuf"] / "1" / "order.desc"),
                    "MODEL": model,
                    "COUNT": str(FEW),
                },
                EXAMPLE / "python",
            )
            for form, model in models.items()
        ]

    for each in printed:
        check_scores(each)


def take_messages(model: Path) -> None:
    """Let a model take the example's messages of Protobuf."""
    shutil.copy(EXAMPLE / "order.proto", model / "1")
    write_descriptors(model / "1", "order.proto", "order.desc", "--include_imports")
    path = model / "model.toml"
    path.write_text(
        path.read_text().replace(
            "pass_through = true",
            """pass_through = true
protobuf_descriptors = "order.desc"
protobuf_message = "shop.Order"
protobuf_answer = "shop.ScoredOrder"
""",
        )
    )


@needs_java
@pytest.mark.slow
@pytest.mark.timeout(360)
async def test_plain_avro_orders_of_java_producer_come_back_enriched(
    kafka: LocalKafka, unique_name: str
) -> None:
    """Avro alone, with the schema beside the model: the example as it is, without a registry."""
    settings = environment(kafka.bootstrap_servers, unique_name, EXAMPLE / "models")
    await create_topics(settings)
    async with Process(STAGES, settings):
        printed = await score_orders(kafka, unique_name, EXAMPLE)

    check_scores(printed)


async def score_orders(kafka: LocalKafka, namespace: str, example: Path, **more: str) -> str:
    """Run the program that sends orders and reads them back; return what it prints."""
    settings = {"BOOTSTRAP_SERVERS": kafka.bootstrap_servers, "NAMESPACE": namespace, **more}
    return await run_java(
        example / "java" / "ScoredOrders.java",
        [*install().jars, *install_serdes()],
        {**settings, "COUNT": str(FEW)},
    )


def check_scores(printed: str) -> None:
    """Each order was printed once, with its score."""
    assert len(printed.splitlines()) == FEW
    scores = scores_in(printed)
    assert sorted(scores) == list(range(FEW))
    np.testing.assert_allclose(
        [scores[number] for number in range(FEW)],
        [expected_score(number) for number in range(FEW)],
        rtol=1e-4,
    )
