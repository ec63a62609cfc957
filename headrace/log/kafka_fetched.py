"""Takes what aiokafka has fetched, batch by batch.

aiokafka's parser of record batches is in C; what its fetcher then does in Python, for each record,
takes longer than the parsing. This does the same for a batch at a time. Which batches are read is
still said by aiokafka's own rules (`aiokafka.consumer.fetcher`, of 0.14, to which the version is
bound): its `PartitionRecords` tell which transactions were aborted, its `FetchResult` whether the
partition is still read from the offset that was fetched, and the position is aiokafka's.

One thing is different: where a batch cannot be read, what was taken before it is returned, and the
next call raises. aiokafka raises at once, and does not return what it has taken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import aiokafka
from aiokafka.consumer.fetcher import Fetcher, FetchError, FetchResult, PartitionRecords
from aiokafka.errors import CorruptRecordException

from headrace.log.port import Record, TopicPartition

_new = tuple.__new__  # half the cost of calling a NamedTuple's class


class Unread:
    """What is left of a partition's part of a fetch response.

    Args:
        fetched: of which nothing was taken yet.

    Attributes:
        next_fetch_offset: where reading goes on; `FetchResult` looks here.
        is_empty: nothing is left.
        failure: why what is left cannot be read; it has to be fetched again.
    """

    def __init__(self, fetched: PartitionRecords) -> None:
        self.next_fetch_offset: int = fetched.next_fetch_offset
        self.is_empty = False
        self.failure: Exception | None = None
        self._fetched = fetched
        # Its own iterator, which nobody uses here, refers to it and it to that: the response would
        # stay in memory until the garbage collector looks.
        fetched._records_iterator = None
        self._partition = fetched._tp
        self._batch: Any = None
        self._records: Iterator[Any] = iter(())

    def take(self, most: int) -> list[Record]:
        """The next records, so many at most; fewer where no more are left or can be read."""
        found: list[Record] = []
        try:
            while self.failure is None and len(found) < most and self._has_batch():
                self._read(most - len(found), found)
        except Exception as error:  # noqa: BLE001  # `_drain` raises it, when nothing gets lost by it
            self.failure = error
        return found

    def _has_batch(self) -> bool:
        """Whether there is one to be read; goes on to the next one if need be."""
        batches = self._fetched._records
        while self._batch is None and batches.has_next():
            batch = batches.next_batch()
            if not batch.validate_crc():
                raise CorruptRecordException(f"Invalid CRC - {self._partition}")
            if self._is_for_readers(batch):
                # A batch lets itself be iterated once; several slices are taken of a chain.
                self._batch, self._records = batch, chain(batch)
            else:
                self.next_fetch_offset = batch.next_offset
        self.is_empty = self._batch is None
        return not self.is_empty

    def _is_for_readers(self, batch: Any) -> bool:
        """Neither a marker nor of an aborted transaction; for readers of what is committed."""
        fetched = self._fetched
        if batch.producer_id is not None:
            fetched._consume_aborted_up_to(batch.base_offset)
            if batch.is_control_batch and fetched._contains_abort_marker(batch):
                fetched._aborted_producers.discard(batch.producer_id)
            if batch.is_transactional and batch.producer_id in fetched._aborted_producers:
                return False
        return not batch.is_control_batch

    def _read(self, most: int, found: list[Record]) -> None:
        """Move so many records at most of the present batch into `found`."""
        topic, partition = self._partition
        records = list(islice(self._records, most))
        taken = len(records)
        if records and records[0].offset < self.next_fetch_offset:
            # A batch comes whole, also where it was fetched from its midst.
            records = [each for each in records if each.offset >= self.next_fetch_offset]
        found += [
            _new(
                Record,
                (topic, partition, r.offset, r.timestamp, r.key, r.value, r.headers or ()),
            )
            for r in records
        ]
        if taken < most:
            # Its last records may be gone by compaction: the batch says where the next one begins.
            self.next_fetch_offset = self._batch.next_offset
            self._batch = None
        elif records:
            self.next_fetch_offset = records[-1].offset + 1


async def fetched_records(
    fetcher: Fetcher, timeout_s: float, most: int
) -> dict[TopicPartition, Sequence[Record]]:
    """What has been fetched, or will be within the timeout.

    Raises:
        KafkaError: what a fetch has ended with; see `Fetcher.fetched_records`.
    """
    while True:
        subscriptions = fetcher._subscriptions
        if subscriptions.reassignment_in_progress:
            await subscriptions.wait_for_assignment()
        began_s = time.monotonic()
        found = _drain(fetcher, most)
        if found or not timeout_s:
            return found
        waiter = fetcher._create_fetch_waiter()
        done, _ = await asyncio.wait([waiter], timeout=timeout_s)
        if not done or fetcher._closed:
            waiter.cancel()
            return {}
        waiter.result()  # raises where we are not authorized
        timeout_s = max(0.0, timeout_s - (time.monotonic() - began_s))


def _drain(fetcher: Fetcher, most: int) -> dict[TopicPartition, Sequence[Record]]:
    """What is there. An error that does not come first is left to the next call."""
    found: dict[TopicPartition, Sequence[Record]] = {}
    for partition in list(fetcher._records):
        records, failure, is_over = _take(fetcher._records[partition], partition, most)
        if failure is not None and found:
            break
        if is_over:
            # Let more be fetched of the partition.
            del fetcher._records[partition]
            fetcher._notify(fetcher._wait_consume_future)
        if failure is not None:
            raise failure
        if records:
            found[TopicPartition(*partition)] = records
            most -= len(records)
        if not most:
            break
    return found


def _take(
    result: FetchResult | FetchError, partition: aiokafka.TopicPartition, most: int
) -> tuple[list[Record], Exception | None, bool]:
    """Records, or why there are none, and whether the result is done with."""
    if type(result) is FetchError:
        return [], result._error, True
    if not result.check_assignment(partition):
        return [], None, True
    unread = result._partition_records
    if type(unread) is not Unread:
        unread = result._partition_records = Unread(unread)
    records = unread.take(most)
    result._update_position()
    failure = None if records else unread.failure
    return records, failure, unread.is_empty or failure is not None
