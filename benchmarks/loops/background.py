"""Batches, with commits of the acknowledged offsets in the background, one at a time."""

from __future__ import annotations

import asyncio

from aiokafka import AIOKafkaConsumer, TopicPartition

from benchmarks.loops.served import Model, arguments, connect, start

POLL_RECORDS = 512


async def commit_answered(consumer: AIOKafkaConsumer, answered: dict[TopicPartition, int]) -> None:
    """Commit the newest answered offsets, until cancelled."""
    while True:
        offsets = dict(answered)
        answered.clear()
        if offsets:
            await consumer.commit(offsets)
        else:
            await asyncio.sleep(0.005)


async def main() -> None:
    given = arguments()
    model = Model(given.model, given.threads)
    consumer, producer = connect(given, max_batch_size=256 * 1024)
    answered: dict[TopicPartition, int] = {}
    async with consumer, producer, asyncio.TaskGroup() as tasks:
        tasks.create_task(commit_answered(consumer, answered), name="commit")
        while True:
            polled = await consumer.getmany(timeout_ms=100, max_records=POLL_RECORDS)
            sent = []
            for partition, records in polled.items():
                for first in range(0, len(records), given.batch):
                    batch = records[first : first + given.batch]
                    values = await model.answer_soon([one.value for one in batch], given.slow)
                    for record, value in zip(batch, values, strict=True):
                        sent.append(
                            await producer.send(
                                given.responses,
                                value,
                                key=record.key,
                                partition=partition.partition,
                            )
                        )
            await asyncio.gather(*sent)
            for partition, records in polled.items():
                answered[partition] = records[-1].offset + 1


if __name__ == "__main__":
    start(main())
