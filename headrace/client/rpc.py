"""Request/reply over the log, in records; the base of the client.

A request goes to a partition of the requests topic, by its key or round-robin; its headers name
the reply partition that this process reads.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from headrace.client.cancellations import Cancellations
from headrace.client.replies import CORRELATION_ID, ClientClosed, Replies
from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.log.errors import LogAuthenticationFailed, TopicForbidden
from headrace.log.partitioner import partition_for_key
from headrace.log.port import Log, NewRecord, Producer, Record, TopicPartition
from headrace.topics import Topic

REPLY_TOPIC = "kafka_replyTopic"
REPLY_PARTITION = "kafka_replyPartition"

COUNT_FOR_S = 30.0
"""Longest time that partitions added to the requests topic stay unused."""


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
        self._turn = secrets.randbelow(1 << 16)
        self._count = 0
        self._count_until_s = 0.0
        self._producer: Producer | None = None
        self._replies: Replies | None = None
        self._cancellations: Cancellations | None = None
        self._stack = AsyncExitStack()

    @property
    def late(self) -> int:
        """Number of answers to this client whose caller had gone, including second copies."""
        return self._replies.late if self._replies else 0

    @property
    def foreign(self) -> int:
        """Number of answers to other clients on this client's reply partition."""
        return self._replies.foreign if self._replies else 0

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            producer = await stack.enter_async_context(self._log.producer())
            await self._request_partitions(producer)
            reply_to = await self._choose_reply_partition(producer)
            self._replies = await stack.enter_async_context(Replies(self._log, reply_to))
            self._cancellations = await stack.enter_async_context(Cancellations(producer))
            self._producer = producer
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._producer = None
        await self._stack.aclose()

    async def ask(self, request: NewRecord, until_s: float = 0.0) -> Record:
        """Send a request and return its answer; the caller limits the time.

        Args:
            request: without the reply headers.
            until_s: the event loop's time after which the answer is useless. If the caller is
                cancelled before it, the request is cancelled too, with best effort.

        Raises:
            ClientClosed: not open, closed meanwhile, or no longer able to read answers.
            ConfigurationError: the requests topic no longer exists.
            LogUnavailable, RecordTooLarge: the request was not acknowledged.
        """
        if self._producer is None or self._replies is None or self._cancellations is None:
            raise ClientClosed("the client is not open: use it within `async with`")
        producer, replies = self._producer, self._replies
        reply_topic, reply_partition = replies.partition
        correlation_id, answer = replies.expect()
        headers = [
            *request.headers,
            (CORRELATION_ID, correlation_id),
            (REPLY_TOPIC, reply_topic.encode()),
            (REPLY_PARTITION, reply_partition.to_bytes(4, "big")),
        ]
        partition: TopicPartition | None = None
        try:
            count = await self._request_partitions(producer)
            partition = TopicPartition(self._requests, self._choose(request.key, count))
            for run in await producer.send(partition, [request._replace(headers=headers)]):
                await run.acknowledged
            return await answer
        except asyncio.CancelledError:
            if partition is not None and asyncio.get_running_loop().time() < until_s:
                self._cancellations.add(partition, request.key, correlation_id)
            raise
        finally:
            replies.forget(correlation_id)

    async def _request_partitions(self, producer: Producer) -> int:
        now_s = time.monotonic()
        if now_s >= self._count_until_s:
            self._count = await _count(producer, self._requests)
            self._count_until_s = now_s + COUNT_FOR_S
        return self._count

    def _choose(self, key: bytes | None, count: int) -> int:
        if key is not None:
            return partition_for_key(key, count)
        self._turn += 1
        return self._turn % count

    async def _choose_reply_partition(self, producer: Producer) -> TopicPartition:
        count = await _count(producer, self._responses)
        chosen = self._reply_partition
        if chosen is None:
            chosen = secrets.randbelow(count)
        if not 0 <= chosen < count:
            raise ConfigurationError(
                f"reply_partition: expected 0 to {count - 1} of {self._responses}, got {chosen}"
            )
        return TopicPartition(self._responses, chosen)


async def _count(producer: Producer, topic: str) -> int:
    try:
        count = await producer.partitions_for(topic)
    except TopicForbidden as error:
        raise LogAuthenticationFailed(error.message) from error
    if count is None:
        raise ConfigurationError(f"{topic}: does not exist; run `headrace topics create`")
    return count
