"""The transactional producer: one transaction for each commit, and the meaning of its failures.

After any failure the producer is closed at once: only a successor, which fences it, can learn the
outcome of the transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import aiokafka.errors as kafka_errors
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError

from headrace.errors import HeadraceError, Rejected, drop_tracebacks
from headrace.log.errors import (
    Fenced,
    LogRefused,
    LogUnavailable,
    NoLeader,
    RecordRefused,
    RecordsRefused,
    RecordTooLarge,
    TopicForbidden,
    TransactionTimedOut,
)
from headrace.log.kafka.admin import QUESTION_S, KnownTopics, require_leaders
from headrace.log.kafka.batch import Packed
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import answered, in_port_words
from headrace.log.kafka.transaction_protocol import ProducerEpoch
from headrace.log.port import Committed, NewRecord, TopicPartition

_FINAL = (
    kafka_errors.GroupAuthorizationFailedError,
    kafka_errors.OffsetMetadataTooLargeError,
    kafka_errors.TransactionalIdAuthorizationFailed,
)


class KafkaTransactionalProducer:
    """A producer with a transactional id, entered with `async with`; see the port."""

    def __init__(
        self, connection: Connection, topics: KnownTopics, transactional_id: str, group: str
    ) -> None:
        self._connection = connection
        self._topics = topics
        self._id = transactional_id
        self._group = group
        # The broker ends the transaction after its timeout in any case.
        self._deadline_s = connection.settings.transaction_timeout_ms / 1000
        self._epoch: ProducerEpoch | None = None

    async def __aenter__(self) -> Self:
        settings = self._connection.settings
        epoch = ProducerEpoch(
            await self._connection.open_client(),
            self._id,
            settings.transaction_timeout_ms,
            settings.request_timeout_ms,
        )
        try:
            async with answered(f"enter {self._id}", self._connection.request_timeout_s):
                await epoch.enter()
        except BaseException as error:
            await epoch.close()
            if isinstance(error.__cause__, _FINAL):
                raise LogRefused(str(error)) from error
            raise
        self._epoch = epoch
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """See the port. Requests in flight are aborted."""
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            await epoch.close()

    async def partitions_for(self, topic: str) -> int | None:
        """See the port."""
        client = self._usable().client
        async with answered(f"metadata of topic {topic}", QUESTION_S):
            return await self._topics.partitions(client, topic)

    def _usable(self) -> ProducerEpoch:
        if self._epoch is None:
            raise RuntimeError(f"{self._id}: the producer was not entered, has failed or is closed")
        return self._epoch

    # Committing

    @property
    def is_usable(self) -> bool:
        """See the port."""
        return self._epoch is not None

    async def seal(
        self,
        records: Mapping[TopicPartition, Sequence[NewRecord]],
        offsets: Mapping[TopicPartition, Committed],
    ) -> None:
        """See the port. Waits up to `transaction_timeout_ms` for the outcome."""
        epoch = self._usable()
        has_begun = False
        try:
            async with self._in_port_words():
                lanes = await self._packed(epoch.client, records)
                if not lanes and not offsets:
                    return
                # Check before the transaction begins: the epoch stays usable after an error here.
                await require_leaders(epoch.client, records.keys())
                has_begun = True
                await epoch.write(lanes, self._group, offsets)
                await epoch.commit()
        except BaseException as error:
            if not has_begun and isinstance(error, Rejected | NoLeader):
                raise  # no transaction has begun, so the epoch stays usable
            # Never reuse an epoch whose outcome is unknown: a late EndTxn could end its next
            # transaction (KAFKA-17754).
            self._epoch = None
            await epoch.close()  # even if closed before: a connection may be new
            if isinstance(error, RecordTooLarge | RecordRefused):  # the cached limits were wrong
                for partition in records:
                    self._topics.forget_rules(partition.topic)
            raise

    async def _packed(
        self, client: AIOKafkaClient, records: Mapping[TopicPartition, Sequence[NewRecord]]
    ) -> Sequence[Sequence[Packed]]:
        """Return the batches of each partition, in order.

        Raises:
            RecordsRefused: lists all records that their topics never accept.
        """
        lanes = []
        refused: dict[TopicPartition, dict[int, RecordTooLarge | RecordRefused]] = {}
        for partition, chunk in records.items():
            if not chunk:
                continue
            rules = self._topics.recall(client, partition)
            rules = rules or await self._topics.ask(client, partition)
            lane, start = [], 0
            while start < len(chunk):
                packed = Packed(partition, rules, self._connection.codec, is_transactional=True)
                start, refusal = packed.take(chunk, start)
                while refusal is not None:
                    refused.setdefault(partition, {})[start] = refusal
                    start, refusal = packed.take(chunk, start + 1)
                lane.append(packed)
            lanes.append(lane)
        if refused:
            raise RecordsRefused(refused)
        return lanes

    @asynccontextmanager
    async def _in_port_words(self) -> AsyncIterator[None]:
        """Bound a commit in time, and translate its failures into the port's errors."""
        what = f"seal of {self._id}"
        try:
            async with asyncio.timeout(self._deadline_s):
                yield
        except TimeoutError as error:
            drop_tracebacks(error)
            raise TransactionTimedOut(
                f"{what}: expected its end within {self._deadline_s:g} s "
                "(kafka.transaction_timeout_ms), got none"
            ) from error
        except (KafkaError, AssertionError, asyncio.InvalidStateError) as error:
            drop_tracebacks(error)  # frames of its requests refer to it, and to the records
            raise _in_seal_words(error, what) from error


def _in_seal_words(error: Exception, what: str) -> HeadraceError:
    """Return the port's error; unless known to be refused or fenced, the outcome is unknown."""
    if isinstance(error, kafka_errors.TopicAuthorizationFailedError):
        return TopicForbidden(error.args[0])
    if isinstance(error, _FINAL):
        return LogRefused(f"{what}: {type(error).__name__} {error}")
    if isinstance(error, KafkaError):
        translated = in_port_words(error, what)
        if isinstance(translated, Fenced):
            return translated
    return LogUnavailable(f"{what}: {error!r}")
