"""Requests that go on steadily, and their answers, while something else is done to the brokers."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Sequence
from typing import Any, Final, Self

import msgpack
import numpy as np
from aiokafka import AIOKafkaProducer

from headrace.config import KafkaSettings
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import TopicPartition
from tests.support.conditions import DEADLINE_S, eventually

PARTITIONS: Final = 4
VALUE: Final = msgpack.packb(
    {
        "model_name": "digits",
        "inputs": [
            {
                "name": "pixels",
                "datatype": "FP32",
                "shape": [1, 64],
                "data": np.zeros(64, np.float32).tobytes(),
            }
        ],
    }
)
_EVERY_S: Final = 0.2
_BURST: Final = 10
"""Requests that are sent at once. Fifty requests a second one by one would cost a broker, which has
a transaction for each, several times the processor time.
"""
_POLL_S: Final = 0.2


class Traffic:
    """Sends numbered requests of the digits model, and counts answers by number.

    Its producer never gives up, and its reader sees what is committed; both are of the outside:
    they know the brokers by addresses of their own.

    Args:
        bootstrap_servers: where the brokers are.
        namespace: whose topics to use.

    Attributes:
        sent: how many requests were handed over.
        counts: how many answers each number has had; -1 stands for all without one.
        codes: how many answers there were of each status.
    """

    def __init__(self, bootstrap_servers: str, namespace: str) -> None:
        self._servers = bootstrap_servers
        self._namespace = namespace
        self._tasks: list[asyncio.Task[None]] = []
        self._sending = True
        self._acknowledged: list[asyncio.Future[Any]] = []
        self.sent = 0
        self.counts: collections.Counter[int] = collections.Counter()
        self.codes: collections.Counter[str] = collections.Counter()

    async def __aenter__(self) -> Self:
        reading = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read(reading), name="traffic-answers")]
        async with asyncio.timeout(DEADLINE_S):
            await reading.wait()
        self._tasks.append(asyncio.create_task(self._send(), name="traffic-requests"))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def send_one(self, headers: Sequence[tuple[str, bytes]]) -> None:
        """Send one request beside the numbered ones, with headers of its own."""
        async with AIOKafkaProducer(bootstrap_servers=self._servers) as producer:
            topic = f"{self._namespace}.requests"
            await producer.send_and_wait(topic, VALUE, partition=0, headers=[*headers])

    async def flows(self, more: int = 25) -> None:
        """Wait until so many more numbers have their answer."""
        goal = len(self.counts.keys() - {-1}) + more
        await eventually(lambda: self._got_on(goal), deadline_s=60, recheck_s=0.05)

    def _got_on(self, goal: int) -> bool:
        for task in self._tasks:
            if task.done():
                task.result()
        return len(self.counts.keys() - {-1}) >= goal

    async def all_answered(self, deadline_s: float = 60.0) -> None:
        """Send no more, and wait until every request has an answer."""
        self._sending = False
        async with asyncio.timeout(deadline_s):
            await self._tasks[1]
        try:
            await eventually(lambda: self._got_on(self.sent), deadline_s=deadline_s, recheck_s=0.05)
        except AssertionError as error:
            missing = sorted(set(range(self.sent)) - self.counts.keys())
            error.add_note(f"{len(missing)} of {self.sent} without an answer: {missing[:40]}")
            raise

    @property
    def doubled(self) -> set[int]:
        """Numbers that have more than one answer."""
        return {number for number, count in self.counts.items() if count > 1}

    async def _send(self) -> None:
        topic = f"{self._namespace}.requests"
        async with AIOKafkaProducer(
            bootstrap_servers=self._servers,
            enable_idempotence=True,
            request_timeout_ms=120_000,  # how long it waits for room while brokers are unavailable
        ) as producer:
            while self._sending:
                for _ in range(_BURST):
                    headers = [("kafka_correlationId", b"%d" % self.sent)]
                    self._acknowledged.append(
                        await producer.send(
                            topic, VALUE, partition=self.sent % PARTITIONS, headers=headers
                        )
                    )
                    self.sent += 1
                await asyncio.sleep(_EVERY_S)
            await asyncio.gather(*self._acknowledged)

    async def _read(self, reading: asyncio.Event) -> None:
        partitions = [
            TopicPartition(f"{self._namespace}.responses", number) for number in range(PARTITIONS)
        ]
        log = KafkaLog(KafkaSettings(bootstrap_servers=self._servers))
        async with log, log.reader(partitions) as reader:
            reading.set()
            while True:
                for records in (await reader.poll(_POLL_S, 500)).values():
                    for record in records:
                        headers = dict(record.headers)
                        self.codes[(headers["x-status"] or b"").decode()] += 1
                        self.counts[int(headers.get("kafka_correlationId") or b"-1")] += 1
