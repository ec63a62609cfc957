"""The idempotent producer, on aiokafka's bulk path (`create_batch`, `send_batch`).

Two properties of aiokafka shape it. An idempotent batch is retried for ever, and a batch that
fails for good has used up its sequence numbers, so that all that follow it are refused as out of
order (issue 1017): so every batch has a deadline of its own, and after any failure the producer
underneath is replaced by a new one, with a new producer id, before the next batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential,
    wait_random,
)

from headrace.errors import HeadraceError
from headrace.log.kafka_batch import MAX_BATCH_BYTES, Batch
from headrace.log.kafka_closing import close_producer
from headrace.log.kafka_connection import Connection
from headrace.log.kafka_errors import answered, in_port_words
from headrace.log.kafka_topics import QUESTION_S, KnownTopics
from headrace.log.port import (
    LogRefused,
    LogUnavailable,
    NewRecord,
    RecordRefused,
    RecordTooLarge,
    Run,
    TopicPartition,
)

_MAX_REQUEST_BYTES: Final = 16 * 1024 * 1024
_FLUSH_S: Final = 3.0
_RETIRE_S: Final = 2.0
_FIRST_RETRY_S: Final = 0.1
_LAST_RETRY_S: Final = 1.0


class _Lane:
    """One partition: the batch being filled, and the task that hands over batches in order."""

    __slots__ = ("filling", "partition", "taken", "task")

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.filling: Batch | None = None
        self.taken = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class KafkaProducer:
    """An idempotent producer that is to be entered with `async with`; see the port."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._linger_s = connection.settings.linger_ms / 1000
        # One attempt that hangs, and one that works.
        self._delivery_s = 2 * connection.request_timeout_s
        self._topics = KnownTopics()
        self._lanes: dict[TopicPartition, _Lane] = {}
        self._unacknowledged: set[Batch] = set()
        self._producer: AIOKafkaProducer | None = None
        self._suspect = False
        self._replacing: asyncio.Task[AIOKafkaProducer] | None = None
        self._closed = False

    # Starting, replacing and closing

    async def __aenter__(self) -> Self:
        self._producer = await self._start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Flush for up to three seconds and close; what is left then fails."""
        self._closed = True
        await _settled(self._unacknowledged, _FLUSH_S)
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        if self._replacing is not None:
            tasks.append(self._replacing)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        producer, self._producer = self._producer, None
        if producer is not None:
            await close_producer(producer)
        for batch in list(self._unacknowledged):
            batch.fail(LogUnavailable(f"send to {batch.partition}: the producer was closed"))

    async def _start(self) -> AIOKafkaProducer:
        settings = self._connection.settings
        producer = AIOKafkaProducer(
            **self._connection.client_options(),
            acks="all",
            enable_idempotence=True,
            compression_type=None if settings.compression == "none" else settings.compression,
            max_batch_size=MAX_BATCH_BYTES,
            max_request_size=_MAX_REQUEST_BYTES,
            linger_ms=0,  # batches come whole; lanes linger, where one is asked to
        )
        self._connection.take_over_bootstrap(producer.client)
        try:
            async with answered("start the producer", self._connection.request_timeout_s):
                await producer.start()
        except BaseException:
            await close_producer(producer)
            raise
        return producer

    async def _running(self) -> AIOKafkaProducer:
        """The producer; a new one when the last has failed in any way.

        Raises:
            LogUnavailable: none could be started within the time of a delivery.
            LogAuthenticationFailed: the brokers refuse us.
        """
        if self._closed:
            raise LogUnavailable("the producer is closed")
        producer = self._producer
        if producer is not None and not self._suspect and not producer._sender.sender_task.done():
            return producer
        if self._replacing is None or self._replacing.done():
            self._replacing = asyncio.create_task(self._replace(), name="kafka-producer-start")
        return await asyncio.shield(self._replacing)

    async def _replace(self) -> AIOKafkaProducer:
        retired, self._producer = self._producer, None
        if retired is not None:
            # What the old one has sent may still be answered; the rest fails with it. Waiting
            # keeps the order within each partition.
            await _settled(self._unacknowledged, _RETIRE_S)
            await close_producer(retired)
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(LogUnavailable),
            stop=stop_after_delay(self._delivery_s),
            wait=wait_exponential(_FIRST_RETRY_S, _LAST_RETRY_S) + wait_random(0, _FIRST_RETRY_S),
            reraise=True,
        ):
            with attempt:
                self._producer = await self._start()
        self._suspect = False
        assert self._producer is not None
        return self._producer

    # Sending

    async def send(self, partition: TopicPartition, records: Sequence[NewRecord]) -> Sequence[Run]:
        """See the port. Concurrent calls for a partition share batches while one is under way."""
        async with answered(f"send to {partition}", self._delivery_s):
            producer = await self._running()
            await self._topics.check(producer.client, partition)
            limit_bytes = await self._topics.limit_bytes(producer.client, partition.topic)
            lane = self._lanes.get(partition)
            if lane is None:
                lane = self._lanes[partition] = _Lane(partition)
            runs: list[Run] = []
            start = 0
            while start < len(records):
                batch = await self._batch(lane, limit_bytes, producer)
                if lane.task is None or lane.task.done():
                    lane.task = asyncio.create_task(self._hand_over(lane), name="kafka-lane")
                end = batch.take(records, start)
                if end > start:
                    runs.append(Run(end - start, batch.acknowledged))
                elif not batch.full:
                    runs.append(_refused(partition, limit_bytes))
                    end += 1
                start = end
        return runs

    async def _batch(self, lane: _Lane, limit_bytes: int, producer: AIOKafkaProducer) -> Batch:
        """The batch that is being filled; waits for room when it is full."""
        while (batch := lane.filling) is not None and batch.full:
            await lane.taken.wait()
        if batch is None:
            codec = producer._message_accumulator._compression_type
            batch = Batch(lane.partition, limit_bytes, codec, self._delivery_s, self._overdue)
            self._unacknowledged.add(batch)
            batch.ended.add_done_callback(partial(self._forget, batch))
            lane.filling = batch
            lane.taken.clear()
        return batch

    async def _hand_over(self, lane: _Lane) -> None:
        """Give the lane's batches to aiokafka in order, until there is none.

        Those that follow are filled meanwhile, so that many small sends share a batch.
        """
        while (batch := lane.filling) is not None:
            if self._linger_s and not batch.full:
                await asyncio.sleep(self._linger_s)
            producer = None
            try:
                producer = await self._running()
            except HeadraceError as error:
                batch.fail(error)
            lane.filling = None
            lane.taken.set()
            if producer is None or batch.ended.done():
                continue
            if batch.builder.record_count() == 0:  # its only record was too large
                batch.succeed()
                continue
            try:
                batch.builder.close()
                sent = await producer.send_batch(
                    batch.builder, lane.partition.topic, partition=lane.partition.partition
                )
            except Exception as error:  # noqa: BLE001  # it goes to those who await the batch
                self._failed(batch, producer, error)
            else:
                sent.add_done_callback(partial(self._answered, batch, producer))

    def _answered(
        self, batch: Batch, producer: AIOKafkaProducer, sent: asyncio.Future[Any]
    ) -> None:
        error = None if sent.cancelled() else sent.exception()
        if sent.cancelled():
            self._failed(batch, producer, asyncio.CancelledError())
        elif error is not None:
            self._failed(batch, producer, error)
        else:
            batch.succeed()

    def _failed(self, batch: Batch, producer: AIOKafkaProducer, error: BaseException) -> None:
        if producer is self._producer:
            self._suspect = True
        what = f"send to {batch.partition}"
        if not isinstance(error, KafkaError):
            batch.fail(LogUnavailable(f"{what}: {error!r}"))
            return
        translated = in_port_words(error, what)
        if isinstance(translated, RecordTooLarge):
            self._topics.forget_limit(batch.partition.topic)
        elif isinstance(translated, LogRefused):
            # A matter between these records and this topic, not between us and the broker.
            translated = RecordRefused(str(translated))
        batch.fail(translated)

    def _overdue(self, batch: Batch) -> HeadraceError:
        self._suspect = True
        return LogUnavailable(
            f"send to {batch.partition}: not acknowledged within {self._delivery_s:g} s"
        )

    def _forget(self, batch: Batch, _ended: asyncio.Future[None]) -> None:
        self._unacknowledged.discard(batch)

    # Topics

    async def partitions_for(self, topic: str) -> int | None:
        """See the port."""
        async with answered(f"metadata of topic {topic}", QUESTION_S):
            producer = self._producer or await self._running()
            return await self._topics.partitions(producer.client, topic)


def _refused(partition: TopicPartition, limit_bytes: int) -> Run:
    """A run of one record that is too large to be sent at all."""
    acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    acknowledged.set_exception(
        RecordTooLarge(
            f"send to {partition}: expected a record of at most {limit_bytes} bytes with its "
            "batch (max.message.bytes), got a larger one"
        )
    )
    acknowledged.exception()
    return Run(1, acknowledged)


async def _settled(batches: Iterable[Batch], timeout_s: float) -> None:
    """Wait until all of these have ended one way or the other, or the time is over."""
    waiting = [batch.ended for batch in batches]
    if waiting:
        await asyncio.wait(waiting, timeout=timeout_s)
