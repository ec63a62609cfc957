"""Fetch records whose offsets are known, without a consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import aiokafka.errors as kafka_errors
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.api import Request
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.offset import OffsetRequest

from headrace.log.errors import LogUnavailable
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.errors import answered, broker_error
from headrace.log.kafka.record_batches import (
    RecordSet,
    UnreadableBatch,
    is_intact,
    parse_records,
    plain_batch,
    records_of,
)
from headrace.log.kafka.topic_cache import TopicCache
from headrace.log.port import Fetched, Record, TopicPartition, Wanted

_READ_UNCOMMITTED: Final = 0
_NO_REPLICA: Final = -1
_EARLIEST: Final = -2
_LATEST: Final = -1
_NO_LEADER: Final = (None, -1)
_new = tuple.__new__  # half the cost of calling a NamedTuple's class


class DirectFetch:
    """Fetches records from the leaders of their partitions.

    aiokafka's consumer reads on from a position, as much as fits into a response, and discards what
    it holds when the position changes. Here a request asks for the bytes that are needed, and its
    connections are its own, so that no other request waits behind a large response.

    Args:
        connection: how to reach the brokers.
        topics: the log's cache of topics.
    """

    def __init__(self, connection: Connection, topics: TopicCache) -> None:
        self._connection = connection
        self._topics = topics
        self._client: AIOKafkaClient | None = None
        self._connecting = asyncio.Lock()

    async def fetch(
        self,
        partition: TopicPartition,
        first: int,
        last: int,
        max_bytes: int,
        wanted: Wanted | None = None,
    ) -> list[Record]:
        """See the port."""
        fetched = Fetched(wanted)
        async with self._asking(partition, f"fetch from {partition}") as client:
            await self._read(client, partition, first, last, max_bytes, fetched)
        return fetched.records

    async def written_end(self, partition: TopicPartition) -> int:
        """See `written_ends` of the port."""
        async with self._asking(partition, f"end of {partition}") as client:
            return await self._offset_at(client, partition, _LATEST)

    @asynccontextmanager
    async def _asking(self, partition: TopicPartition, what: str) -> AsyncIterator[AIOKafkaClient]:
        """Connect, check that the partition exists, and bound the body by the request deadline."""
        async with self._connecting:
            if self._client is None:
                self._client = await self._connection.open_client()
            client = self._client
        try:
            async with answered(what, self._connection.request_timeout_s):
                await self._topics.check(client, partition)
                yield client
        except LogUnavailable:
            # As for administration: only a new client goes back to the bootstrap servers.
            if self._client is client:
                await self.close()
            raise

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await self._connection.close_client(client)

    async def _read(
        self,
        client: AIOKafkaClient,
        partition: TopicPartition,
        first: int,
        last: int,
        max_bytes: int,
        fetched: Fetched,
    ) -> None:
        tuning = self._connection.tuning
        position, waited_s = first, 0.0
        damaged: set[int] = set()
        while position <= last:
            asked = [(partition.topic, [(partition.partition, position, max_bytes)])]
            request = FetchRequest(0, 0, max_bytes, _READ_UNCOMMITTED, asked)
            try:
                *_, batches = await self._ask_leader(client, partition, request)
            except kafka_errors.OffsetOutOfRangeError:
                # The error does not tell what retention has left.
                first = await self._offset_at(client, partition, _EARLIEST)
                following = max(position, first)
                if following == position:
                    break  # the log ends before it
            else:
                known = len(damaged)
                following = self._take(RecordSet(batches), partition, position, fetched, damaged)
                if len(damaged) > known:  # perhaps only on its way: it is read once more
                    position = following
                    continue
            if following == position:
                # The log ends here, or its leader is new and does not know yet how far the
                # followers have come: until then it shows no record after that (KIP-207).
                if waited_s >= tuning.fetch_end_wait_s:
                    break
                await asyncio.sleep(tuning.request_retry_s)
                waited_s += tuning.request_retry_s
            # Batches without a wanted record are not read, as far as the broker did not send them.
            position = fetched.next_offset(following, last)

    async def _offset_at(self, client: AIOKafkaClient, partition: TopicPartition, edge: int) -> int:
        """Return the first offset of a partition, or the one after its last."""
        asked = [(partition.topic, [(partition.partition, edge)])]
        request = OffsetRequest(_NO_REPLICA, _READ_UNCOMMITTED, asked)
        *_, offset = await self._ask_leader(client, partition, request)
        return int(offset)

    async def _ask_leader(
        self, client: AIOKafkaClient, partition: TopicPartition, request: Request[Any]
    ) -> Sequence[Any]:
        """Return what the leader says of the partition, after its error code. Ask again while the
        leader is unknown or changes.
        """
        while True:
            leader = client.cluster.leader_for_partition(partition)
            if leader not in _NO_LEADER:
                response = await client.send(leader, request)
                ((_, parts),) = response.topics
                if not parts:  # a fetch that found nothing
                    return (b"",)
                ((_, code, *rest),) = parts
                fields: Sequence[Any] = rest
                error = broker_error(code, str(partition))
                if error is None:
                    return fields
                out_of_range = isinstance(error, kafka_errors.OffsetOutOfRangeError)
                if out_of_range or not (error.retriable or error.invalid_metadata):
                    raise error
            await client.force_metadata_update()
            await asyncio.sleep(self._connection.tuning.request_retry_s)

    def _take(
        self,
        batches: RecordSet,
        partition: TopicPartition,
        position: int,
        fetched: Fetched,
        damaged: set[int],
    ) -> int:
        """Add the records from `position` on; return the offset after the last batch.

        This ends before a batch whose checksum is wrong for the first time, and adds the offset to
        `damaged`. One that is damaged again, or cannot be read, is passed over.
        """
        while batches.has_next():
            try:
                batch = batches.next_batch()
                if not is_intact(batch, batches.content):
                    if position not in damaged:
                        damaged.add(position)
                        return position
                    raise UnreadableBatch("expected the checksum of the batch, got another one")
                following = batch.next_offset
                if not batch.is_control_batch:
                    topic, number = partition
                    records = self._records_of(batch, batches.content)
                    fetched.add(
                        [
                            _new(
                                Record,
                                (
                                    topic,
                                    number,
                                    r.offset,
                                    r.timestamp,
                                    r.key,
                                    r.value,
                                    r.headers or (),
                                ),
                            )
                            for r in records
                            if r.offset >= position
                        ]
                    )
            except UnreadableBatch:
                following = batches.following_offset() or position + 1
            position = max(position, following)
        return position

    def _records_of(self, batch: Any, content: memoryview) -> list[Any]:
        batch, content = plain_batch(batch, content, self._connection.decompressed_bytes)
        records = records_of(batch, content, self._connection.tuning.unmeasured_batch_bytes)
        try:
            return list(records)
        except UnreadableBatch:
            raise
        except Exception:  # noqa: BLE001  # whatever the parser in C could not read
            return list(parse_records(content))
