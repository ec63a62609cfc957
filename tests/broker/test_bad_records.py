"""Bad records among good ones on a real Kafka: each gets what it must get, and nobody notices."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from headrace.errors import Code
from headrace.tools.local_kafka import LocalKafka
from tests.support.bad_records import BAD_RECORDS, MAX_REQUEST_BYTES, BadRecord
from tests.support.processes import Process, create_topics, environment

DEMO = Path(__file__).parents[2] / "headrace" / "tools" / "demo"
ROUNDS = 8
WARM_ROUNDS = 3
PARTITIONS = 4
GROWTH_ALLOWED_BYTES = 16 * 1024 * 1024


class Images:
    """Good requests and their right answers."""

    def __init__(self) -> None:
        loaded = np.load(DEMO / "digits_test.npz")
        self._images = loaded["pixels"].astype(np.float32)

    def value(self, number: int) -> bytes:
        tensor = {
            "name": "pixels",
            "datatype": "FP32",
            "shape": [1, 64],
            "data": self._images[number % len(self._images)].tobytes(),
        }
        packed: bytes = msgpack.packb({"model_name": "digits", "inputs": [tensor]})
        return packed

    def all(self) -> Any:
        return self._images


class RpcClient:
    """Sends records and finds what came of each by its offset."""

    def __init__(self, producer: AIOKafkaProducer, consumer: AIOKafkaConsumer, name: str) -> None:
        self._producer = producer
        self._consumer = consumer
        self._name = name
        self.answers: dict[str, Any] = {}
        self.dead_letters: dict[str, Any] = {}

    async def send(self, value: bytes | None, headers: list[Any], number: int) -> str:
        """Returns the identity of the request."""
        sent = await self._producer.send_and_wait(
            f"{self._name}.requests",
            value,
            key=f"key-{number}".encode(),
            partition=number % PARTITIONS,
            headers=headers,
        )
        return f"{sent.topic}/{sent.partition}/{sent.offset}"

    async def receive(self, answers: int, dead_letters: int) -> None:
        """Collect answers until so many have come in all."""
        async with asyncio.timeout(30):
            while len(self.answers) < answers or len(self.dead_letters) < dead_letters:
                polled = await self._consumer.getmany(timeout_ms=100)
                for record in itertools.chain.from_iterable(polled.values()):
                    self._sort(record)

    def _sort(self, record: Any) -> None:
        headers = dict(record.headers)
        if record.topic.endswith(".responses"):
            identity, box = headers["x-request"].decode(), self.answers
        else:
            partition = int.from_bytes(headers["kafka_dlt-original-partition"], "big")
            offset = int.from_bytes(headers["kafka_dlt-original-offset"], "big")
            topic = headers["kafka_dlt-original-topic"].decode()
            identity, box = f"{topic}/{partition}/{offset}", self.dead_letters
        assert identity not in box, f"{identity} came twice on {record.topic}"
        box[identity] = record


@asynccontextmanager
async def _exchange(bootstrap_servers: str, name: str) -> AsyncIterator[RpcClient]:
    async with (
        AIOKafkaProducer(
            bootstrap_servers=bootstrap_servers, max_request_size=8 * MAX_REQUEST_BYTES
        ) as producer,
        AIOKafkaConsumer(
            bootstrap_servers=bootstrap_servers, auto_offset_reset="earliest"
        ) as consumer,
    ):
        consumer.assign(
            [
                TopicPartition(f"{name}.{topic}", number)
                for topic in ("responses", "dead-letters")
                for number in range(PARTITIONS)
            ]
        )
        yield RpcClient(producer, consumer, name)


def _check_refused(bad: BadRecord, number: int, answer: Any, dead_letter: Any) -> None:
    headers = dict(answer.headers)
    assert headers["x-status"].decode() == bad.code, bad.name
    assert answer.key == f"key-{number}".encode(), bad.name
    assert bad.fragment.encode() in answer.value, bad.name
    if not Code(bad.code).is_dead_letter:
        assert dead_letter is None, bad.name
        return
    assert dead_letter.key == f"key-{number}".encode(), bad.name
    assert dead_letter.value == bad.value, bad.name
    kept = list(dead_letter.headers)
    assert kept[: len(bad.headers)] == [tuple(header) for header in bad.headers], bad.name
    assert dict(kept)["kafka_dlt-exception-fqcn"].decode() == bad.code, bad.name


def _label(answer: Any) -> int:
    assert dict(answer.headers)["x-status"] == b"ok", answer.value
    outputs = msgpack.unpackb(answer.value)["outputs"]
    data = next(output["data"] for output in outputs if output["name"] == "label")
    return int(np.frombuffer(data, np.int64)[0])


@pytest.mark.timeout(180)
async def test_bad_records_get_their_codes_and_good_ones_their_answers(
    kafka: LocalKafka, unique_name: str
) -> None:
    """Mixed one to one, over and over: right codes, bytes kept, right answers, no growth."""
    assert len(BAD_RECORDS) >= 200
    images = Images()
    labels = _labels_alone(images.all())
    settings = environment(
        kafka.bootstrap_servers,
        unique_name,
        DEMO / "models",
        LIMITS__MAX_REQUEST_BYTES=str(MAX_REQUEST_BYTES),
    )
    await create_topics(settings)
    kept = sum(Code(bad.code).is_dead_letter for bad in BAD_RECORDS)
    async with (
        Process("ingest,batcher,executor,responder", settings) as process,
        _exchange(kafka.bootstrap_servers, unique_name) as exchange,
    ):
        resident: list[int] = []
        sent: list[tuple[str, str]] = []
        for round_ in range(ROUNDS):
            for number, bad in enumerate(BAD_RECORDS):
                refused = await exchange.send(bad.value, list(bad.headers), number)
                good = await exchange.send(images.value(number), [], number)
                sent.append((refused, good))
            total = len(BAD_RECORDS) * (round_ + 1)
            await exchange.receive(2 * total, kept * (round_ + 1))
            resident.append(process.resident_bytes)
        code = await process.terminate()

    assert code == 0
    assert resident[-1] - resident[WARM_ROUNDS - 1] < GROWTH_ALLOWED_BYTES, resident
    for place, (refused, good) in enumerate(sent):
        number = place % len(BAD_RECORDS)
        _check_refused(
            BAD_RECORDS[number],
            number,
            exchange.answers[refused],
            exchange.dead_letters.get(refused),
        )
        assert _label(exchange.answers[good]) == labels[number % len(labels)]


def _labels_alone(images: Any) -> list[int]:
    """Return the labels that ONNX Runtime gives each image alone."""
    import onnxruntime

    session = onnxruntime.InferenceSession(DEMO / "models" / "digits" / "1" / "model.onnx")
    return [int(session.run(["label"], {"pixels": image.reshape(1, 64)})[0][0]) for image in images]
