"""Echo: copies each request record unchanged to the topic of answers, two hops through Kafka."""

from __future__ import annotations

from benchmarks.loops.served import arguments, connect, start


async def main() -> None:
    given = arguments()
    consumer, producer = connect(given)
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
