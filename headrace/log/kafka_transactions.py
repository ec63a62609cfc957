"""The transactional producer: one transaction of aiokafka's for each seal.

aiokafka 0.14.0 commits a transaction although a record in it was refused, retries the end of a
transaction for ever with the same epoch (which KAFKA-17754 makes dangerous), and cannot go on
after most errors. So every acknowledgement is awaited before the offsets are sent, every seal has
a deadline, and after any failure the producer is let go of at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import zip_longest
from types import TracebackType
from typing import Any, Final, Self

import aiokafka
import aiokafka.errors as kafka_errors
import aiokafka.producer.sender
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

from headrace.errors import HeadraceError
from headrace.log.errors import (
    Fenced,
    LogRefused,
    LogUnavailable,
    RecordRefused,
    RecordTooLarge,
    TopicForbidden,
)
from headrace.log.kafka_batch import MAX_BATCH_BYTES, Packed
from headrace.log.kafka_closing import close_producer
from headrace.log.kafka_connection import Connection
from headrace.log.kafka_errors import answered, in_port_words
from headrace.log.kafka_sender import MAX_REQUEST_BYTES
from headrace.log.kafka_topics import QUESTION_S, KnownTopics
from headrace.log.port import Committed, NewRecord, TopicPartition

_MARKER_BACKOFF_S: Final = 0.005
"""How soon a transaction is tried again that follows the last one's end at once. The broker is
writing that one's markers then, which takes 2 ms; aiokafka's own 20 ms would be most of a seal.
"""
_FINAL = (
    kafka_errors.GroupAuthorizationFailedError,
    kafka_errors.OffsetMetadataTooLargeError,
    kafka_errors.TransactionalIdAuthorizationFailed,
)
_NOT_THE_RECORDS = (
    kafka_errors.InvalidProducerEpoch,
    kafka_errors.InvalidTxnState,
    kafka_errors.ProducerFenced,
    kafka_errors.TopicAuthorizationFailedError,
)


class KafkaTransactionalProducer:
    """A producer of one transactional id, to be entered with `async with`; see the port."""

    def __init__(
        self, connection: Connection, topics: KnownTopics, transactional_id: str, group: str
    ) -> None:
        self._connection = connection
        self._topics = topics
        self._id = transactional_id
        self._group = group
        # Past its timeout the broker ends the transaction in any case.
        self._deadline_s = connection.settings.transaction_timeout_ms / 1000
        self._producer: AIOKafkaProducer | None = None

    async def __aenter__(self) -> Self:
        aiokafka.producer.sender.BACKOFF_OVERRIDE = _MARKER_BACKOFF_S
        settings = self._connection.settings
        producer = AIOKafkaProducer(
            **self._connection.client_options(),
            acks="all",
            transactional_id=self._id,
            transaction_timeout_ms=settings.transaction_timeout_ms,
            compression_type=None if settings.compression == "none" else settings.compression,
            max_batch_size=MAX_BATCH_BYTES,
            max_request_size=MAX_REQUEST_BYTES,
            linger_ms=0,
        )
        self._connection.take_over_bootstrap(producer.client)
        try:
            async with answered(f"enter {self._id}", self._connection.request_timeout_s):
                await producer.start()
        except BaseException as error:
            await _let_go(producer)
            if isinstance(error.__cause__, _FINAL):
                raise LogRefused(str(error)) from error
            raise
        self._producer = producer
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """See the port. What is under way is broken off."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await _let_go(producer)

    async def partitions_for(self, topic: str) -> int | None:
        """See the port."""
        producer = self._usable()
        async with answered(f"metadata of topic {topic}", QUESTION_S):
            return await self._topics.partitions(producer.client, topic)

    def _usable(self) -> AIOKafkaProducer:
        if self._producer is None:
            raise RuntimeError(f"{self._id}: the producer was not entered, has failed or is closed")
        return self._producer

    # Sealing

    async def seal(
        self,
        records: Mapping[TopicPartition, Sequence[NewRecord]],
        offsets: Mapping[TopicPartition, Committed],
    ) -> None:
        """See the port. Until `transaction_timeout_ms` has passed the outcome is waited for."""
        producer = self._usable()
        try:
            async with self._in_port_words():
                packed = await self._packed(producer, records)
                if not packed and not offsets:
                    return
                await producer.begin_transaction()
                await _send(producer, packed)
                if offsets:
                    await producer.send_offsets_to_transaction(
                        {
                            aiokafka.TopicPartition(*each): OffsetAndMetadata(*at)
                            for each, at in offsets.items()
                        },
                        self._group,
                    )
                await producer.commit_transaction()
        except BaseException as error:
            # At once: left alone, it would go on trying to end the transaction.
            await self.close()
            if isinstance(error, RecordTooLarge | RecordRefused):
                for partition in records:
                    self._topics.forget_rules(partition.topic)  # they may have changed
            raise

    async def _packed(
        self, producer: AIOKafkaProducer, records: Mapping[TopicPartition, Sequence[NewRecord]]
    ) -> Sequence[Sequence[Packed]]:
        """The batches of each partition, in order. Raises for a record that is not taken."""
        lanes = []
        for partition, chunk in records.items():
            if not chunk:
                continue
            rules = self._topics.recall(producer.client, partition) or await self._topics.ask(
                producer.client, partition
            )
            lane, start = [], 0
            while start < len(chunk):
                packed = Packed(partition, rules, self._connection.codec, is_transactional=True)
                start, refusal = packed.take(chunk, start)
                if refusal is not None:
                    raise refusal
                packed.builder.close()
                lane.append(packed)
            lanes.append(lane)
        return lanes

    @asynccontextmanager
    async def _in_port_words(self) -> AsyncIterator[None]:
        """Bound a seal in time, and give its failures as the port has them."""
        what = f"seal of {self._id}"
        try:
            async with asyncio.timeout(self._deadline_s):
                yield
        except TimeoutError as error:
            raise LogUnavailable(f"{what}: not ended within {self._deadline_s:g} s") from error
        except (KafkaError, AssertionError, asyncio.InvalidStateError) as error:
            raise _in_seal_words(error, what) from error


