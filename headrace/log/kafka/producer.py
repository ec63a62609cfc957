"""The producer: packs records into batches and sends the batches of each partition in order.

A batch is filled while the previous one of its partition is in flight, so a chunk of many records
and many callers with one record each produce the same few requests.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Final, Self

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import DuplicateSequenceNumber, KafkaError, TopicAuthorizationFailedError
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import InitProducerIdRequest

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
    build_batch,
    log_send_retried,
    record_appender,
    set_record_count,
)
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import answered, broker_error, error_text, in_port_words
from headrace.log.kafka.topic_cache import TopicCache, TopicLimits
from headrace.log.port import NewRecord, SentBatch, TopicPartition

SEQUENCES: Final = 2**31
"""A partition's sequence numbers wrap around to 0 (`DefaultRecordBatch.incrementSequence`)."""
_ALL_REPLICAS: Final = -1
_NO_LEADER: Final = -1
_NO_TIMEOUT_MS: Final = 2**31 - 1
"""Of transactions, of which a producer without a transactional id has none."""


class _BatchTooLarge(LogUnavailable):
    """A broker refuses a batch of several records for its size, which may be of several callers:
    each record may be accepted in a smaller batch.
    """


class PartitionQueue:
    """Batches of one partition: the one being filled, and the one in flight.

    Attributes:
        open_batch: takes records; None if there are none to be sent.
        in_flight: was sent, and waits for its response or for the next attempt.
        content: the bytes of the batch in flight.
        batch_taken: set while `open_batch` is None.
    """

    __slots__ = ("batch_taken", "content", "in_flight", "open_batch", "partition")

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.open_batch: PendingBatch | None = None
        self.in_flight: PendingBatch | None = None
        self.content = b""
        self.batch_taken = asyncio.Event()

    def drop_ended(self) -> None:
        """Drop batches that have ended without a response."""
        if self.in_flight is not None and self.in_flight.ended.done():
            self.end_flight()
        self.drop_ended_open()

    def drop_ended_open(self) -> None:
        """Drop the open batch if it has ended."""
        if self.open_batch is not None and self.open_batch.ended.done():
            self._take()

    @property
    def is_due(self) -> bool:
        """Return whether there is a batch that could be sent now."""
        if self.in_flight is not None:
            return True
        return self.open_batch is not None and self.open_batch.is_due

    @property
    def size_bytes(self) -> int:
        """Return the size of the batch to be sent."""
        if self.in_flight is not None:
            return len(self.content)
        return 0 if self.open_batch is None else self.open_batch.builder.size()

    def begin_flight(self, build: Callable[[PendingBatch], bytes]) -> bytes:
        """Return the bytes to send: again those in flight, or those of the open batch."""
        if self.in_flight is None:
            batch = self._take()
            self.in_flight, self.content = batch, build(batch)
        return self.content

    def end_flight(self) -> None:
        """Let the next batch be sent."""
        self.in_flight, self.content = None, b""

    def fail_next(self, error: HeadraceError) -> None:
        """Fail the batch to be sent."""
        batch = self.in_flight or self.open_batch
        if batch is not None:
            batch.fail(error)

    def _take(self) -> PendingBatch:
        batch, self.open_batch = self.open_batch, None
        assert batch is not None
        self.batch_taken.set()
        return batch


