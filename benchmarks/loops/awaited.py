"""Batches, each answered and committed before the next is read."""

from __future__ import annotations

import asyncio

from benchmarks.loops.served import Model, arguments, connect, start


async def main() -> None:
    given = arguments()
    model = Model(given.model, given.threads)
    consumer, producer = connect(given)
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