async def _send(producer: AIOKafkaProducer, lanes: Sequence[Sequence[Packed]]) -> None:
    """Hand over all batches and await every acknowledgement, whatever becomes of the others."""
    acknowledged: list[asyncio.Future[Any]] = []
    # The first batch of each partition goes before the second of any, which has to wait.
    for rank in zip_longest(*lanes):
        for packed in filter(None, rank):
            topic, partition = packed.partition
            sent = await producer.send_batch(packed.builder, topic, partition=partition)
            sent.add_done_callback(_retrieved)
            acknowledged.append(sent)
    if acknowledged:
        await asyncio.wait(acknowledged)
    for sent in acknowledged:
        error: BaseException | None = sent.exception()
        if error is not None:
            raise _in_produce_words(error, producer)


def _in_produce_words(error: BaseException, producer: AIOKafkaProducer) -> BaseException:
    """A refused batch is a matter between its records and their topic, unless all has ended."""
    ended = producer._sender.sender_task.done()
    if isinstance(error, KafkaError) and not ended and not isinstance(error, _NOT_THE_RECORDS):
        translated = in_port_words(error, "send in a transaction")
        return RecordRefused(str(translated)) if isinstance(translated, LogRefused) else translated
    return error


def _in_seal_words(error: Exception, what: str) -> HeadraceError:
    """What is not known to be refused, or fenced, has an unknown outcome."""
    cause = _root(error)
    if isinstance(cause, kafka_errors.TopicAuthorizationFailedError):
        named = cause.args[0] if cause.args else "a topic"
        return TopicForbidden(named if isinstance(named, str) else ", ".join(sorted(named)))
    if isinstance(cause, _FINAL):
        return LogRefused(f"{what}: {type(cause).__name__} {cause}")
    if isinstance(cause, KafkaError):
        translated = in_port_words(cause, what)
        if isinstance(translated, Fenced):
            return translated
    return LogUnavailable(f"{what}: {cause!r}")


def _root(error: BaseException) -> BaseException:
    """What aiokafka's sender met when it gave up, which it wraps into a plain `KafkaError`."""
    cause = error.__cause__
    return _root(cause) if type(error) is KafkaError and cause is not None else error


def _retrieved(sent: asyncio.Future[Any]) -> None:
    """A seal that fails for one batch awaits the others no more."""
    if not sent.cancelled():
        sent.exception()


async def _let_go(producer: AIOKafkaProducer) -> None:
    """Close, and retrieve what nobody will await any more."""
    await close_producer(producer)
    waiter = producer._txn_manager._transaction_waiter
    if waiter is not None and waiter.done() and not waiter.cancelled():
        waiter.exception()
