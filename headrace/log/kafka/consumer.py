"""Read through aiokafka's consumer: the common part of group members and free readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, Self

import aiokafka
import aiokafka.errors as kafka_errors
from aiokafka import AIOKafkaConsumer
from aiokafka.consumer.fetcher import OffsetResetStrategy
from aiokafka.errors import KafkaError

from headrace.log.errors import (
    Fenced,
    LogAuthenticationFailed,
    LogRefused,
    OffsetOutOfRange,
    UnknownPartition,
)
from headrace.log.kafka.closing import close_consumer
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import answered, in_port_words
from headrace.log.kafka.fetch_buffer import Reading, fetched_records
from headrace.log.kafka.requests import partition_counts
from headrace.log.port import MAX_POLL_BYTES, Committed, Gap, Record, TopicPartition

REBALANCE_TIMEOUT_MS: Final = 30_000
"""How long the group waits for a member to finish `on_revoked` and join again."""
_JOIN_MARGIN_MS: Final = 5_000
_FETCH_MAX_WAIT_MS: Final = 50
"""The longest that an idle fetch delays a partition that was resumed or sought."""
_FETCH_MAX_BYTES: Final = 16 * 1024 * 1024
_PARTITION_FETCH_BYTES: Final = 1024 * 1024
_SILENCE_S: Final = 5.0
"""After this long without a response, check whether the brokers refuse us; repeat at this interval.
"""


class KafkaConsumer:
    """A consumer, entered with `async with`; see `headrace.log.port.Consumer`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._started: AIOKafkaConsumer | None = None
        self._owned: frozenset[TopicPartition] = frozenset()
        self._paused: set[TopicPartition] = set()
        self._open = asyncio.Event()
        self._failure: Exception | None = None
        self._contact = time.monotonic()
        self._diagnosis: asyncio.Task[None] | None = None
        self._diagnosed = self._contact
        self._closed = False
        self._reading = Reading(connection.decompressed_bytes)

    # Starting and closing

    async def __aenter__(self) -> Self:
        settings = self._connection.settings
        self._started = AIOKafkaConsumer(
            **self._connection.client_options(
                # JoinGroup is answered only when every member has joined.
                max(settings.request_timeout_ms, REBALANCE_TIMEOUT_MS + _JOIN_MARGIN_MS)
            ),
            **self._group_options(),
            client_rack=settings.client_rack or None,
            isolation_level="read_committed",
            auto_offset_reset="none",  # an offset that is gone must be reported, not skipped
            enable_auto_commit=False,
            fetch_min_bytes=1,
            fetch_max_wait_ms=_FETCH_MAX_WAIT_MS,
            fetch_max_bytes=_FETCH_MAX_BYTES,
            max_partition_fetch_bytes=_PARTITION_FETCH_BYTES,
            check_crcs=True,
        )
        try:
            self._connection.take_over_bootstrap(self._started._client)
            await self._start(self._started)
        except BaseException:
            await self.close()
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
        """Leave the group and close all sockets in a few seconds; the listener is not called."""
        self._open.clear()
        consumer, self._started, self._closed = self._started, None, True
        diagnosis, self._diagnosis = self._diagnosis, None
        if diagnosis is not None:
            diagnosis.cancel()
            await asyncio.wait([diagnosis])
        if consumer is not None:
            await close_consumer(consumer)
        self._owned = frozenset()

    def _group_options(self) -> dict[str, Any]:
        return {"group_id": None}

    async def _start(self, consumer: AIOKafkaConsumer) -> None:
        async with self._asking("connect"):
            await consumer.start()
        self._contact = time.monotonic()

    @property
    def _consumer(self) -> AIOKafkaConsumer:
        if self._started is None:
            raise RuntimeError("the consumer is closed" if self._closed else "enter it first")
        return self._started

    # Reading

    async def poll(
        self, timeout_s: float, max_records: int, max_bytes: int = MAX_POLL_BYTES
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """See the port. If a rebalance begins within a poll, the poll lasts until the rebalance
        ends.
        """
        consumer = self._consumer
        self._reading.gaps = []
        self._raise_failure()
        try:
            if not self._open.is_set() and not await self._opened(consumer, timeout_s):
                self._watch(consumer)
                return {}
            self._raise_failure()
            consumer._coordinator.check_errors()
            with consumer._subscription.fetch_context():
                found = await fetched_records(
                    consumer._fetcher, timeout_s, max_records, max_bytes, self._reading
                )
        except KafkaError as error:
            self._poll_failed(consumer, error)
            return {}
        if not found:
            self._watch(consumer)
        return found

    def gaps(self) -> Sequence[Gap]:
        """See the port."""
        return self._reading.gaps

    async def _opened(self, consumer: AIOKafkaConsumer, timeout_s: float) -> bool:
        """Wait until an assignment's listener has returned; False if the timeout passes first."""
        consumer._coordinator.check_errors()  # joining may have failed for good
        # aiokafka does not rejoin unless a poll is in progress, so count this wait as polling.
        with consumer._subscription.fetch_context():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._open.wait()
            except TimeoutError:
                return False
        return True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _poll_failed(self, consumer: AIOKafkaConsumer, error: KafkaError) -> None:
        """Handle an error of reading, or raise the port's error for it."""
        # aiokafka counts pollers without a `finally`; a leftover would make the consumer look busy
        # forever.
        consumer._subscription._fetch_count = 0
        consumer._subscription._last_fetch_ended = time.monotonic()
        if isinstance(error, kafka_errors.NoOffsetForPartitionError):
            # Nothing is committed and the listener did not seek.
            consumer._fetcher.request_offset_reset([error.args[0]], OffsetResetStrategy.EARLIEST)
        elif isinstance(error, kafka_errors.OffsetOutOfRangeError):
            positions = {TopicPartition(*each): at for each, at in error.args[0].items()}
            text = ", ".join(f"{each} at {at}" for each, at in positions.items())
            raise OffsetOutOfRange(f"the log does not hold {text}", positions) from error
        elif not error.retriable:
            translated = in_port_words(error, "poll")
            if isinstance(translated, LogAuthenticationFailed):
                raise translated from error
            if isinstance(error, kafka_errors.InconsistentGroupProtocolError):
                raise LogRefused(
                    "the consumer group has members of another kind, and takes only those: "
                    "processes of another form, or with another guarantee"
                ) from error
            # aiokafka's coordination has ended for good; only a new consumer can continue.
            raise LogRefused(str(translated)) from error

    def _watch(self, consumer: AIOKafkaConsumer) -> None:
        """Check the state behind an empty poll, which is all that aiokafka shows of its problems.

        After a long silence, check in a task beside the polling whether the brokers refuse us.
        """
        if consumer._fetcher.error_future.done():
            raise LogRefused(f"reading has ended: {consumer._fetcher.error_future!r}")
        now = time.monotonic()
        if self.last_contact_s() < _SILENCE_S or now - self._diagnosed < _SILENCE_S:
            return
        if self._diagnosis is None or self._diagnosis.done():
            self._diagnosed = now
            self._diagnosis = asyncio.create_task(self._diagnose(), name="kafka-diagnosis")

    async def _diagnose(self) -> None:
        self._failure = await self._connection.refusal() or self._failure

    def last_contact_s(self) -> float:
        """Return the seconds since a broker's last response of any kind (fetch, heartbeat,
        request).
        """
        if self._started is not None:
            connections = self._started._client._conns.values()
            self._contact = max([self._contact, *(each._last_action for each in connections)])
        return time.monotonic() - self._contact

    @property
    def member_id(self) -> str:
        """Empty: a free reader is in no group."""
        return ""

    async def is_member(self) -> bool:
        """Return False: a free reader is in no group."""
        return False

    # Positions

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions owned, from their assignment until `on_revoked` has returned."""
        return self._owned

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """See the port. Records already fetched from these partitions are fetched again later."""
        self._check_owned(partitions)
        self._paused.update(partitions)
        self._consumer.pause(*theirs(partitions))

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """See the port."""
        self._check_owned(partitions)
        self._paused.difference_update(partitions)
        if self._open.is_set():
            self._consumer.resume(*theirs(partitions))

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """See the port."""
        self._check_owned([partition])
        self._consumer.seek(aiokafka.TopicPartition(*partition), offset)

    async def position(self, partition: TopicPartition) -> int:
        """See the port."""
        self._check_owned([partition])
        async with self._asking(f"position in {partition}"):
            position: int = await self._consumer.position(aiokafka.TopicPartition(*partition))
        return position

    def _check_owned(self, partitions: Iterable[TopicPartition]) -> None:
        strangers = sorted(set(partitions) - self._owned)
        if strangers:
            raise Fenced(f"not assigned: {', '.join(map(str, strangers))}")

    # Offsets

    async def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Raise `LogRefused`: a free reader has no group to commit for."""
        raise LogRefused(f"a reader without a group cannot commit {dict(offsets)}")

    async def committed(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        """Return None for each partition: a free reader has no group, so nothing is committed."""
        return dict.fromkeys(partitions)

    async def beginning_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """See the port."""
        async with self._asking("beginning offsets"):
            await self._check_exist(partitions)
            found = await self._consumer.beginning_offsets(theirs(partitions))
        return {TopicPartition(*each): offset for each, offset in found.items()}

    async def end_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return the last stable offsets, since consumers here are `read_committed`."""
        async with self._asking("end offsets"):
            await self._check_exist(partitions)
            found = await self._consumer.end_offsets(theirs(partitions))
        return {TopicPartition(*each): offset for each, offset in found.items()}

    async def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, int | None]:
        """See the port."""
        asked = {aiokafka.TopicPartition(*each): at for each, at in timestamps_ms.items()}
        async with self._asking("offsets for times"):
            await self._check_exist(timestamps_ms)
            found = await self._consumer.offsets_for_times(asked)
        return {
            TopicPartition(*each): None if answer is None else answer.offset
            for each, answer in found.items()
        }

    def _asking(self, what: str) -> AbstractAsyncContextManager[None]:
        return answered(what, self._connection.request_timeout_s)

    async def _check_exist(self, partitions: Iterable[TopicPartition]) -> None:
        """Raise for missing partitions at once; aiokafka would look for them until its timeout."""
        client = self._consumer._client
        wanted = {each.topic for each in partitions}
        strange = [each for each in wanted if client.cluster.partitions_for_topic(each) is None]
        counts = await partition_counts(client, strange)
        for each in partitions:
            known = client.cluster.partitions_for_topic(each.topic)
            count = counts.get(each.topic) if known is None else len(known)
            if each.partition >= (count or 0):
                raise UnknownPartition(each, count or 0)


class KafkaReader(KafkaConsumer):
    """A reader of given partitions, in no group, from their ends unless it seeks."""

    def __init__(self, connection: Connection, partitions: Sequence[TopicPartition]) -> None:
        super().__init__(connection)
        self._partitions = tuple(partitions)

    async def _start(self, consumer: AIOKafkaConsumer) -> None:
        await super()._start(consumer)
        # "The end" is the end now, not at the time of the first fetch.
        ends = await self.end_offsets(self._partitions)
        consumer.assign(theirs(self._partitions))
        self._owned = frozenset(self._partitions)
        for partition, end in ends.items():
            self.seek(partition, end)
        self._open.set()


def theirs(partitions: Iterable[TopicPartition]) -> list[aiokafka.TopicPartition]:
    """Convert to aiokafka's own type, which it requires although both are the same tuple."""
    return [aiokafka.TopicPartition(*each) for each in partitions]
