"""FastStream with batches, as in its documentation: a batch subscriber and a batch publisher.

Offsets are committed after the function has returned (`AckPolicy.NACK_ON_ERROR`, its at-least-once
mode); `Batch` publishing returns the answers of one call as one batch.
"""

from __future__ import annotations

from faststream import AckPolicy, FastStream
from faststream.kafka import KafkaBroker

from benchmarks.loops.served import Model, arguments, start

given = arguments()
model = Model(given.model, given.threads)
broker = KafkaBroker(given.bootstrap_servers, acks="all", enable_idempotence=True)
app = FastStream(broker)


async def raw(message: object) -> list[bytes]:
    """Return the values unchanged, since the loop decodes them itself."""
    return message.body  # type: ignore[attr-defined]  # FastStream's own message type


@broker.subscriber(
    given.requests,
    batch=True,
    max_records=given.batch,
    group_id=given.group,
    auto_offset_reset="earliest",
    ack_policy=AckPolicy.NACK_ON_ERROR,
    decoder=raw,
)
async def answer(values: list[bytes]) -> None:
    """Run the batch and publish its answers."""
    answers = await model.answer_soon(values, given.slow)
    await broker.publish_batch(*answers, topic=given.responses)


if __name__ == "__main__":
    start(app.run())
