"""Exactly once on a real Kafka, with processes that are killed, and one that wakes up too late."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiokafka
import numpy as np
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from headrace.protocol.codec import encode_request
from headrace.tools.local_kafka import LocalKafka
from tests.support.conditions import eventually
from tests.support.models import add_version, digits
from tests.support.processes import Process, create_topics, environment

PARTITIONS = 4
FUSED = ("ingest,batcher,executor,responder",)
THREE = ("ingest", "batcher,executor", "responder")

Answered = Counter[tuple[int, int]]


class ExactlyOnceHarness:
    """One namespace on a broker: sends requests, and sees what a `read_committed` reader sees.

    Attributes:
        value: what is sent: a request of digits.
        partitions: of each topic.
        seen: how many visible answers each request has, by its partition and offset.
    """

    def __init__(self, bootstrap_servers: str, namespace: str, models: Path) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._namespace = namespace
        pixels = np.ones((1, 64), np.float32)
        self.value = encode_request("application/msgpack", "digits", {"pixels": pixels})
        self.partitions = PARTITIONS
        self.sent = 0
        self.seen: Answered = Counter()
        self.settings = environment(
            bootstrap_servers,
            namespace,
            models,
            DELIVERY__GUARANTEE="exactly_once",
            KAFKA__SESSION_TIMEOUT_MS="6000",
        )

    async def send(self, count: int) -> None:
        """Send so many requests, to all partitions in turn."""
        topic = f"{self._namespace}.requests"
        async with AIOKafkaProducer(bootstrap_servers=self._bootstrap_servers) as producer:
            acknowledged = [
                await producer.send(topic, self.value, partition=number % self.partitions)
                for number in range(self.sent, self.sent + count)
            ]
            await asyncio.gather(*acknowledged)
        self.sent += count

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Count answers while the context lasts."""
        topic = f"{self._namespace}.responses"
        async with (
            AIOKafkaConsumer(
                bootstrap_servers=self._bootstrap_servers,
                auto_offset_reset="earliest",
                isolation_level="read_committed",
            ) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            consumer.assign(
                [aiokafka.TopicPartition(topic, each) for each in range(self.partitions)]
            )
            ending = asyncio.Event()

            async def read() -> None:
                quiet = 0
                while quiet < 2:
                    polled = await consumer.getmany(timeout_ms=500)
                    for records in polled.values():
                        self.seen.update(_source_of(dict(record.headers)) for record in records)
                    # What is still to come when all is over has a second to come.
                    quiet = quiet + 1 if ending.is_set() and not polled else 0

            tasks.create_task(read(), name="reading")
            yield
            ending.set()

    async def all_seen(self, deadline_s: float = 60.0) -> None:
        """Wait until each request has an answer."""
        try:
            await eventually(
                lambda: len(self.seen) >= self.sent, deadline_s=deadline_s, recheck_s=0.05
            )
        except AssertionError:
            raise AssertionError(f"{len(self.seen)} of {self.sent} are answered") from None

    async def seen_beyond(self, count: int) -> None:
        """Wait until more requests than these have an answer."""
        await eventually(lambda: len(self.seen) > count, recheck_s=0.005)

    def each_once(self) -> Answered:
        """Count each sent request once, as the visible answers must in the end."""
        return Counter(
            (number % self.partitions, number // self.partitions) for number in range(self.sent)
        )


def _source_of(headers: dict[str, bytes]) -> tuple[int, int]:
    _, partition, offset = headers["x-request"].decode().rsplit("/", 2)
    return int(partition), int(offset)


@pytest.fixture
async def bench(kafka: LocalKafka, unique_name: str, tmp_path: Path) -> ExactlyOnceHarness:
    """With its topics and its model."""
    add_version(tmp_path, "digits", 1, digits())
    bench = ExactlyOnceHarness(kafka.bootstrap_servers, unique_name, tmp_path)
    await create_topics(bench.settings)
    return bench


@pytest.mark.timeout(180)
async def test_killed_processes_answer_each_request_once(bench: ExactlyOnceHarness) -> None:
    """10,000 requests, while each process is killed in the midst of its work and started again."""
    async with bench.reading(), AsyncExitStack() as stack:
        processes = [Process(part, bench.settings) for part in THREE]
        await asyncio.gather(*[stack.enter_async_context(each) for each in processes])
        share = 10_000 // (len(processes) + 1)
        for part, process in zip(THREE, processes, strict=True):
            reached = len(bench.seen)
            await bench.send(share)
            await bench.seen_beyond(reached)
            await process.kill()
            await stack.enter_async_context(Process(part, bench.settings))
        await bench.send(10_000 - bench.sent)
        await bench.all_seen()

    assert bench.seen == bench.each_once()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("stages", [FUSED, THREE], ids=["fused", "three-processes"])
async def test_answers_of_zombie_are_not_visible(
    bench: ExactlyOnceHarness, stages: tuple[str, ...]
) -> None:
    """Stopped in the midst of answering, replaced by another, and woken: only the other counts."""
    async with bench.reading(), AsyncExitStack() as stack:
        processes = [Process(part, bench.settings) for part in stages]
        await asyncio.gather(*[stack.enter_async_context(each) for each in processes])
        zombie = processes[-1]
        # The reader of a new topic may wait for its leaders while all that was sent is answered.
        await bench.send(100)
        await bench.all_seen()
        while True:
            answered = bench.sent + 600
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(bench.send(20_000), name="sending")
                await bench.seen_beyond(answered)
                zombie.send(signal.SIGSTOP)
            if len(bench.seen) < bench.sent:
                break
            zombie.send(signal.SIGCONT)  # it had answered all before this process noticed
        stack.callback(zombie.send, signal.SIGCONT)  # a stopped process heeds no SIGTERM
        await stack.enter_async_context(Process(stages[-1], bench.settings))
        await bench.all_seen(deadline_s=90)
        zombie.send(signal.SIGCONT)
        await eventually(lambda: _has_learned(zombie), recheck_s=0.1)
        await bench.send(1000)
        await bench.all_seen()

    assert bench.seen == bench.each_once()


def _has_learned(process: Process) -> bool:
    """Whether a process has said that its partitions are lost, or given up and taken anew."""
    events = [event["event"] for event in process.events]
    return "partitions.lost" in events or events.count("partitions.assigned") > 1
