"""What requests cost in talk with the broker, counted without a clock.

Beside `tests/flow/test_guards.py`: ceilings on requests to the broker and on reads and writes of
sockets. Each of those is a system call, which costs what a whole request may.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiokafka.conn import AIOKafkaConnection

from headrace.config import Settings, make_settings
from headrace.local_kafka import LocalKafka
from headrace.log.kafka import KafkaLog
from headrace.log.port import NewRecord, TopicPartition
from headrace.pipeline import Pipeline, running
from headrace.topic_plan import plan_topics
from headrace.topics import Topic
from tests.support.conditions import eventually
from tests.support.models import add_version, digits
from tests.support.services import digits_value

REQUESTS = 20_000
PARTITIONS = 4
BROKER_REQUESTS = 0.01
"""For each answer: a produce request has dozens of answers, and a fetch hundreds of records."""
SOCKET_READS = 0.015


@pytest.fixture
def settings(kafka: LocalKafka, unique_name: str, tmp_path: Path) -> Settings:
    """Of a pipeline with the model `digits`."""
    add_version(tmp_path, "digits", 1, digits())
    return make_settings(
        {
            "namespace": unique_name,
            "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
            "topics": {"partitions": PARTITIONS},
            "models": {"repository": tmp_path},
        }
    )


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts requests to brokers, each of which is a write to a socket, and reads of sockets."""
    counts: Counter[str] = Counter()
    send, receive = AIOKafkaConnection.send, asyncio.StreamReaderProtocol.data_received

    def counted_send(self: Any, *args: Any, **more: Any) -> Any:
        counts["requests"] += 1
        return send(self, *args, **more)

    def counted_receive(self: asyncio.StreamReaderProtocol, data: bytes) -> None:
        counts["reads"] += 1
        receive(self, data)

    monkeypatch.setattr(AIOKafkaConnection, "send", counted_send)
    monkeypatch.setattr(asyncio.StreamReaderProtocol, "data_received", counted_receive)
    return counts


async def fill(log: KafkaLog, topic: str) -> None:
    """Requests in all partitions, acknowledged."""
    value = digits_value()
    async with log.producer() as producer:
        for partition in range(PARTITIONS):
            records = [NewRecord(None, value)] * (REQUESTS // PARTITIONS)
            for run in await producer.send(TopicPartition(topic, partition), records):
                await run.acknowledged


async def test_talk_with_the_broker_per_request(settings: Settings, talk: Counter[str]) -> None:
    """A backlog is read, answered and committed with few requests to the broker."""
    assert settings.kafka is not None
    async with KafkaLog(settings.kafka) as log:
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        await fill(log, settings.topic(Topic.REQUESTS))
        topic = settings.topic(Topic.RESPONSES)
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        pipeline = Pipeline(settings, log)
        talk.clear()
        async with running(pipeline):
            totals = pipeline.metrics.totals
            await eventually(
                lambda: sum(each["count"] for each in totals()["requests"]) >= REQUESTS,
                deadline_s=50.0,
                recheck_s=0.05,
            )
            counted = dict(talk)
        async with log.reader(partitions) as reader:
            assert sum((await reader.end_offsets(partitions)).values()) == REQUESTS

    assert counted["requests"] / REQUESTS <= BROKER_REQUESTS
    assert counted["reads"] / REQUESTS <= SOCKET_READS
