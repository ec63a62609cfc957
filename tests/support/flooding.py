"""A flood of requests to a process with a small budget of bytes, whose model may be held up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgpack
import numpy as np
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from headrace.delivery.inflight import RECORD_OVERHEAD_BYTES
from headrace.tools.local_kafka import LocalKafka
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.processes import Process, create_topics, environment
from tests.support.scrapes import parse_text

MIB = 1024 * 1024
STAGES = "ingest,batcher,executor,responder"
PARTITIONS = 4
NUMBERS = 4096
STUCK = 7.0
"""A value that the model waits with; with those of its trial runs it does not."""
VALUE = msgpack.packb(
    {
        "model_name": "echo",
        "inputs": [
            {
                "name": "x",
                "datatype": "FP32",
                "shape": [1, NUMBERS],
                "data": np.full(NUMBERS, STUCK, np.float32).tobytes(),
            }
        ],
    }
)
REQUESTS = 128 * MIB // len(VALUE)
"""Eight times what may be in flight."""
BUDGET_BYTES = 16 * MIB
ONE_POLL_BYTES = TUNING.consumer.max_poll_records * (len(VALUE) + RECORD_OVERHEAD_BYTES)
"""The budget is looked at between polls, so that one poll may go over it."""
RESIDENT_BYTES = 6 * BUDGET_BYTES
"""Bytes by which a process may grow: the budget for requests, the outputs that wait for their
acknowledgement, the fetches and unsent batches of the broker's clients, and the memory that the
allocator does not give back. 54 MiB were measured.
"""
MODEL = '''"""Gives back what it gets, but some of it only once a file is there."""

import time
from pathlib import Path


class Model:
    inputs = [("x", "FP32", (-1, NUMBERS))]
    outputs = [("y", "FP32", (-1, NUMBERS))]

    def warm_up(self):
        pass

    def run(self, inputs):
        while (inputs["x"] == STUCK).any() and not Path("GATE").exists():
            time.sleep(0.02)
        return {"y": inputs["x"]}
'''


class Flooded(NamedTuple):
    """A process with more to do than may be in flight.

    Attributes:
        resident_bytes: what it had before the first request.
    """

    process: Process
    bootstrap: str
    namespace: str
    gate: Path
    resident_bytes: int

    async def send(self, reply_topic: str = "", count: int = REQUESTS) -> None:
        """Requests, to all partitions in turn."""
        headers = [("kafka_replyTopic", reply_topic.encode())] if reply_topic else []
        async with AIOKafkaProducer(bootstrap_servers=self.bootstrap, linger_ms=5) as producer:
            for number in range(count):
                await producer.send(
                    f"{self.namespace}.requests",
                    VALUE,
                    partition=number % PARTITIONS,
                    headers=headers,
                )
            await producer.flush()

    async def check_budget(self) -> None:
        """It reads no further, for as long as this looks, although the budget has room for others.

        Until then, what a poll brings is in flight while it waits for room.
        """
        polled: list[int] = []

        async def is_held_up() -> bool:
            polled.append(await self.in_flight_bytes())
            return await self.held_up_partitions() == PARTITIONS

        await eventually(is_held_up, recheck_s=0.05, what="no partition is read")
        for _ in range(20):
            polled.append(await self.in_flight_bytes())
            assert await self.held_up_partitions() == PARTITIONS
            assert 0 < polled[-1] < BUDGET_BYTES
            await asyncio.sleep(0.1)

        assert max(polled) <= BUDGET_BYTES + ONE_POLL_BYTES
        self.check_memory()

    def check_memory(self) -> None:
        """It has never grown by more than it may."""
        assert self.process.peak_resident_bytes - self.resident_bytes <= RESIDENT_BYTES

    async def in_flight_bytes(self) -> int:
        """Return the bytes in flight, as the metrics give them."""
        scraped = parse_text(await self.process.get("/metrics"))
        return int(sum(sample.value for sample in scraped["headrace_in_flight_bytes"].samples))

    async def held_up_partitions(self) -> int:
        """Return how many partitions are paused because the model holds its share."""
        scraped = parse_text(await self.process.get("/metrics"))
        return sum(
            sample.value == 1 and sample.labels["reason"] == "share"
            for sample in scraped["headrace_partition_paused"].samples
        )

    @asynccontextmanager
    async def reading(self, topic: str, partitions: int) -> AsyncIterator[AIOKafkaConsumer]:
        """A reader of a topic from its beginning."""
        async with AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
        ) as consumer:
            consumer.assign([TopicPartition(topic, number) for number in range(partitions)])
            yield consumer

    async def until_holds(self, topic: str, partitions: int, expected: int) -> None:
        """Wait until the topic holds so many records."""
        async with self.reading(topic, partitions) as consumer:

            async def records() -> bool:
                ends = await consumer.end_offsets(list(consumer.assignment()))
                return int(sum(ends.values())) >= expected

            await eventually(records, deadline_s=120, recheck_s=0.2, what=f"{expected} in {topic}")


@asynccontextmanager
async def flooding(kafka: LocalKafka, namespace: str, directory: Path) -> AsyncIterator[Flooded]:
    """A process with a small budget, whose model waits until the gate is there."""
    gate = directory / "gate"
    version = directory / "models" / "echo" / "1"
    version.mkdir(parents=True)
    model = (
        MODEL.replace("NUMBERS", str(NUMBERS))
        .replace("STUCK", str(STUCK))
        .replace("GATE", str(gate))
    )
    (version / "model.py").write_text(model)
    (version.parent / "model.toml").write_text('backend = "python"\nmax_execution_s = 120\n')
    settings = environment(
        kafka.bootstrap_servers,
        namespace,
        directory / "models",
        TOPICS__REPLICATION_FACTOR=str(len(kafka.node_ids)),
        LIMITS__MAX_IN_FLIGHT_BYTES=str(BUDGET_BYTES),
    )
    await create_topics(settings)
    async with Process(STAGES, settings) as process:
        yield Flooded(process, kafka.bootstrap_servers, namespace, gate, process.resident_bytes)
