"""One record at a time, as in a first tutorial: run, send and wait, commit and wait."""

from __future__ import annotations

from benchmarks.loops.served import Model, arguments, connect, start


async def main() -> None:
    given = arguments()
    model = Model(given.model, given.threads)
    consumer, producer = connect(given)
    async with consumer, producer:
        async for record in consumer:
            (value,) = await model.answer_soon([record.value], given.slow)
            await producer.send_and_wait(
                given.responses, value, key=record.key, partition=record.partition
            )
            await consumer.commit()


if __name__ == "__main__":
    start(main())
