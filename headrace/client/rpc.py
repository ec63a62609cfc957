"""Request/reply over the log: the correlator of the client, the load tool, replays and the demo.

`ReplyReader` reads replies and hands each to the request that waits for it, by correlation id.
`RpcClient` sends single requests and awaits their replies: a request goes to a partition of the
requests topic, by its key or as `StickyPartitioner` chooses; its headers name the reply partition
that this process reads. Tools that send many requests at once have a `ReplyReader` and a producer
of their own.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple, Self, TypeAlias

from headrace.config import Settings
from headrace.errors import ConfigurationError, HeadraceError
from headrace.log.errors import (
    LogAuthenticationFailed,
    LogUnavailable,
    OffsetOutOfRange,
    TopicForbidden,
    UnknownPartition,
)
from headrace.log.partitioner import StickyPartitioner, partition_for_key
from headrace.log.port import Consumer, Log, NewRecord, Producer, Record, TopicPartition
from headrace.protocol.headers import HeaderName
from headrace.topics import Topic

POLL_TIMEOUT_S = 0.2
"""Timeout of one poll; closing may wait this long for the last one."""

POLL_MAX_RECORDS = 1000

CLOSE_TIMEOUT_S = 10.0
"""Longest wait for the current poll on closing; its own timeout normally ends it earlier."""

PARTITION_COUNT_TTL_S = 30.0
"""Longest time that partitions added to the requests topic stay unused."""

MAX_QUEUED_CANCELLATIONS = 1024
CANCEL_TIMEOUT_S = 2.0
CANCEL_CLOSE_TIMEOUT_S = 0.5
"""Longest time for sending the queued cancellations when the client is closed."""

OnReply: TypeAlias = Callable[[Record], None]


class ClientClosed(HeadraceError):
    """The client is closed or can no longer read answers; the request may have been served."""


def last_header(headers: Sequence[tuple[str, bytes | None]], name: str) -> bytes | None:
    """Return the last value of a header, which is the one that counts; None if absent."""
    for key, value in reversed(headers):
        if key == name:
            return value
    return None


async def topic_partitions(log: Log, topic: str) -> list[TopicPartition]:
    """Return the partitions of a topic. Raises `ConfigurationError` if it does not exist."""
    info = (await log.describe_topics([topic]))[topic]
    if info is None:
        raise ConfigurationError(f"{topic}: does not exist; run `headrace topics create`")
    return [TopicPartition(topic, number) for number in range(info.partitions)]


class ReplyReader:
    """Read partitions and hand each reply to the request that waits for it.

    Other clients may share the partitions. A reply without a waiting request is dropped and
    counted: `late` if it is this reader's (its caller gave up, or it is the second copy that
    at-least-once delivery allows), `foreign` otherwise.

    Args:
        log: an open log; this object opens its own reader.
        partitions: partitions of a topic of replies.
    """

    def __init__(self, log: Log, partitions: Sequence[TopicPartition]) -> None:
        self.late = 0
        self.foreign = 0
        self._partitions = partitions
        self._log = log
        self._prefix = secrets.token_hex(6).encode() + b"-"
        self._count = 0
        self._waiting: dict[bytes, OnReply] = {}
        self._futures: dict[bytes, asyncio.Future[Record]] = {}
        self._arrived = asyncio.Event()
        self._consumer: Consumer | None = None
        self._stopping = False
        self._failure: BaseException | None = None
        self._stack = AsyncExitStack()

    @property
    def pending(self) -> int:
        """Number of requests without a reply."""
        return len(self._waiting)

    def fault(self) -> str:
        """Return why replies can no longer be read; empty if they can."""
        return "" if self._failure is None else f"answers can no longer be read: {self._failure}"

    def last_contact_s(self) -> float:
        """Return the seconds since a broker last answered the reader; 0.0 before it is entered."""
        return self._consumer.last_contact_s() if self._consumer else 0.0

    async def __aenter__(self) -> Self:
        """Start reading; after this returns, no reply to a later request can be missed."""
        async with AsyncExitStack() as stack:
            consumer = await stack.enter_async_context(self._log.reader(self._partitions))
            for partition, end in (await consumer.end_offsets(self._partitions)).items():
                consumer.seek(partition, end)
            # This object owns the task and ends it on exit: a TaskGroup would wrap whatever the
            # user's own block raises into an exception group.
            task = asyncio.create_task(self._read(consumer), name="replies")
            stack.push_async_callback(self._join, task)
            self._consumer = consumer
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        self._fail_futures("the client was closed before the answer came")
        await self._stack.aclose()

    def expect(self, on_reply: OnReply, correlation_id: bytes | None = None) -> bytes:
        """Expect a reply and return its correlation id: a new one, unless one is given.

        `on_reply` is called once, with the reply. An error that it raises ends the reading.

        Raises:
            ClientClosed: reading has ended.
        """
        if self._stopping:
            raise ClientClosed("the client is closed")
        if self._failure is not None:
            raise ClientClosed(self.fault()) from self._failure
        if correlation_id is None:
            self._count += 1
            correlation_id = b"%s%d" % (self._prefix, self._count)
        self._waiting[correlation_id] = on_reply
        return correlation_id

    def expect_future(self) -> tuple[bytes, asyncio.Future[Record]]:
        """Return a new correlation id and the future of its reply; call `forget` afterwards.

        Raises:
            ClientClosed: reading has ended.
        """
        future: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
        correlation_id = self.expect(partial(self._resolve, future))
        self._futures[correlation_id] = future
        return correlation_id, future

    def forget(self, correlation_id: bytes) -> None:
        """Stop waiting for this reply."""
        self._waiting.pop(correlation_id, None)
        future = self._futures.pop(correlation_id, None)
        if future is not None:
            future.cancel()

    async def wait_for_replies(self) -> None:
        """Wait until replies have arrived since the previous call.

        Raises:
            BaseException: the error that ended the reading.
        """
        await self._arrived.wait()
        if self._failure is not None:
            raise self._failure
        self._arrived.clear()

    async def _read(self, consumer: Consumer) -> None:
        try:
            while not self._stopping:
                try:
                    polled = await consumer.poll(POLL_TIMEOUT_S, POLL_MAX_RECORDS)
                except OffsetOutOfRange as error:
                    positions = error.positions or dict.fromkeys(self._partitions, 0)
                    try:
                        await _seek_to_existing_records(consumer, positions)
                    except LogUnavailable:
                        # Brokers in trouble are why positions are lost; the next poll names them
                        # again.
                        await asyncio.sleep(POLL_TIMEOUT_S)
                    continue
                for records in polled.values():
                    self._dispatch(records)
                if polled:
                    self._arrived.set()
        except HeadraceError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise

    def _dispatch(self, records: Iterable[Record]) -> None:
        for record in records:
            correlation_id = last_header(record.headers, HeaderName.CORRELATION_ID)
            on_reply = None if correlation_id is None else self._waiting.pop(correlation_id, None)
            if on_reply is not None:
                on_reply(record)
            elif correlation_id is not None and correlation_id.startswith(self._prefix):
                self.late += 1
            else:
                self.foreign += 1

    def _resolve(self, future: asyncio.Future[Record], reply: Record) -> None:
        if future.done():  # its caller was cancelled in this turn of the event loop
            self.late += 1
        else:
            future.set_result(reply)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._arrived.set()
        self._fail_futures(self.fault())

    def _fail_futures(self, reason: str) -> None:
        for future in self._futures.values():
            if not future.done():
                future.set_exception(ClientClosed(reason))
                future.exception()  # marks it retrieved: its caller may have gone

    async def _join(self, task: asyncio.Task[None]) -> None:
        self._stopping = True
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await task


async def _seek_to_existing_records(
    consumer: Consumer, positions: Mapping[TopicPartition, int]
) -> None:
    """Seek after retention deleted the next records, or the topic was recreated."""
    begins = await consumer.beginning_offsets(list(positions))
    ends = await consumer.end_offsets(list(positions))
    for partition, position in positions.items():
        begin = begins[partition]
        consumer.seek(partition, begin if position < begin else ends[partition])


class RpcClient:
    """Send request records and wait for the records that answer them.

    Args:
        log: an open log; this object opens its own producer and reader.
        settings: give the topics' names.
        reply_partition: partition of the responses topic; None to choose one at random.

    Raises (on entering):
        ConfigurationError: a topic does not exist, or has no such partition.
        LogUnavailable, LogAuthenticationFailed: see `headrace.log.port`.
    """

    def __init__(self, log: Log, settings: Settings, reply_partition: int | None = None) -> None:
        self._log = log
        self._requests = settings.topic(Topic.REQUESTS)
        self._responses = settings.topic(Topic.RESPONSES)
        self._reply_partition = reply_partition
        self._without_key = StickyPartitioner(first=secrets.randbelow(1 << 16))
        self._partition_count = 0
        self._recount_at_s = 0.0
        self._producer: Producer | None = None
        self._replies: ReplyReader | None = None
        self._cancellations: _Cancellations | None = None
        self._reply_headers: list[tuple[str, bytes]] = []
        self._stack = AsyncExitStack()

    @property
    def late(self) -> int:
        """Number of answers to this client whose caller had gone, including second copies."""
        return self._replies.late if self._replies else 0

    @property
    def foreign(self) -> int:
        """Number of answers to other clients on this client's reply partition."""
        return self._replies.foreign if self._replies else 0

    def fault(self) -> str:
        """Return why answers can no longer be read; empty if they can."""
        return self._replies.fault() if self._replies else ""

    def last_contact_s(self) -> float:
        """Return the seconds since a broker last answered the reader; 0.0 before it is entered."""
        return self._replies.last_contact_s() if self._replies else 0.0

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            producer = await stack.enter_async_context(self._log.producer())
            await self._count_request_partitions(producer)
            reply_to = await self._choose_reply_partition(producer)
            self._reply_headers = [
                (HeaderName.REPLY_TOPIC, reply_to.topic.encode()),
                (HeaderName.REPLY_PARTITION, reply_to.partition.to_bytes(4, "big")),
            ]
            self._replies = await stack.enter_async_context(ReplyReader(self._log, [reply_to]))
            self._cancellations = await stack.enter_async_context(_Cancellations(producer))
            self._producer = producer
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._producer = None
        await self._stack.aclose()

    @property
    def is_open(self) -> bool:
        """True from entering until leaving."""
        return self._producer is not None

    async def call(self, request: NewRecord, until_s: float = 0.0) -> Record:
        """Send a request and return its answer; the caller limits the time.

        Args:
            request: without the reply headers.
            until_s: the event loop's time after which the answer is useless. If the caller is
                cancelled before it, the request is cancelled too, with best effort.

        Raises:
            ClientClosed: not open, closed meanwhile, or no longer able to read answers.
            ConfigurationError: the requests topic no longer exists, or has lost partitions.
            LogAuthenticationFailed: the broker does not allow us to write to it.
            LogUnavailable, RecordTooLarge: the request was not acknowledged.
        """
        if self._producer is None or self._replies is None or self._cancellations is None:
            raise ClientClosed("the client is not open: use it within `async with`")
        producer, replies = self._producer, self._replies
        correlation_id, answer = replies.expect_future()
        headers = [
            *request.headers,
            (HeaderName.CORRELATION_ID, correlation_id),
            *self._reply_headers,
        ]
        partition: TopicPartition | None = None
        try:
            count = await self._count_request_partitions(producer)
            partition = TopicPartition(self._requests, self._choose_partition(request, count))
            for sent in await producer.send(partition, [request._replace(headers=headers)]):
                await sent.acknowledged
            return await answer
        except LogUnavailable as error:
            if self._producer is None:
                raise ClientClosed("the client was closed before the answer came") from error
            raise
        except TopicForbidden as error:  # `Rejected`, which would blame the request
            raise LogAuthenticationFailed(error.message) from error
        except UnknownPartition as error:
            self._recount_at_s = 0.0  # it may have been made anew with fewer
            raise ConfigurationError(error.message) from error
        except asyncio.CancelledError:
            if partition is not None and asyncio.get_running_loop().time() < until_s:
                self._cancellations.add(partition, request.key, correlation_id)
            raise
        finally:
            replies.forget(correlation_id)

    async def _count_request_partitions(self, producer: Producer) -> int:
        now_s = time.monotonic()
        if now_s >= self._recount_at_s:
            self._partition_count = await _count_partitions(producer, self._requests)
            self._recount_at_s = now_s + PARTITION_COUNT_TTL_S
        return self._partition_count

    def _choose_partition(self, request: NewRecord, count: int) -> int:
        if request.key is not None:
            return partition_for_key(request.key, count)
        return self._without_key.choose(len(request.value or b""), count, time.monotonic())

    async def _choose_reply_partition(self, producer: Producer) -> TopicPartition:
        count = await _count_partitions(producer, self._responses)
        chosen = self._reply_partition
        if chosen is None:
            chosen = secrets.randbelow(count)
        if not 0 <= chosen < count:
            raise ConfigurationError(
                f"reply_partition: expected 0 to {count - 1} of {self._responses}, got {chosen}"
            )
        return TopicPartition(self._responses, chosen)


