"""Executors in processes of their own on a real Kafka, one of which is killed."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from headrace.protocol.codec import encode_request
from headrace.tools.local_kafka import LocalKafka
from tests.support.conditions import eventually
from tests.support.processes import Process, create_topics, environment

DEMO = Path(__file__).parents[2] / "headrace" / "tools" / "demo"
REQUESTS = 3000
PARTITIONS = 4
DEADLINE_S = 60.0


async def metric(process: Process, name: str) -> float:
    """A metric of a process, summed over its labels."""
    samples = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)", await process.get("/metrics"), re.M)
    return sum(map(float, samples))


async def send(bootstrap_servers: str, namespace: str, first: int, count: int) -> None:
    """Numbered requests for digits."""
    pixels = np.zeros((1, 64), np.float32)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap_servers) as producer:
        sent = [
            await producer.send(
                f"{namespace}.requests",
                encode_request("application/msgpack", "digits", {"pixels": pixels}),
                partition=number % PARTITIONS,
                headers=[("kafka_correlationId", str(number).encode())],
            )
            for number in range(first, first + count)
        ]
        await asyncio.gather(*sent)


async def collect(bootstrap_servers: str, namespace: str) -> list[Any]:
    """Answers, until each request has one."""
    records: dict[bytes, Any] = {}
    async with AIOKafkaConsumer(
        bootstrap_servers=bootstrap_servers, auto_offset_reset="earliest"
    ) as consumer:
        topic = f"{namespace}.responses"
        consumer.assign([TopicPartition(topic, number) for number in range(PARTITIONS)])
        async with asyncio.timeout(DEADLINE_S):
            while len(records) < REQUESTS:
                for found in (await consumer.getmany(timeout_ms=200)).values():
                    for record in found:
                        records[dict(record.headers)["kafka_correlationId"]] = record
    return list(records.values())


@pytest.mark.timeout(180)
async def test_batches_of_killed_executor_go_to_another(
    kafka: LocalKafka, unique_name: str
) -> None:
    """The other one takes its partitions, the batcher sends it everything, and all is answered."""
    settings = environment(
        kafka.bootstrap_servers, unique_name, DEMO / "models", KAFKA__SESSION_TIMEOUT_MS="6000"
    )
    await create_topics(settings)
    front = Process("ingest,batcher", settings)
    doomed, other = Process("executor", settings), Process("executor", settings)
    async with AsyncExitStack() as stack:
        started = (front, doomed, other, Process("responder", settings))
        await asyncio.gather(*[stack.enter_async_context(process) for process in started])
        collecting = asyncio.create_task(collect(kafka.bootstrap_servers, unique_name))

        async def knows(count: int) -> bool:
            return await metric(front, "headrace_known_executors") == count

        await eventually(lambda: knows(2), deadline_s=DEADLINE_S, recheck_s=0.1)
        await send(kafka.bootstrap_servers, unique_name, 0, REQUESTS // 2)

        async def both_ran() -> bool:
            return min([await metric(one, "headrace_rows_total") for one in (doomed, other)]) > 0

        await eventually(both_ran, deadline_s=DEADLINE_S, recheck_s=0.1)
        await doomed.kill()
        await send(kafka.bootstrap_servers, unique_name, REQUESTS // 2, REQUESTS // 2)
        await eventually(lambda: knows(1), deadline_s=DEADLINE_S, recheck_s=0.1)
        records = await collecting
    assert {dict(record.headers)["x-status"] for record in records} == {b"ok"}
