"""The `batches` topic between a batcher and an executor that are apart."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import count

import structlog

from headrace.codec import decode_batch, encode_batch
from headrace.errors import Rejected
from headrace.flow.batch_trial import try_batch
from headrace.flow.channel import Ask, Outlet, PullChannel
from headrace.flow.edges import refuse
from headrace.flow.endings import rejection
from headrace.flow.inflight import Assignment
from headrace.flow.sending import deliver, too_large
from headrace.flow.source import Source
from headrace.log.port import NewRecord, Producer, Record, TopicPartition
from headrace.messages import Batch, Request
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.topics import Stage

log = structlog.get_logger(__name__)

ModelKey = tuple[str, str]
"""A model's name and version."""

UNACKNOWLEDGED_BATCHES = 4


class BatchOutlet:
    """Pulls batches of any model and writes them to `batches`, a few at a time.

    Args:
        refused: takes requests that do not fit into a record, as failures.
    """

    def __init__(
        self,
        pulls: PullChannel[ModelKey, Batch],
        producer: Producer,
        topic: TopicPartition,
        refused: Outlet[list[Request]],
        metrics: Metrics | None = None,
    ) -> None:
        self._pulls = pulls
        self._producer = producer
        self._topic, self._partitions = topic
        self._refused = refused
        self._metrics = metrics
        self._turn = count()

    async def run(self) -> None:
        """Until the batcher closes."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(UNACKNOWLEDGED_BATCHES):
                tasks.create_task(self._write(), name="write-batches")
        self._refused.close()

    async def _write(self) -> None:
        puller = self._pulls.puller(None)
        while (batch := await puller.pull()) is not None:
            # A batch that is too large for one record travels as its single requests.
            parts = [batch]
            while parts:
                part = parts.pop()
                if await self._delivered(part):
                    for request in part.requests:
                        request.receipt.settle()
                elif len(part.requests) == 1:
                    await self._refused.send([refuse(part.requests[0], self._topic, Stage.BATCHER)])
                else:
                    parts += [
                        Batch(f"{part.batch_id}.{place}", [request], part.reason)
                        for place, request in enumerate(part.requests)
                    ]

    async def _delivered(self, batch: Batch) -> bool:
        target = TopicPartition(self._topic, next(self._turn) % self._partitions)
        refused = await deliver(
            self._producer, target, [NewRecord(None, encode_batch(batch))], self._metrics
        )
        return not too_large(target, refused)


class BatchFeed:
    """Reads `batches` and hands them to the executor instances that pull for their model.

    Args:
        check: raises `Rejected` for a model version that does not run here.
        answers: takes requests whose model does not run here, as failures.
    """

    def __init__(
        self,
        source: Source,
        answers: Outlet[list[Request]],
        check: Callable[[str, str], object],
    ) -> None:
        self._source = source
        self._answers = answers
        self._check = check
        self._ready: dict[ModelKey, deque[Batch]] = {}
        self.pulls: PullChannel[ModelKey, Batch] = PullChannel(self._next)

    async def run(self) -> None:
        """Until the source stops reading."""
        while (delivery := await self._source.receive()) is not None:
            refused: list[Request] = []
            for record in delivery.records:
                batch = self._admit(delivery.assignment, record)
                if batch is None:
                    continue
                if delivery.trial is not None:
                    send = self._answers.send
                    await try_batch(batch, record.offset, delivery.trial, self._offer, send)
                else:
                    refused += self._take(batch)
            self.pulls.kick()
            if refused:
                await self._answers.send(refused)
        self.pulls.close()
        self._answers.close()

    def _take(self, batch: Batch) -> list[Request]:
        """Let it run; where its model does not run here, its requests come back as failures."""
        try:
            self._check(batch.model, batch.version)
        except Rejected as error:
            for request in batch.requests:
                request.fail(rejection(error, Stage.EXECUTOR))
            return batch.requests
        self._ready.setdefault((batch.model, batch.version), deque()).append(batch)
        return []

    async def _offer(self, batch: Batch) -> None:
        refused = self._take(batch)
        self.pulls.kick()
        if refused:
            await self._answers.send(refused)

    def _admit(self, assignment: Assignment, record: Record) -> Batch | None:
        if record.offset in assignment.progress:
            assignment.skip(record.offset)
            return None
        receipt = assignment.admit(record.offset, len(record.value or b""))
        try:
            batch = decode_batch(record.value or b"", receipt)
        except Rejected as error:
            log.error(
                Event.INTERNAL_RECORD_UNREADABLE,
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
                reason=str(error),
            )
            receipt.settle()
            return None
        receipt.parts = len(batch.requests)
        return batch

    def _next(self, key: ModelKey | None, _ask: Ask) -> Batch | None:
        queue = self._ready.get(key) if key is not None else None
        return queue.popleft() if queue else None
