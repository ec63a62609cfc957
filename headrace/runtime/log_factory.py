"""The log that the settings name: Kafka, or the embedded one when no broker is configured."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headrace.config import Settings
from headrace.log.port import Log
from headrace.runtime.topic_plan import plan_topics
from headrace.tuning import TUNING, Tuning


@asynccontextmanager
async def open_log(
    settings: Settings, tuning: Tuning = TUNING, on_request: Callable[[str], None] = lambda _: None
) -> AsyncIterator[Log]:
    """Open the log, and close it when the context is left.

    The embedded log is new each time, visible to this process only, and already has Headrace's
    topics. On Kafka nothing is created, and no request is sent before the log is used.

    Args:
        settings: name the brokers.
        tuning: passed on to the log.
        on_request: called with the name of each request to a broker.
    """
    async with _adapter(settings, tuning, on_request) as log:
        if settings.kafka is None:
            await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        yield log


def _adapter(settings: Settings, tuning: Tuning, on_request: Callable[[str], None]) -> Log:
    # Import each adapter only when needed: the embedded log runs without aiokafka, and its tests
    # and `headrace --help` do not wait for that import.
    if settings.kafka is None:
        from headrace.log.memory import MemoryLog

        return MemoryLog(tuning=tuning.memory)
    from headrace.log.kafka.log import KafkaLog

    return KafkaLog(
        settings.kafka,
        decompressed_bytes=settings.decompressed_bytes,
        tuning=tuning.kafka,
        on_request=on_request,
    )
