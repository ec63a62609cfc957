"""Cancel requests whose callers have given up, by records to the services.

A cancelled caller must not be delayed by this and cannot handle its failure. So one task sends the
records with best effort, and counts those that could not be sent or exceeded the queue.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Self

from headrace.client.replies import CORRELATION_ID
from headrace.errors import HeadraceError
from headrace.log.port import NewRecord, Producer, TopicPartition

CANCEL = "x-cancel"
MAX_WAITING = 1024
SEND_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 0.5
"""Longest time for sending what is queued when the client is closed."""


class _Cancelled(NamedTuple):
    partition: TopicPartition
    key: bytes | None
    correlation_id: bytes


class Cancellations:
    """Send a cancelling record for each request whose caller has given up.

    Attributes:
        sent, lost: numbers of records that were acknowledged, and that were not.
    """

    def __init__(self, producer: Producer) -> None:
        self.sent = 0
        self.lost = 0
        self._producer = producer
        self._waiting: asyncio.Queue[_Cancelled] = asyncio.Queue(MAX_WAITING)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        # This object owns the task and ends it on exit: see `Replies`.
        self._task = asyncio.create_task(self._send(), name="cancellations")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._waiting.join()
        except TimeoutError:
            self.lost += self._waiting.qsize()
        self._task.cancel()
        await asyncio.wait([self._task])

    def add(self, partition: TopicPartition, key: bytes | None, correlation_id: bytes) -> None:
        """Queue the cancellation of a request that was sent to this partition."""
        try:
            self._waiting.put_nowait(_Cancelled(partition, key, correlation_id))
        except asyncio.QueueFull:
            self.lost += 1

    async def _send(self) -> None:
        while True:
            partition, key, correlation_id = await self._waiting.get()
            record = NewRecord(key, None, [(CANCEL, b""), (CORRELATION_ID, correlation_id)])
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    for run in await self._producer.send(partition, [record]):
                        await run.acknowledged
            except (HeadraceError, TimeoutError):
                self.lost += 1
            else:
                self.sent += 1
            finally:
                self._waiting.task_done()
