"""The producer: packs records into batches and sends the batches of each partition in order.

A batch is filled while the previous one of its partition is in flight, so a chunk of many records
and many callers with one record each produce the same few requests. Batches go by aiokafka's bulk
path (`send_batch`), which makes no future for each record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Final, Self

from headrace.errors import HeadraceError
from headrace.log.errors import LogUnavailable, RecordRefused, RecordTooLarge
from headrace.log.kafka.admin import QUESTION_S, KnownTopics, Rules
from headrace.log.kafka.batch import MAX_BATCH_BYTES, Batch
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import answered
from headrace.log.kafka.sender import Sender, wait_ended
from headrace.log.port import NewRecord, Run, TopicPartition

_FLUSH_S: Final = 3.0


class _Lane:
    """State of one partition: the batch being filled, and the task that sends batches in order."""

    __slots__ = ("filling", "partition", "taken", "task")

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.filling: Batch | None = None
        self.taken = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class KafkaProducer:
    """An idempotent producer, entered with `async with`; see the port."""

    def __init__(self, connection: Connection) -> None:
        self._linger_s = connection.settings.linger_ms / 1000
        # Time for one attempt that hangs, and one that succeeds.
        self._delivery_s = 2 * connection.request_timeout_s
        self._codec = connection.codec
        self._sender = Sender(connection, self._delivery_s)
        self._topics = KnownTopics()
        self._lanes: dict[TopicPartition, _Lane] = {}
        self._unacknowledged: set[Batch] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        try:
            await self._sender.start()
        except BaseException:
            self._closed = True
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Flush for up to three seconds and close; unsent batches then fail."""
        self._closed = True
        await wait_ended(self._unacknowledged, _FLUSH_S)
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._sender.close()
        for batch in list(self._unacknowledged):
            batch.fail(LogUnavailable(f"send to {batch.partition}: the producer was closed"))

    # Sending

    async def send(self, partition: TopicPartition, records: Sequence[NewRecord]) -> Sequence[Run]:
        """See the port. Concurrent calls for a partition share batches while one is in flight."""
        rules = self._known_rules(partition) or await self._rules(partition)
        lane = self._lanes.get(partition)
        if lane is None:
            lane = self._lanes[partition] = _Lane(partition)
        runs: list[Run] = []
        start = 0
        while start < len(records):
            if lane.filling is not None and lane.filling.full:
                await self._room(lane)
            batch = self._filling(lane, rules)
            end, refusal = batch.take(records, start)
            if end > start:
                runs.append(Run(end - start, batch.acknowledged))
            if refusal is not None:
                runs.append(_refused(refusal))
                end += 1
            start = end
        return runs

    async def batch_limit_bytes(self, partition: TopicPartition) -> int:
        """See the port."""
        rules = self._known_rules(partition) or await self._rules(partition)
        return min(rules.limit_bytes, MAX_BATCH_BYTES)

    def _known_rules(self, partition: TopicPartition) -> Rules | None:
        """Return the topic's limits if they are known without a request; else None."""
        producer = None if self._closed else self._sender.current
        return None if producer is None else self._topics.recall(producer.client, partition)

    async def _rules(self, partition: TopicPartition) -> Rules:
        self._check_open()
        async with answered(f"send to {partition}", self._delivery_s):
            producer = await self._sender.running()
            return await self._topics.ask(producer.client, partition)

    async def _room(self, lane: _Lane) -> None:
        async with answered(f"send to {lane.partition}: room", self._delivery_s):
            while lane.filling is not None and lane.filling.full:
                await lane.taken.wait()

    def _filling(self, lane: _Lane, rules: Rules) -> Batch:
        """Return the partition's batch with room in it; start the task that will send it."""
        if lane.filling is None:
            batch = Batch(lane.partition, rules, self._codec, self._delivery_s, self._overdue)
            self._unacknowledged.add(batch)
            batch.ended.add_done_callback(partial(self._forget, batch))
            lane.filling = batch
            lane.taken.clear()
        if lane.task is None or lane.task.done():
            lane.task = asyncio.create_task(self._hand_over(lane), name=f"kafka-{lane.partition}")
        return lane.filling

    async def _hand_over(self, lane: _Lane) -> None:
        """Send the partition's batches one at a time, in order, until there is none."""
        while (batch := lane.filling) is not None:
            if self._linger_s and not batch.full:
                await asyncio.sleep(self._linger_s)
            lane.filling = None
            lane.taken.set()
            if batch.builder.record_count() == 0:  # its only record was refused
                batch.succeed()
                continue
            await self._sender.hand_over(batch)

    def _forget(self, batch: Batch, ended: asyncio.Future[None]) -> None:
        self._unacknowledged.discard(batch)
        if isinstance(ended.exception(), RecordTooLarge | RecordRefused):
            self._topics.forget_rules(batch.partition.topic)  # they must have changed

    def _overdue(self, batch: Batch) -> HeadraceError:
        self._sender.doubt()
        return LogUnavailable(
            f"send to {batch.partition}: not acknowledged within {self._delivery_s:g} s"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the producer is closed")

    # Topics

    async def partitions_for(self, topic: str) -> int | None:
        """See the port."""
        self._check_open()
        async with answered(f"metadata of topic {topic}", QUESTION_S):
            producer = await self._sender.running()
            return await self._topics.partitions(producer.client, topic)


def _refused(error: HeadraceError) -> Run:
    """Return a run of one record that is not sent."""
    acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    acknowledged.set_exception(error)
    acknowledged.exception()  # mark it as retrieved: a caller may choose not to await it
    return Run(1, acknowledged)
