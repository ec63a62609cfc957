"""A model's version changes under load, with each stage a process, on a real Kafka."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import numpy as np
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from headrace.protocol.codec import encode_request
from headrace.tools.local_kafka import LocalKafka
from tests.support.conditions import eventually
from tests.support.models import add_version, digits
from tests.support.processes import Process, create_topics, environment

PARTITIONS = 4
STAGES = ("responder", "executor", "batcher", "ingest")
BETWEEN = 200


async def test_no_request_fails_while_version_changes_in_documented_order(
    kafka: LocalKafka, unique_name: str, tmp_path: Path
) -> None:
    """Executor, batcher and ingest get SIGHUP one after the other, while requests come."""
    repository = tmp_path / "models"
    add_version(repository, "digits", 1, digits())
    settings = environment(kafka.bootstrap_servers, unique_name, repository)
    await create_topics(settings)
    pixels = {"pixels": np.zeros((1, 64), np.float32)}
    value = encode_request("application/msgpack", "digits", pixels)
    statuses: Counter[str] = Counter()
    sent = 0
    stopping = asyncio.Event()

    async def send(producer: AIOKafkaProducer) -> None:
        nonlocal sent
        while not stopping.is_set():
            await producer.send_and_wait(
                f"{unique_name}.requests", value, partition=sent % PARTITIONS
            )
            sent += 1

    def has_counted(answers: int) -> bool:
        return statuses.total() >= answers

    async def count(consumer: AIOKafkaConsumer) -> None:
        async for record in consumer:
            statuses[dict(record.headers)["x-status"].decode()] += 1

    async with AsyncExitStack() as stack:
        processes = [Process(stage, settings) for stage in STAGES]
        for process in processes:
            await stack.enter_async_context(process)
        producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap_servers)
        consumer = AIOKafkaConsumer(
            bootstrap_servers=kafka.bootstrap_servers, auto_offset_reset="earliest"
        )
        for client in (producer, consumer):
            await client.start()
            stack.push_async_callback(client.stop)
        consumer.assign(
            [TopicPartition(f"{unique_name}.responses", number) for number in range(PARTITIONS)]
        )
        counting = asyncio.create_task(count(consumer))
        stack.callback(counting.cancel)
        sending = asyncio.create_task(send(producer))
        stack.callback(sending.cancel)
        await eventually(lambda: statuses.total() >= BETWEEN)
        add_version(repository, "digits", 2, digits())
        for process in processes[1:]:
            process.send(signal.SIGHUP)

            async def has_second(process: Process = process) -> bool:
                return "2" in json.loads(await process.get("/v2/models/digits"))["versions"]

            await eventually(has_second, what="version 2")
            wanted = statuses.total() + BETWEEN
            await eventually(partial(has_counted, wanted))
        stopping.set()
        await sending
        await eventually(lambda: statuses.total() >= sent)

    assert statuses == {"ok": sent}
