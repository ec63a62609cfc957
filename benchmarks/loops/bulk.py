"""The bulk loop: whole batches by `create_batch` and `send_batch`, commits in the background.

This is the fastest way with aiokafka. Without `--overlapped` each poll is acknowledged before the
next; with it, the partitions overlap: a partition waits only for its own last batch.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from benchmarks.loops.background import commit_answered
from benchmarks.loops.served import Arguments, Model, arguments, connect, start

POLL_RECORDS = 4096
SLOW_BATCHES = 4
"""Batches per poll with a slow model: all of a poll is answered before the next one."""


class Loop:
    """Reads, answers and writes; see the module."""

    def __init__(
        self, given: Arguments, consumer: AIOKafkaConsumer, producer: AIOKafkaProducer
    ) -> None:
        self._given = given
        self._model = Model(given.model, given.threads)
        self._consumer = consumer
        self._producer = producer
        self.answered: dict[TopicPartition, int] = {}

    async def run(self, *, overlapped: bool) -> None:
        """Serve until cancelled."""
        under_way: dict[TopicPartition, asyncio.Future[None]] = {}
        given = self._given
        most = SLOW_BATCHES * given.batch if given.slow else POLL_RECORDS
        while True:
            polled = await self._consumer.getmany(timeout_ms=100, max_records=most)
            for partition, records in polled.items():
                if partition in under_way:
                    await under_way.pop(partition)
                under_way[partition] = await self._answer(partition, records)
            if not overlapped:
                for acknowledged in under_way.values():
                    await acknowledged
                under_way.clear()

    async def _answer(
        self, partition: TopicPartition, records: Sequence[Any]
    ) -> asyncio.Future[None]:
        """Answer the records of a partition; the returned future completes when all are
        acknowledged.
        """
        builder = self._producer.create_batch()
        sent: list[asyncio.Future[Any]] = []
        for first in range(0, len(records), self._given.batch):
            batch = records[first : first + self._given.batch]
            values = await self._model.answer_soon([one.value for one in batch], self._given.slow)
            now_ms = time.time_ns() // 1_000_000
            for record, value in zip(batch, values, strict=True):
                added = builder.append(key=record.key, value=value, timestamp=now_ms, headers=[])
                if added is None:
                    sent.append(await self._send(builder, partition))
                    builder = self._producer.create_batch()
                    builder.append(key=record.key, value=value, timestamp=now_ms, headers=[])
        sent.append(await self._send(builder, partition))
        return asyncio.ensure_future(self._ack(partition, records[-1].offset + 1, sent))

    async def _send(self, builder: Any, partition: TopicPartition) -> asyncio.Future[Any]:
        acknowledged: asyncio.Future[Any] = await self._producer.send_batch(
            builder, self._given.responses, partition=partition.partition
        )
        return acknowledged

    async def _ack(
        self, partition: TopicPartition, offset: int, sent: Sequence[asyncio.Future[Any]]
    ) -> None:
        for acknowledged in sent:
            await acknowledged
        self.answered[partition] = offset


async def main() -> None:
    overlapped = "--overlapped" in sys.argv
    if overlapped:
        sys.argv.remove("--overlapped")
    given = arguments()
    consumer, producer = connect(given, max_batch_size=256 * 1024)
    async with consumer, producer, asyncio.TaskGroup() as tasks:
        loop = Loop(given, consumer, producer)
        tasks.create_task(commit_answered(consumer, loop.answered), name="commit")
        await loop.run(overlapped=overlapped)


if __name__ == "__main__":
    start(main())
