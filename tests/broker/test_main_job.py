"""The main job on a real Kafka: requests from a plain producer get their answers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import onnxruntime
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from headrace.tools.local_kafka import LocalKafka
from tests.support.processes import Process, create_topics, environment

DEMO = Path(__file__).parents[2] / "headrace" / "tools" / "demo"
REQUESTS = 10_000
PARTITIONS = 4

FUSED = ("ingest,batcher,executor,responder",)
FOUR = ("ingest", "batcher", "executor", "responder")


class Expected(NamedTuple):
    """The right answer for one image: that of ONNX Runtime run on it alone."""

    image: bytes
    probabilities: np.ndarray[Any, Any]
    label: int


@pytest.fixture(scope="module")
def digits() -> list[Expected]:
    """Every test image with its unbatched answer."""
    images = np.load(DEMO / "digits_test.npz")["pixels"].astype(np.float32)
    session = onnxruntime.InferenceSession(DEMO / "models" / "digits" / "1" / "model.onnx")
    expected = []
    for image in images:
        probabilities, label = session.run(
            ["probabilities", "label"], {"pixels": image.reshape(1, 64)}
        )
        expected.append(Expected(image.tobytes(), probabilities, int(label[0])))
    return expected


def _value(number: int, image: bytes, content_type: str) -> bytes:
    tensor: dict[str, Any] = {"name": "pixels", "datatype": "FP32", "shape": [1, 64]}
    if content_type == "application/json":
        tensor["data"] = np.frombuffer(image, np.float32).tolist()
        return json.dumps({"model_name": "digits", "id": str(number), "inputs": [tensor]}).encode()
    tensor["data"] = image
    packed: bytes = msgpack.packb({"model_name": "digits", "id": str(number), "inputs": [tensor]})
    return packed


async def _produce(bootstrap_servers: str, topic: str, digits: list[Expected]) -> None:
    """Send all requests: a flood, then in windows of 64, then some one after the other."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap_servers)
    await producer.start()
    try:
        flood, windows = int(REQUESTS * 0.7), int(REQUESTS * 0.99)
        sent = [await _send(producer, topic, number, digits) for number in range(flood)]
        await asyncio.gather(*sent)
        for start in range(flood, windows, 64):
            numbers = range(start, min(start + 64, windows))
            await asyncio.gather(
                *[await _send(producer, topic, number, digits) for number in numbers]
            )
        for number in range(windows, REQUESTS):
            await (await _send(producer, topic, number, digits))
    finally:
        await producer.stop()


async def _send(producer: AIOKafkaProducer, topic: str, number: int, digits: list[Expected]) -> Any:
    content_type = "application/json" if number % 2 else "application/msgpack"
    return await producer.send(
        topic,
        key=f"key-{number}".encode(),
        value=_value(number, digits[number % len(digits)].image, content_type),
        partition=number % PARTITIONS,
        headers=[
            ("content-type", content_type.encode()),
            ("kafka_correlationId", number.to_bytes(8, "big")),
            ("order-line", b"of the caller's"),
            ("ce_id", b"stays behind"),
            ("x-priority", b"1"),
        ],
    )


@asynccontextmanager
async def _reading(bootstrap_servers: str, topic: str) -> AsyncIterator[AIOKafkaConsumer]:
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap_servers,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    )
    await consumer.start()
    try:
        consumer.assign([TopicPartition(topic, number) for number in range(PARTITIONS)])
        yield consumer
    finally:
        await consumer.stop()


async def _answers(bootstrap_servers: str, topic: str, count: int) -> list[Any]:
    """The first `count` answers, and whatever comes within a second after them."""
    records: list[Any] = []
    async with _reading(bootstrap_servers, topic) as consumer, asyncio.timeout(90):
        while len(records) < count:
            polled = await consumer.getmany(timeout_ms=200)
            records += itertools.chain.from_iterable(polled.values())
        polled = await consumer.getmany(timeout_ms=1000)
        return records + list(itertools.chain.from_iterable(polled.values()))


def _check(record: Any, digits: list[Expected], namespace: str) -> int:
    """One answer against what it must be; returns the number of its request."""
    headers = dict(record.headers)
    number = int.from_bytes(headers["kafka_correlationId"], "big")
    expected = digits[number % len(digits)]
    assert record.key == f"key-{number}".encode()
    assert record.partition == number % PARTITIONS
    assert headers["x-status"] == b"ok"
    assert headers["x-request"].startswith(f"{namespace}.requests/{record.partition}/".encode())
    assert headers["order-line"] == b"of the caller's"
    assert "ce_id" not in headers
    assert "x-priority" not in headers
    if number % 2:
        assert headers["content-type"] == b"application/json"
        answer = json.loads(record.value)
        probabilities = np.array(_data(answer, "probabilities"), np.float32)
        label = _data(answer, "label")[0]
    else:
        assert headers["content-type"] == b"application/msgpack"
        answer = msgpack.unpackb(record.value)
        probabilities = np.frombuffer(_data(answer, "probabilities"), np.float32)
        label = np.frombuffer(_data(answer, "label"), np.int64)[0]
    assert (answer["model_name"], answer["model_version"]) == ("digits", "1")
    assert answer["id"] == str(number)
    assert label == expected.label
    np.testing.assert_allclose(probabilities, expected.probabilities[0], rtol=0, atol=1e-5)
    return number


def _data(answer: dict[str, Any], name: str) -> Any:
    return next(output["data"] for output in answer["outputs"] if output["name"] == name)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("processes", [FUSED, FOUR], ids=["fused", "four-processes"])
async def test_every_request_gets_correct_answer(
    kafka: LocalKafka, unique_name: str, digits: list[Expected], processes: tuple[str, ...]
) -> None:
    """10,000 requests of a plain producer, in two encodings, get 10,000 right answers."""
    settings = environment(kafka.bootstrap_servers, unique_name, DEMO / "models")
    await create_topics(settings)
    async with AsyncExitStack() as stack:
        started = [Process(stages, settings) for stages in processes]
        await asyncio.gather(*[stack.enter_async_context(process) for process in started])
        reading = asyncio.create_task(
            _answers(kafka.bootstrap_servers, f"{unique_name}.responses", REQUESTS)
        )
        await _produce(kafka.bootstrap_servers, f"{unique_name}.requests", digits)
        records = await reading
        codes = [await process.terminate() for process in started]

    numbers = sorted(_check(record, digits, unique_name) for record in records)
    assert numbers == list(range(REQUESTS))
    assert codes == [0] * len(processes)