async def _count_partitions(producer: Producer, topic: str) -> int:
    try:
        count = await producer.partitions_for(topic)
    except TopicForbidden as error:
        raise LogAuthenticationFailed(error.message) from error
    if count is None:
        raise ConfigurationError(f"{topic}: does not exist; run `headrace topics create`")
    return count


class _CancelledCall(NamedTuple):
    partition: TopicPartition
    key: bytes | None
    correlation_id: bytes


class _Cancellations:
    """Send a cancelling record for each request whose caller has given up.

    A cancelled caller must not be delayed by this and cannot handle its failure. So one task sends
    the records with best effort, and drops those that exceed the queue.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._queue: asyncio.Queue[_CancelledCall] = asyncio.Queue(MAX_QUEUED_CANCELLATIONS)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        # This object owns the task and ends it on exit: see `ReplyReader`.
        self._task = asyncio.create_task(self._send(), name="cancellations")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        try:
            async with asyncio.timeout(CANCEL_CLOSE_TIMEOUT_S):
                await self._queue.join()
        except TimeoutError:
            pass  # the requests run; their answers are dropped
        self._task.cancel()
        await asyncio.wait([self._task])

    def add(self, partition: TopicPartition, key: bytes | None, correlation_id: bytes) -> None:
        """Queue the cancellation of a request that was sent to this partition."""
        if not self._queue.full():
            self._queue.put_nowait(_CancelledCall(partition, key, correlation_id))

    async def _send(self) -> None:
        while True:
            partition, key, correlation_id = await self._queue.get()
            record = NewRecord(
                key, None, [(HeaderName.CANCEL, b""), (HeaderName.CORRELATION_ID, correlation_id)]
            )
            try:
                async with asyncio.timeout(CANCEL_TIMEOUT_S):
                    for sent in await self._producer.send(partition, [record]):
                        await sent.acknowledged
            except (HeadraceError, TimeoutError):
                pass  # best effort: the request runs, and its answer is dropped
            finally:
                self._queue.task_done()
