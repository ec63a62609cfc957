"""Partition counts of reply topics, looked up without delaying answers for other topics.

Results are cached for a minute. An unknown topic is looked up in its own task, at most once at a
time, and only the requests for that topic wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from headrace.errors import Retriable
from headrace.log.errors import TopicForbidden
from headrace.log.port import Producer
from headrace.protocol.messages import Request
from headrace.telemetry.logs import Event

log = structlog.get_logger(__name__)

REMEMBER_S = 60.0
MAX_REMEMBERED = 10_000
MAX_LOOKUPS = 64
RETRY_S = 0.5

Resolved = Callable[[list[Request], int | TopicForbidden | None], Awaitable[None]]
"""Called with the waiting requests and the number of partitions; None if there is no such topic."""


class TopicDirectory:
    """Cache of the partition counts of callers' topics.

    Args:
        on_resolved: continues with the requests that waited.
    """

    def __init__(self, producer: Producer, on_resolved: Resolved) -> None:
        self._producer = producer
        self._on_resolved = on_resolved
        self._known: dict[str, tuple[int, float]] = {}
        self._waiting: dict[str, list[Request]] = {}
        self._permits = asyncio.Semaphore(MAX_LOOKUPS)

    def known(self, topic: str) -> int | None:
        """Return the number of partitions; None if it is not cached."""
        entry = self._known.get(topic)
        if entry is None or entry[1] < time.monotonic():
            return None
        return entry[0]

    def wait_for(self, topic: str, request: Request, tasks: asyncio.TaskGroup) -> None:
        """Look up the topic, then continue with the request through `on_resolved`."""
        waiting = self._waiting.get(topic)
        if waiting is not None:
            waiting.append(request)
            return
        self._waiting[topic] = [request]
        tasks.create_task(self._look_up(topic), name="responder-lookup")

    async def _look_up(self, topic: str) -> None:
        async with self._permits:
            partitions = await self._ask(topic)
        if isinstance(partitions, int):
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            self._known[topic] = (partitions, time.monotonic() + REMEMBER_S)
        await self._on_resolved(self._waiting.pop(topic), partitions)

    async def _ask(self, topic: str) -> int | TopicForbidden | None:
        while True:
            try:
                return await self._producer.partitions_for(topic)
            except TopicForbidden as error:
                return error
            except Retriable as error:
                # Retry forever: without a broker, a refusal cannot be sent either.
                log.warning(Event.REPLY_TOPIC_UNKNOWN, topic=topic, reason=str(error))
                await asyncio.sleep(RETRY_S)
