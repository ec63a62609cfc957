"""Answers that a caller wants elsewhere, in Spring's headers, on a real Kafka."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from headrace.tools.local_kafka import LocalKafka
from tests.support.processes import Process, create_topics, environment
from tests.support.traffic import VALUE

MODELS = Path(__file__).parents[2] / "headrace" / "tools" / "demo" / "models"


class Answer(NamedTuple):
    """An answer as it came, and how long it took by the broker's clock."""

    topic: str
    partition: int
    status: str
    message: str
    latency_ms: int


class ReplyTopicCaller:
    """Sends requests with reply headers and collects what comes back anywhere."""

    def __init__(self, producer: AIOKafkaProducer, consumer: AIOKafkaConsumer, topic: str) -> None:
        self._producer = producer
        self._consumer = consumer
        self._topic = topic
        self._sent_ms: dict[bytes, int] = {}

    async def send(self, name: str, **headers: bytes) -> None:
        """A good request under this correlation id, with further headers."""
        sent = await self._producer.send_and_wait(
            self._topic,
            VALUE,
            partition=0,
            headers=[("kafka_correlationId", name.encode()), *headers.items()],
        )
        self._sent_ms[name.encode()] = sent.timestamp

    async def answers(self, count: int) -> dict[str, Answer]:
        """Return the answers by correlation id."""
        answers: dict[str, Answer] = {}
        async with asyncio.timeout(20):
            while len(answers) < count:
                for records in (await self._consumer.getmany(timeout_ms=200)).values():
                    for record in records:
                        name, answer = self._read(record)
                        assert name not in answers
                        answers[name] = answer
        return answers

    def _read(self, record: Any) -> tuple[str, Answer]:
        headers = dict(record.headers)
        name = headers["kafka_correlationId"]
        return name.decode(), Answer(
            record.topic,
            record.partition,
            headers["x-status"].decode(),
            msgpack.unpackb(record.value).get("error", ""),
            record.timestamp - self._sent_ms[name],
        )


@asynccontextmanager
async def _caller(kafka: LocalKafka, name: str) -> AsyncIterator[ReplyTopicCaller]:
    settings = environment(kafka.bootstrap_servers, name, MODELS)
    await create_topics(settings)
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    await admin.start()
    await admin.create_topics([NewTopic(f"{name}.mine", 3, 1), NewTopic(f"elsewhere-{name}", 1, 1)])
    await admin.close()
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap_servers)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=kafka.bootstrap_servers, auto_offset_reset="earliest"
    )
    async with Process("ingest,batcher,executor,responder", settings), producer, consumer:
        consumer.assign(
            [TopicPartition(f"{name}.mine", number) for number in range(3)]
            + [TopicPartition(f"{name}.responses", number) for number in range(4)]
        )
        yield ReplyTopicCaller(producer, consumer, f"{name}.requests")


@pytest.mark.timeout(120)
async def test_answer_goes_to_topic_and_partition_that_request_names(
    kafka: LocalKafka, unique_name: str
) -> None:
    """Spring's reply headers are followed: topic alone, topic with partition, partition alone."""
    async with _caller(kafka, unique_name) as caller:
        mine = f"{unique_name}.mine"
        await caller.send("both", kafka_replyTopic=mine.encode(), kafka_replyPartition=_int32(2))
        await caller.send("topic", kafka_replyTopic=mine.encode())
        await caller.send("partition", kafka_replyPartition=_int32(3))
        answers = await caller.answers(3)

    assert answers["both"][:3] == (mine, 2, "ok")
    assert answers["topic"][:3] == (mine, 0, "ok")
    assert answers["partition"][:3] == (f"{unique_name}.responses", 3, "ok")


@pytest.mark.timeout(120)
async def test_bad_reply_topic_is_refused_without_delaying_others(
    kafka: LocalKafka, unique_name: str
) -> None:
    """Refusals come on `responses`; requests among them are answered as quickly as ever."""
    bad: dict[str, dict[str, bytes]] = {
        "not-allowed": {"kafka_replyTopic": f"elsewhere-{unique_name}".encode()},
        "one-of-ours": {"kafka_replyTopic": f"{unique_name}.requests".encode()},
        "no-partition": {
            "kafka_replyTopic": f"{unique_name}.mine".encode(),
            "kafka_replyPartition": _int32(3),
        },
        "not-four-bytes": {"kafka_replyPartition": b"3"},
    }
    bad |= {
        f"missing-{number}": {"kafka_replyTopic": f"{unique_name}.missing-{number}".encode()}
        for number in range(30)
    }
    async with _caller(kafka, unique_name) as caller:
        for number, (name, headers) in enumerate(bad.items()):
            await caller.send(name, **headers)
            await caller.send(f"good-{number}")
        answers = await caller.answers(2 * len(bad))

    refused = {name: answer for name, answer in answers.items() if name in bad}
    assert {answer.status for answer in refused.values()} == {"INVALID_REQUEST"}
    assert {answer.topic for answer in answers.values()} == {f"{unique_name}.responses"}
    assert "kafka_replyPartition: expected 0 to 2" in refused["no-partition"].message
    assert f"elsewhere-{unique_name}" in refused["not-allowed"].message
    assert "exists" in refused["missing-0"].message
    good = [answer for name, answer in answers.items() if name not in bad]
    assert {answer.status for answer in good} == {"ok"}
    assert max(answer.latency_ms for answer in answers.values()) < 1000


def _int32(number: int) -> bytes:
    """Encode a number as Spring encodes `kafka_replyPartition`."""
    return struct.pack(">i", number)