class KafkaProducer:
    """An idempotent producer, entered with `async with`; see the port."""

    def __init__(self, connection: Connection) -> None:
        self._linger_s = connection.settings.linger_ms / 1000
        # Time for one attempt that hangs, and one that succeeds.
        self._delivery_s = 2 * connection.request_timeout_s
        self._codec = connection.codec
        self._tuning = connection.tuning
        self._sender = Sender(connection)
        self._topics = TopicCache(connection.tuning)
        self._queues: dict[TopicPartition, PartitionQueue] = {}
        self._unacknowledged: set[PendingBatch] = set()
        self._until_closed: set[asyncio.Timeout] = set()
        """Of requests about topics; they end when the producer is closed."""
        self._finished = self._closed = False

    async def __aenter__(self) -> Self:
        try:
            await self._sender.start()
        except BaseException:
            self._closed = True
            await self._sender.close()
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
        for each in self._until_closed:
            each.reschedule(0)
        self._until_closed.clear()
        if not self._finished:
            await wait_ended(self._unacknowledged, self._tuning.flush_timeout_s)
        await self._sender.close()
        for batch in list(self._unacknowledged):
            batch.fail(_closed_error(batch.partition))
        for queue in self._queues.values():
            queue.drop_ended_open()  # ends the waits for room

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
            queue = self._queues[partition] = PartitionQueue(partition)
        batches: list[SentBatch] = []
        start = 0
        while start < len(records) and not (first_batch_only and batches):
            if queue.open_batch is not None and queue.open_batch.is_full:
                await self._wait_for_room(queue)
            batch = self._open_batch(queue, limits)
            try:
                end, refusal = batch.add(records, start)
            finally:  # after a TypeError, too: others wait for the end of each batch
                self._send_soon(queue, batch)
            if end > start:
                batches.append(SentBatch(end - start, batch.acknowledged))
            if refusal is not None:
                batches.append(_refused_record(refusal))
                self._topics.recheck_limits(partition.topic)
                end += 1
            start = end
        return batches[:1] if first_batch_only else batches

    def _cached_limits(self, partition: TopicPartition) -> TopicLimits | None:
        """Return the topic's limits if they are known without a request; else None."""
        if self._closed:
            return None
        return self._topics.cached_limits(self._sender.client, partition)

    async def _fetch_limits(self, partition: TopicPartition) -> TopicLimits:
        self._check_open()
        try:
            async with asyncio.timeout(None) as until_closed:
                self._until_closed.add(until_closed)
                async with answered(f"send to {partition}", self._delivery_s):
                    return await self._topics.fetch_limits(self._sender.client, partition)
        except TimeoutError:
            raise _closed_error(partition) from None
        finally:
            self._until_closed.discard(until_closed)

    async def _wait_for_room(self, queue: PartitionQueue) -> None:
        try:
            async with asyncio.timeout(self._delivery_s):
                while queue.open_batch is not None and queue.open_batch.is_full:
                    await queue.batch_taken.wait()
        except TimeoutError:
            raise LogUnavailable(
                f"send to {queue.partition}: the batch before was not sent within "
                f"{self._delivery_s:g} s{self._sender.quota_text(queue.partition)}"
            ) from None

    def _open_batch(self, queue: PartitionQueue, limits: TopicLimits) -> PendingBatch:
        """Return the partition's batch with room in it."""
        queue.drop_ended_open()
        if queue.open_batch is None:
            if self._closed:  # while the caller waited
                raise _closed_error(queue.partition)
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
        return queue.open_batch

    def _send_soon(self, queue: PartitionQueue, batch: PendingBatch) -> None:
        """Send a batch once it is full, or has waited for more records long enough."""
        if batch.builder.record_count() == 0:  # its only record was refused
            batch.succeed()
        elif batch.is_full or not self._linger_s:
            self._mark_due(queue, batch)
        elif not batch.is_lingering:
            batch.is_lingering = True
            loop = asyncio.get_running_loop()
            loop.call_later(self._linger_s, self._mark_due, queue, batch)

    def _mark_due(self, queue: PartitionQueue, batch: PendingBatch) -> None:
        batch.is_due = True
        self._sender.send_soon(queue)

    def _forget(self, batch: PendingBatch, ended: asyncio.Future[None]) -> None:
        self._unacknowledged.discard(batch)
        error = ended.exception()
        if isinstance(error, _BatchTooLarge):
            self._topics.limit_batches(batch.partition.topic, batch.builder.size() // 2)
        if isinstance(error, RecordTooLarge | RecordRefused | _BatchTooLarge):
            self._topics.forget_limits(batch.partition.topic)  # they must have changed

    def _on_overdue(self, batch: PendingBatch) -> HeadraceError:
        if self._queues[batch.partition].in_flight is batch:  # its sequence numbers are used up
            self._sender.renew_producer_id()
        return LogUnavailable(
            f"send to {batch.partition}: not acknowledged within {self._delivery_s:g} s"
            f"{self._sender.quota_text(batch.partition)}"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the producer is closed")

    # Topics

    async def partitions_for(self, topic: str) -> int | None:
        """See the port."""
        self._check_open()
        async with answered(f"metadata of topic {topic}", self._tuning.topic_timeout_s):
            return await self._topics.partitions(self._sender.client, topic)


def _closed_error(partition: TopicPartition) -> LogUnavailable:
    return LogUnavailable(f"send to {partition}: the producer was closed")


def _refused_record(error: HeadraceError) -> SentBatch:
    """Return a batch of one record that is not sent."""
    acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    acknowledged.set_exception(error)
    acknowledged.exception()  # mark it as retrieved: a caller may choose not to await it
    return SentBatch(1, acknowledged)


# --- sending -----------------------------------------------------------------------------------


class Sender:
    """Sends the batches of partitions to their leaders, idempotently.

    aiokafka's producer is not used. It passes a batch on through three tasks of its own, retries an
    idempotent batch forever, and refuses all that follow a batch that has failed for good, which
    has used up its sequence numbers (aiokafka issue 1017).

    One request is in flight for each broker, with one batch of a partition; batches that come
    meanwhile go together with the next one. A batch that is sent again has the producer id and the
    sequence numbers of the first time, by which the broker knows it. Once a batch has failed, those
    that follow have a new producer id: nobody knows which sequence numbers the broker expects.

    Source: "Idempotent producer" in KIP-98, "Exactly Once Delivery and Transactional Messaging".

    Args:
        connection: the options of the client.
        random_share: returns random numbers from 0 to 1.
    """

    def __init__(
        self, connection: Connection, random_share: Callable[[], float] = random.random
    ) -> None:
        self._connection = connection
        self._random_share = random_share
        self._client: AIOKafkaClient | None = None
        self._producer_id: tuple[int, int] | None = None  # with its epoch
        self._identifying = asyncio.Lock()
        self._sequences: dict[TopicPartition, int] = defaultdict(int)
        self._due: dict[PartitionQueue, None] = {}
        self._sending: dict[int | None, asyncio.Task[None]] = {}
        self._throttled_until_s: dict[int | None, float] = {}

    async def start(self) -> None:
        """Connect, once. Raises `LogUnavailable` and `LogAuthenticationFailed`."""
        async with answered("start the producer", self._connection.request_timeout_s):
            self._client = await self._connection.open_client()
            await self._get_producer_id()

    @property
    def client(self) -> AIOKafkaClient:
        """The client, which is connected until `close`."""
        if self._client is None:
            raise RuntimeError("the producer is closed")
        return self._client

    def send_soon(self, queue: PartitionQueue) -> None:
        """Send a partition's batch as soon as the one before it has been acknowledged, and its
        broker has answered the last request.
        """
        if queue.in_flight is None:
            self._add_due(queue)

    async def close(self) -> None:
        """Close; nothing more is sent."""
        client, self._client = self._client, None
        tasks = list(self._sending.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if client is not None:
            await self._connection.close_client(client)

    def renew_producer_id(self) -> None:
        """Give the next batches a new producer id."""
        self._producer_id = None

    def quota_text(self, partition: TopicPartition) -> str:
        """Return the rest of an error's text: for how much longer a quota delays what is sent to a
        partition's leader; nothing if none does.
        """
        if self._client is None:
            return ""
        until_s = self._throttled_until_s.get(self._leader(partition), 0.0)
        left_s = until_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            return ""
        return f", since the broker delays this client by its quota, for another {left_s:.0f} s"

    def _add_due(self, queue: PartitionQueue) -> None:
        if self._client is None:  # closed, while the batch waited to be sent again
            return
        self._due[queue] = None
        self._start_sending(self._leader(queue.partition))

    def _start_sending(self, node: int | None) -> None:
        if node not in self._sending:
            task = asyncio.create_task(self._send_due(node), name=f"kafka-send-{node}")
            self._sending[node] = task

    def _leader(self, partition: TopicPartition) -> int | None:
        node: int | None = self.client.cluster.leader_for_partition(partition)
        return None if node == _NO_LEADER else node

    async def _send_due(self, node: int | None) -> None:
        """Send requests to a broker, one after the other, until none is due.

        Args:
            node: the broker; None for the partitions whose leader is unknown.
        """
        try:
            while queues := self._due_at(node):
                if node is None:
                    self.client.force_metadata_update()
                    await asyncio.sleep(self._connection.tuning.request_retry_s)
                    self._fail_missing(queues)
                elif self._producer_id is None:
                    await self._identify(queues)
                else:
                    await self._send_to(node, self._producer_id, queues)
        finally:
            del self._sending[node]

    def _due_at(self, node: int | None) -> list[PartitionQueue]:
        """Return the queues with a batch that is due at this broker."""
        found = []
        for queue in list(self._due):
            queue.drop_ended()
            if not queue.is_due:
                del self._due[queue]
                continue
            leader = self._leader(queue.partition)
            if leader == node:
                found.append(queue)
            else:
                self._start_sending(leader)  # it may have become the leader since
        return found

    def _fail_missing(self, queues: Iterable[PartitionQueue]) -> None:
        """Fail the batches of partitions that the metadata no longer has, whose topics were mostly
        deleted: a broker says so to whoever sends again.
        """
        known = self.client.cluster.partitions_for_topic
        for queue in queues:
            partition = queue.partition
            if partition.partition in (known(partition.topic) or ()):
                continue
            if queue.in_flight is not None:  # its sequence numbers are used up
                self.renew_producer_id()
            queue.fail_next(LogUnavailable(f"send to {partition}: brokers no longer know it"))

    async def _identify(self, queues: Iterable[PartitionQueue]) -> None:
        """Get a producer id; all batches fail if brokers refuse us, or none can be asked for."""
        try:
            await self._get_producer_id()
        except Exception as error:  # noqa: BLE001  # it goes to those who await the batches
            if not isinstance(error, HeadraceError):
                error = LogUnavailable(f"start the producer: {error!r}")
            for queue in queues:
                queue.fail_next(error)

    async def _get_producer_id(self) -> None:
        """Get a producer id, unless there is one; retry until it succeeds.

        Raises:
            LogAuthenticationFailed: the brokers refuse us.
        """
        async with self._identifying:
            attempt = 0
            while self._producer_id is None:
                try:
                    found = await self._request_producer_id()
                except KafkaError as error:
                    if not error.retriable:
                        raise in_port_words(error, "start the producer") from error
                    # Connecting again fails without a reason.
                    if (refusal := await self._connection.refusal()) is not None:
                        raise refusal from error
                else:
                    self._producer_id = found
                    self._sequences.clear()
                    return
                backoff = self._connection.tuning.producer_id_retry
                await asyncio.sleep(backoff.pause_s(attempt, self._random_share()))
                attempt += 1

    async def _request_producer_id(self) -> tuple[int, int]:
        """Return a new producer id, and its epoch. Raises `KafkaError`."""
        request = InitProducerIdRequest(None, _NO_TIMEOUT_MS)
        answer = await self.client.send(self.client.get_random_node(), request)
        error = broker_error(answer.error_code)
        if error is not None:
            raise error
        return answer.producer_id, answer.producer_epoch

    async def _send_to(
        self, node: int, producer_id: tuple[int, int], queues: Iterable[PartitionQueue]
    ) -> None:
        """Send one request with a batch of each partition, as many as it may hold."""
        most_bytes = self._connection.tuning.max_request_bytes
        topics: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
        sent: dict[tuple[str, int], PartitionQueue] = {}
        size_bytes = 0
        for queue in queues:
            size_bytes += queue.size_bytes
            # A broker closes the connection at a request over `socket.request.max.bytes`.
            if sent and size_bytes > most_bytes:
                break
            del self._due[queue]
            content = queue.begin_flight(partial(self._build, producer_id))
            topics[queue.partition.topic].append((queue.partition.partition, content))
            sent[queue.partition] = queue
        timeout_ms = self._connection.settings.request_timeout_ms
        request = ProduceRequest(None, _ALL_REPLICAS, timeout_ms, list(topics.items()))
        throttled_s = 0.0
        try:
            response = await self.client.send(node, request)
        except Exception as error:  # noqa: BLE001  # it goes to those who await the batches
            unsent: Exception = error.with_traceback(None)  # its frames hold the batches
        else:
            for topic, partitions in response.topics:
                for number, code, *_ in partitions:
                    answered_queue = sent.pop((topic, number), None)
                    if answered_queue is not None:
                        self._end_attempt(answered_queue, broker_error(code))
            unsent = LogUnavailable("expected an answer for each partition, got none for this one")
            throttled_s = response.throttle_time_ms / 1000
        for queue in sent.values():
            self._end_attempt(queue, unsent)
        # Over a quota, the broker answers at once and then reads nothing from the connection for
        # this long (KIP-219). A request that waits there may time out, be given up, and be written
        # nevertheless; a batch that has not been sent is not.
        if throttled_s:
            self._throttled_until_s[node] = asyncio.get_running_loop().time() + throttled_s
            await asyncio.sleep(throttled_s)

    def _build(self, producer_id: tuple[int, int], batch: PendingBatch) -> bytes:
        sequence = self._sequences[batch.partition]
        following = (sequence + batch.builder.record_count()) % SEQUENCES
        self._sequences[batch.partition] = following
        return build_batch(batch.builder, *producer_id, sequence)

    def _end_attempt(self, queue: PartitionQueue, error: Exception | None) -> None:
        """End the batch in flight, or send it again after a pause."""
        batch = queue.in_flight
        assert batch is not None
        if batch.ended.done():  # overdue: those that follow have a new producer id already
            queue.end_flight()
        elif error is None or isinstance(error, DuplicateSequenceNumber):
            queue.end_flight()
            batch.succeed()
        elif isinstance(error, KafkaError) and error.retriable:
            if not batch.is_retried:
                batch.is_retried = True
                log_send_retried(queue.partition, error_text(error))
            if error.invalid_metadata:
                self.client.force_metadata_update()
            pause_s = self._connection.tuning.request_retry_s
            asyncio.get_running_loop().call_later(pause_s, self._add_due, queue)
            return
        else:
            queue.end_flight()
            self._fail(batch, error)
        if queue.is_due:
            self._add_due(queue)

    def _fail(self, batch: PendingBatch, error: Exception) -> None:
        if isinstance(error, TopicAuthorizationFailedError):
            # Keep the producer id: a caller that names forbidden topics must not slow the others
            # down. The sequence numbers used up belong to a partition that accepts none.
            batch.fail(TopicForbidden(batch.partition.topic))
            return
        self.renew_producer_id()
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
        except UnicodeEncodeError as error:
            is_last_builder = isinstance(builder, AnyNameBuilder)
            if not offset and not is_last_builder:
                self.builder = self._new_builder(takes_any_name=True)
                return self.add(records, index)
            # Leave this record to the next batch, whose builder accepts names that are not UTF-8.
            self.is_full = not is_last_builder
            return index, self._bad_name_error(error) if is_last_builder else None
        finally:
            set_record_count(builder, offset)
        return len(records), None

    def _missing_key_error(self) -> RecordRefused:
        return RecordRefused(
            f"send to {self.partition}: expected a record with a key, since the topic is "
            "compacted, got one without"
        )

    def _bad_name_error(self, error: UnicodeEncodeError) -> RecordRefused:
        return RecordRefused(
            f"send to {self.partition}: expected names of headers that UTF-8 can encode, got "
            f"{error.object!r}"
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

    Attributes:
        ended: done once the batch has been acknowledged, or has failed.
        is_lingering: whether a timer runs that makes it due.
        is_due: whether it is to be sent, however few its records are.
        is_retried: whether it was sent more than once.
    """

    __slots__ = ("_timer", "ended", "is_due", "is_lingering", "is_retried")

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
        self.is_due = self.is_lingering = self.is_retried = False
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
