"""Echo: copies each request record unchanged to the topic of answers, two hops through Kafka."""

from __future__ import annotations

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from benchmarks.loops.served import arguments, start


async def main() -> None:
    given = arguments()
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
            await producer.send(
                given.responses,
                record.value,
                partition=record.partition,
                headers=list(record.headers),
            )


if __name__ == "__main__":
    start(main())
