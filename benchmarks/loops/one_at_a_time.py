"""One record at a time, as in a first tutorial: run, send and wait, commit and wait."""

from __future__ import annotations

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
        async for record in consumer:
            (value,) = await model.answer_soon([record.value], given.slow)
            await producer.send_and_wait(
                given.responses, value, key=record.key, partition=record.partition
            )
            await consumer.commit()


if __name__ == "__main__":
    start(main())
