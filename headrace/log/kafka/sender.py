"""aiokafka's idempotent producer, replaced by a new one as soon as it is unreliable.

Two of its properties require that. It retries an idempotent batch forever; and a batch that fails
for good has used up its sequence numbers, so that all following batches are refused as out of order
(aiokafka issue 1017). So every batch has a deadline of its own, and after any failure the next
batch goes to a new producer, which has a new producer id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential,
    wait_random,
)

from headrace.errors import HeadraceError
from headrace.log.errors import LogRefused, LogUnavailable, RecordRefused, TopicForbidden
from headrace.log.kafka.batch import MAX_BATCH_BYTES, Batch
from headrace.log.kafka.closing import close_producer
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import answered, in_port_words

MAX_REQUEST_BYTES: Final = 16 * 1024 * 1024
_RETIRE_S: Final = 2.0
_FIRST_RETRY_S: Final = 0.1
_LAST_RETRY_S: Final = 1.0


class Sender:
    """Sends batches to brokers, with one in flight for each partition."""

    def __init__(self, connection: Connection, start_again_s: float) -> None:
        self._connection = connection
        self._start_again_s = start_again_s
        self._producer: AIOKafkaProducer | None = None
        self._retired: AIOKafkaProducer | None = None
        self._suspect = False
        self._replacing: asyncio.Task[AIOKafkaProducer] | None = None
        self._under_way: set[Batch] = set()

    async def start(self) -> None:
        """Connect, once. Raises `LogUnavailable` and `LogAuthenticationFailed`."""
        self._producer = await self._new_producer()

    @property
    def current(self) -> AIOKafkaProducer | None:
        """The producer, or None if there is none that is reliable."""
        producer = self._producer
        if producer is None or self._suspect or producer._sender.sender_task.done():
            return None
        return producer

    async def running(self) -> AIOKafkaProducer:
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
            self._replacing.add_done_callback(_retrieved)
        return await asyncio.shield(self._replacing)

    def doubt(self) -> None:
        """Mark the producer as unreliable; the next batch goes to a new one."""
        self._suspect = True

    async def hand_over(self, batch: Batch) -> None:
        """Queue a batch, which may wait for the previous one of its partition.

        The batch ends in any case; nothing is raised.
        """
        producer = None
        try:
            producer = await self.running()
            if batch.ended.done():  # its deadline has passed
                return
            batch.builder.close()
            self._under_way.add(batch)
            sent = await producer.send_batch(
                batch.builder, batch.partition.topic, partition=batch.partition.partition
            )
        except Exception as error:  # noqa: BLE001  # it goes to those who await the batch
            self._failed(batch, producer, error)
        else:
            sent.add_done_callback(partial(self._answered, batch, producer))

    async def close(self) -> None:
        """Close; batches that are still in flight fail."""
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait([self._replacing])
        for producer in (self._retired, self._producer):
            if producer is not None:
                await close_producer(producer)
        self._retired = self._producer = None
        for batch in list(self._under_way):
            batch.fail(LogUnavailable(f"send to {batch.partition}: the producer was closed"))

    async def _new_producer(self) -> AIOKafkaProducer:
        settings = self._connection.settings
        producer = AIOKafkaProducer(
            **self._connection.client_options(),
            acks="all",
            enable_idempotence=True,
            compression_type=None if settings.compression == "none" else settings.compression,
            max_batch_size=MAX_BATCH_BYTES,
            max_request_size=MAX_REQUEST_BYTES,
            linger_ms=0,  # a batch lingers before it is handed over
        )
        self._connection.take_over_bootstrap(producer.client)
        try:
            async with answered("start the producer", self._connection.request_timeout_s):
                await producer.start()
        except BaseException:
            await close_producer(producer)
            raise
        return producer

    async def _replace(self) -> AIOKafkaProducer:
        self._retired, self._producer = self._producer or self._retired, None
        if self._retired is not None:
            # The old producer's batches may still be acknowledged; the rest fails with it. Wait, to
            # keep the order within each partition.
            await wait_ended(self._under_way, _RETIRE_S)
            await close_producer(self._retired)
            self._retired = None
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(LogUnavailable),
            stop=stop_after_delay(self._start_again_s),
            wait=wait_exponential(_FIRST_RETRY_S, _LAST_RETRY_S) + wait_random(0, _FIRST_RETRY_S),
            reraise=True,
        ):
            with attempt:
                self._producer = await self._new_producer()
        self._suspect = False
        assert self._producer is not None
        return self._producer

    def _answered(
        self, batch: Batch, producer: AIOKafkaProducer, sent: asyncio.Future[Any]
    ) -> None:
        error = asyncio.CancelledError() if sent.cancelled() else sent.exception()
        if error is not None:
            self._failed(batch, producer, error)
            return
        self._under_way.discard(batch)
        batch.succeed()

    def _failed(
        self, batch: Batch, producer: AIOKafkaProducer | None, error: BaseException
    ) -> None:
        self._under_way.discard(batch)
        if isinstance(error, TopicAuthorizationFailedError):
            # Keep the producer: a caller that names forbidden topics must not slow the others down.
            # The sequence numbers used up belong to a partition that accepts none.
            batch.fail(TopicForbidden(batch.partition.topic))
            return
        if producer is self._producer:
            self.doubt()
        what = f"send to {batch.partition}"
        if isinstance(error, KafkaError):
            translated = in_port_words(error, what)
            if isinstance(translated, LogRefused):
                # The topic refuses these records; the producer itself still works.
                translated = RecordRefused(str(translated))
            batch.fail(translated)
        elif isinstance(error, HeadraceError):
            batch.fail(error)
        else:
            batch.fail(LogUnavailable(f"{what}: {error!r}"))


async def wait_ended(batches: Iterable[Batch], timeout_s: float) -> None:
    """Wait until all of these have ended, in success or failure, or until the timeout."""
    waiting = [batch.ended for batch in batches]
    if waiting:
        await asyncio.wait(waiting, timeout=timeout_s)


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Mark a start's error as retrieved: all callers awaiting it may be gone when it fails."""
    if not task.cancelled():
        task.exception()
