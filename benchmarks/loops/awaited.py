"""Batches, each answered and committed before the next is read."""

from __future__ import annotations

import asyncio

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from benchmarks.loops.served import Model, arguments, start


async def main() -> None:
    given = arguments()
    model = Model(given.model, given.threads)
    consumer = AIOKafkaConsumer(
        given.requests,
        bootstrap_servers=given.bootstrap_servers,
        group_id=given.group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )
    producer = AIOKafkaProducer(
        bootstrap_servers=given.bootstrap_servers, acks="all", enable_idempotence=True
    )
    async with consumer, producer:
        while True:
            polled = await consumer.getmany(timeout_ms=100, max_records=given.batch)
            sent = []
            for partition, records in polled.items():
                values = await model.answer_soon([record.value for record in records], given.slow)
                for record, value in zip(records, values, strict=True):
                    sent.append(
                        await producer.send(
                            given.responses,
                            value,
                            key=record.key,
                            partition=partition.partition,
                        )
                    )
            await asyncio.gather(*sent)
            if polled:
                await consumer.commit()


if __name__ == "__main__":
    start(main())
