"""The producer: packs records into batches and sends the batches of each partition in order.

A batch is filled while the previous one of its partition is in flight, so a chunk of many records
and many callers with one record each produce the same few requests. Batches go by aiokafka's bulk
path (`send_batch`), which makes no future for each record.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Self

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError
from aiokafka.producer.message_accumulator import BatchBuilder

from headrace.errors import HeadraceError
from headrace.log.errors import (
    LogRefused,
    LogUnavailable,
    RecordRefused,
    RecordTooLarge,
    TopicForbidden,
)
from headrace.log.kafka._aiokafka import (
    AnyNameBuilder,
    close_producer,
    is_sending,
    limit_requests,
    record_appender,
    set_record_count,
)
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import answered, in_port_words
from headrace.log.kafka.topic_cache import TopicCache, TopicLimits
from headrace.log.port import NewRecord, SentBatch, TopicPartition


class _BatchTooLarge(LogUnavailable):
    """A broker refuses a batch of several records for its size, which may be of several callers:
    each record may be accepted in a smaller batch.
    """


class _PartitionQueue:
    """State of one partition: the batch being filled, and the task that sends batches in order."""

    __slots__ = ("batch_taken", "open_batch", "partition", "task")

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.open_batch: PendingBatch | None = None
        self.batch_taken = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class KafkaProducer:
    """An idempotent producer, entered with `async with`; see the port."""

    def __init__(self, connection: Connection) -> None:
        self._linger_s = connection.settings.linger_ms / 1000
        # Time for one attempt that hangs, and one that succeeds.
        self._delivery_s = 2 * connection.request_timeout_s
        self._codec = connection.codec
        self._tuning = connection.tuning
        self._sender = Sender(connection, self._delivery_s)
        self._topics = TopicCache(connection.tuning)
        self._queues: dict[TopicPartition, _PartitionQueue] = {}
        self._unacknowledged: set[PendingBatch] = set()
        self._finished = self._closed = False

    async def __aenter__(self) -> Self:
        try:
            await self._sender.start()
        except BaseException:
            self._closed = True
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def finish(self, timeout_s: float) -> None:
        """See the port."""
        self._finished = True
        await wait_ended(self._unacknowledged, timeout_s)

    async def close(self) -> None:
        """Flush for up to three seconds and close; unsent batches then fail."""
        self._closed = True
        if not self._finished:
            await wait_ended(self._unacknowledged, self._tuning.flush_timeout_s)
        tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._sender.close()
        for batch in list(self._unacknowledged):
            batch.fail(LogUnavailable(f"send to {batch.partition}: the producer was closed"))

    # Sending

    async def send(
        self,
        partition: TopicPartition,
        records: Sequence[NewRecord],
        *,
        first_batch_only: bool = False,
    ) -> Sequence[SentBatch]:
        """See the port. Concurrent calls for a partition share batches while one is in flight."""
        if self._finished and not self._closed:
            raise LogUnavailable(f"send to {partition}: the producer was finished")
        limits = self._cached_limits(partition) or await self._fetch_limits(partition)
        queue = self._queues.get(partition)
        if queue is None:
            queue = self._queues[partition] = _PartitionQueue(partition)
        batches: list[SentBatch] = []
        start = 0
        while start < len(records) and not (first_batch_only and batches):
            if queue.open_batch is not None and queue.open_batch.is_full:
                await self._wait_for_room(queue)
            batch = self._open_batch(queue, limits)
            end, refusal = batch.add(records, start)
            if end > start:
                batches.append(SentBatch(end - start, batch.acknowledged))
            if refusal is not None:
                batches.append(_refused_record(refusal))
                end += 1
            start = end
        return batches[:1] if first_batch_only else batches

    def _cached_limits(self, partition: TopicPartition) -> TopicLimits | None:
        """Return the topic's limits if they are known without a request; else None."""
        producer = None if self._closed else self._sender.current
        return None if producer is None else self._topics.cached_limits(producer.client, partition)

    async def _fetch_limits(self, partition: TopicPartition) -> TopicLimits:
        self._check_open()
        async with answered(f"send to {partition}", self._delivery_s):
            producer = await self._sender.get_producer()
            return await self._topics.fetch_limits(producer.client, partition)

    async def _wait_for_room(self, queue: _PartitionQueue) -> None:
        async with answered(f"send to {queue.partition}: room", self._delivery_s):
            while queue.open_batch is not None and queue.open_batch.is_full:
                await queue.batch_taken.wait()

    def _open_batch(self, queue: _PartitionQueue, limits: TopicLimits) -> PendingBatch:
        """Return the partition's batch with room in it; start the task that will send it."""
        if queue.open_batch is None:
            batch = PendingBatch(
                queue.partition,
                limits,
                self._codec,
                self._topics.max_batch_bytes(queue.partition.topic),
                self._delivery_s,
                self._on_overdue,
            )
            self._unacknowledged.add(batch)
            batch.ended.add_done_callback(partial(self._forget, batch))
            queue.open_batch = batch
            queue.batch_taken.clear()
        if queue.task is None or queue.task.done():
            queue.task = asyncio.create_task(
                self._send_batches(queue), name=f"kafka-{queue.partition}"
            )
        return queue.open_batch

    async def _send_batches(self, queue: _PartitionQueue) -> None:
        """Send the partition's batches one at a time, in order, until there is none."""
        while (batch := queue.open_batch) is not None:
            if self._linger_s and not batch.is_full:
                await asyncio.sleep(self._linger_s)
            queue.open_batch = None
            queue.batch_taken.set()
            if batch.builder.record_count() == 0:  # its only record was refused
                batch.succeed()
                continue
            await self._sender.send(batch)

    def _forget(self, batch: PendingBatch, ended: asyncio.Future[None]) -> None:
        self._unacknowledged.discard(batch)
        error = ended.exception()
        if isinstance(error, _BatchTooLarge):
            self._topics.limit_batches(batch.partition.topic, batch.builder.size() // 2)
        if isinstance(error, RecordTooLarge | RecordRefused | _BatchTooLarge):
            self._topics.forget_limits(batch.partition.topic)  # they must have changed

    def _on_overdue(self, batch: PendingBatch) -> HeadraceError:
        self._sender.mark_unreliable()
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
        async with answered(f"metadata of topic {topic}", self._tuning.topic_timeout_s):
            producer = await self._sender.get_producer()
            return await self._topics.partitions(producer.client, topic)


def _refused_record(error: HeadraceError) -> SentBatch:
    """Return a batch of one record that is not sent."""
    acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    acknowledged.set_exception(error)
    acknowledged.exception()  # mark it as retrieved: a caller may choose not to await it
    return SentBatch(1, acknowledged)


# --- sending -----------------------------------------------------------------------------------


class Sender:
    """Sends batches by aiokafka's idempotent producer, which it replaces once it is unreliable.

    Two of that producer's properties require this. It retries an idempotent batch forever; and a
    batch that fails for good has used up its sequence numbers, so that all following batches are
    refused as out of order (aiokafka issue 1017). So every batch has a deadline of its own, and
    after any failure the next batch goes to a new producer, which has a new producer id.

    One batch is in flight for each partition.

    Args:
        connection: the options of the producers.
        restart_timeout_s: how long starting a new producer is retried.
        random_share: returns random numbers from 0 to 1.
    """

    def __init__(
        self,
        connection: Connection,
        restart_timeout_s: float,
        random_share: Callable[[], float] = random.random,
    ) -> None:
        self._connection = connection
        self._restart_timeout_s = restart_timeout_s
        self._random_share = random_share
        self._producer: AIOKafkaProducer | None = None
        self._retired: AIOKafkaProducer | None = None
        self._is_unreliable = False
        self._replacing: asyncio.Task[AIOKafkaProducer] | None = None
        self._in_flight: set[PendingBatch] = set()

    async def start(self) -> None:
        """Connect, once. Raises `LogUnavailable` and `LogAuthenticationFailed`."""
        self._producer = await self._new_producer()

    @property
    def current(self) -> AIOKafkaProducer | None:
        """The producer, or None if there is none that is reliable."""
        producer = self._producer
        if producer is None or self._is_unreliable or not is_sending(producer):
            return None
        return producer

    async def get_producer(self) -> AIOKafkaProducer:
        """Return the producer; start a new one if the last has failed in any way.

        Raises:
            LogUnavailable: none could be started in time.
            LogAuthenticationFailed: the brokers refuse us.
        """
        producer = self.current
        if producer is not None:
            return producer
        if self._replacing is None or self._replacing.done():
            self._replacing = asyncio.create_task(self._replace(), name="kafka-producer-start")
            self._replacing.add_done_callback(_retrieve_error)
        return await asyncio.shield(self._replacing)

    def mark_unreliable(self) -> None:
        """Mark the producer as unreliable; the next batch goes to a new one."""
        self._is_unreliable = True

    async def send(self, batch: PendingBatch) -> None:
        """Queue a batch, which may wait for the previous one of its partition.

        The batch ends in any case; nothing is raised.
        """
        producer = None
        try:
            producer = await self.get_producer()
            if batch.ended.done():  # its deadline has passed
                return
            batch.builder.close()
            self._in_flight.add(batch)
            sent = await producer.send_batch(
                batch.builder, batch.partition.topic, partition=batch.partition.partition
            )
        except Exception as error:  # noqa: BLE001  # it goes to those who await the batch
            self._on_failure(batch, producer, error)
        else:
            sent.add_done_callback(partial(self._on_response, batch, producer))

    async def close(self) -> None:
        """Close; batches that are still in flight fail."""
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait([self._replacing])
        for producer in (self._retired, self._producer):
            if producer is not None:
                await close_producer(producer, self._connection.tuning.close_timeout_s)
        self._retired = self._producer = None
        for batch in list(self._in_flight):
            batch.fail(LogUnavailable(f"send to {batch.partition}: the producer was closed"))

    async def _new_producer(self) -> AIOKafkaProducer:
        settings, tuning = self._connection.settings, self._connection.tuning
        producer = AIOKafkaProducer(
            **self._connection.client_options(),
            acks="all",
            enable_idempotence=True,
            compression_type=None if settings.compression == "none" else settings.compression,
            max_batch_size=tuning.max_batch_bytes,
            max_request_size=tuning.max_request_bytes,
            linger_ms=0,  # a batch lingers before it is handed over
        )
        self._connection.take_over_connecting(producer.client)
        limit_requests(producer, tuning.max_request_bytes)
        try:
            async with answered("start the producer", self._connection.request_timeout_s):
                await producer.start()
        except BaseException:
            await close_producer(producer, self._connection.tuning.close_timeout_s)
            raise
        return producer

    async def _replace(self) -> AIOKafkaProducer:
        tuning = self._connection.tuning
        self._retired, self._producer = self._producer or self._retired, None
        if self._retired is not None:
            # The old producer's batches may still be acknowledged; the rest fails with it. Wait, to
            # keep the order within each partition.
            await wait_ended(self._in_flight, tuning.retire_timeout_s)
            await close_producer(self._retired, tuning.close_timeout_s)
            self._retired = None
        self._producer = await self._start_within(self._restart_timeout_s)
        self._is_unreliable = False
        return self._producer

    async def _start_within(self, timeout_s: float) -> AIOKafkaProducer:
        """Start a producer; retry until one has started or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        attempt = 0
        while True:
            try:
                return await self._new_producer()
            except LogUnavailable:
                if time.monotonic() >= deadline_s:
                    raise
            backoff = self._connection.tuning.producer_restart
            await asyncio.sleep(backoff.pause_s(attempt, self._random_share()))
            attempt += 1

    def _on_response(
        self, batch: PendingBatch, producer: AIOKafkaProducer, sent: asyncio.Future[Any]
    ) -> None:
        error = asyncio.CancelledError() if sent.cancelled() else sent.exception()
        if error is not None:
            self._on_failure(batch, producer, error)
            return
        self._in_flight.discard(batch)
        batch.succeed()

    def _on_failure(
        self, batch: PendingBatch, producer: AIOKafkaProducer | None, error: BaseException
    ) -> None:
        self._in_flight.discard(batch)
        if isinstance(error, TopicAuthorizationFailedError):
            # Keep the producer: a caller that names forbidden topics must not slow the others down.
            # The sequence numbers used up belong to a partition that accepts none.
            batch.fail(TopicForbidden(batch.partition.topic))
            return
        if producer is self._producer:
            self.mark_unreliable()
        what = f"send to {batch.partition}"
        if isinstance(error, KafkaError):
            translated = in_port_words(error, what)
            if isinstance(translated, LogRefused):
                # The topic refuses these records; the producer itself still works.
                translated = RecordRefused(str(translated))
            elif isinstance(translated, RecordTooLarge) and batch.builder.record_count() > 1:
                translated = _BatchTooLarge(str(translated))
            batch.fail(translated)
        elif isinstance(error, HeadraceError):
            batch.fail(error)
        else:
            batch.fail(LogUnavailable(f"{what}: {error!r}"))


async def wait_ended(batches: Iterable[PendingBatch], timeout_s: float) -> None:
    """Wait until all of these have ended, in success or failure, or until the timeout."""
    waiting = [batch.ended for batch in batches]
    if waiting:
        await asyncio.wait(waiting, timeout=timeout_s)


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """Mark a start's error as retrieved: all callers awaiting it may be gone when it fails."""
    if not task.cancelled():
        task.exception()


# --- batches -----------------------------------------------------------------------------------


class Acknowledgement:
    """One caller's view of the end of a batch: cancelling it does not affect the other callers.

    Args:
        ended: the end of the batch, which all its callers share.
    """

    __slots__ = ("ended",)

    def __init__(self, ended: asyncio.Future[None]) -> None:
        self.ended = ended

    def __await__(self) -> Generator[Any, None, None]:
        if not self.ended.done():
            yield from asyncio.shield(self.ended)
        self.ended.result()


class RecordBatch:
    """Records for one produce request to a partition, up to the size that its topic accepts.

    Args:
        partition: the target.
        limits: the topic's limits.
        codec: aiokafka's number of the compression.
        max_bytes: the largest batch, if the topic accepts more.
        is_transactional: whether the records belong to a transaction; the batch's header says so.
    """

    __slots__ = (
        "_codec",
        "_is_transactional",
        "_limits",
        "_max_bytes",
        "builder",
        "is_full",
        "partition",
    )

    def __init__(
        self,
        partition: TopicPartition,
        limits: TopicLimits,
        codec: int,
        max_bytes: int,
        *,
        is_transactional: bool = False,
    ) -> None:
        self.partition = partition
        self.is_full = False
        self._limits = limits
        self._codec = codec
        self._max_bytes = max_bytes
        self._is_transactional = is_transactional
        self.builder = self._new_builder()

    def add(
        self, records: Sequence[NewRecord], start: int
    ) -> tuple[int, RecordTooLarge | RecordRefused | None]:
        """Add records from `start` on.

        Returns:
            The index of the first record not added, and the error if the topic will never accept
            it; None if it belongs in the next batch, because this one is full, or if all were
            added.
        """
        builder, needs_key = self.builder, self._limits.needs_key
        append, offset = record_appender(builder)
        now_ms = time.time_ns() // 1_000_000
        left = records[start:] if start else records
        index = start
        try:
            for index, (key, value, headers, timestamp_ms) in enumerate(left, start):
                if key is None and needs_key:
                    return index, self._missing_key_error()
                added = append(
                    offset,
                    now_ms if timestamp_ms is None else timestamp_ms,
                    key,
                    value,
                    headers if type(headers) is list else list(headers),
                )
                if added is None:
                    self.is_full = True
                    return index, None
                # The builder accepts the first record of a batch regardless of its size.
                if offset == 0 and (size := builder.size()) > self._limits.limit_bytes:
                    builder = self.builder = self._new_builder()
                    return index, self._too_large_error(size)
                offset += 1
        except UnicodeEncodeError:
            if not offset:
                self.builder = self._new_builder(takes_any_name=True)
                return self.add(records, index)
            # Leave this record to the next batch, whose builder accepts such names.
            self.is_full = True
            return index, None
        finally:
            set_record_count(builder, offset)
        return len(records), None

    def _missing_key_error(self) -> RecordRefused:
        return RecordRefused(
            f"send to {self.partition}: expected a record with a key, since the topic is "
            "compacted, got one without"
        )

    def _too_large_error(self, size: int) -> RecordTooLarge:
        return RecordTooLarge(
            f"send to {self.partition}: expected at most {self._limits.limit_bytes} bytes "
            f"in a batch (max.message.bytes), got a record that makes {size}"
        )

    def _new_builder(self, *, takes_any_name: bool = False) -> BatchBuilder:
        builder_class = AnyNameBuilder if takes_any_name else BatchBuilder
        return builder_class(
            min(self._max_bytes, self._limits.limit_bytes),
            self._codec,
            is_transactional=self._is_transactional,
        )


class PendingBatch(RecordBatch):
    """A batch in flight or about to be sent, and the acknowledgement that they share.

    Args:
        partition: the target.
        limits: the topic's limits.
        codec: aiokafka's number of the compression.
        max_bytes: the largest batch, if the topic accepts more.
        deadline_s: the acknowledgement fails after this, whatever has become of the records.
        overdue: called at the deadline; returns the error.
    """

    __slots__ = ("_timer", "ended")

    def __init__(
        self,
        partition: TopicPartition,
        limits: TopicLimits,
        codec: int,
        max_bytes: int,
        deadline_s: float,
        overdue: Callable[[PendingBatch], HeadraceError],
    ) -> None:
        super().__init__(partition, limits, codec, max_bytes)
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._timer = loop.call_later(deadline_s, lambda: self.fail(overdue(self)))

    @property
    def acknowledged(self) -> Acknowledgement:
        """Return an acknowledgement for one part of the batch."""
        return Acknowledgement(self.ended)

    def succeed(self) -> None:
        """Mark the batch as acknowledged by the broker."""
        self._timer.cancel()
        if not self.ended.done():
            self.ended.set_result(None)

    def fail(self, error: HeadraceError) -> None:
        """Fail the acknowledgement: the batch was refused, or its outcome is unknown."""
        self._timer.cancel()
        if not self.ended.done():
            self.ended.set_exception(error)
            # Mark the error as retrieved: a caller may choose not to await it.
            self.ended.exception()
