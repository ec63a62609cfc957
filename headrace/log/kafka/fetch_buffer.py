"""Takes what aiokafka has fetched, batch by batch.

aiokafka's parser of record batches is in C; what its fetcher then does in Python, for each record,
takes longer than the parsing. This does the same for a batch at a time. Which batches are read is
still said by aiokafka's own rules (`aiokafka.consumer.fetcher`, of 0.14, to which the version is
bound): its `PartitionRecords` tell which transactions were aborted, its `FetchResult` whether the
partition is still read from the offset that was fetched, and the position is aiokafka's.

Two things are different. What is taken is limited by bytes as well as by number. And a batch that
cannot be read ends nothing: it is passed over, as a `Gap`, and reading goes on behind it. aiokafka
raises there, and would raise again at every start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final

import aiokafka
from aiokafka.consumer.fetcher import Fetcher, FetchError, FetchResult, PartitionRecords

from headrace.log.kafka.record_batches import (
    DEFAULT_DECOMPRESSED_BYTES,
    CarefulRecord,
    RecordSet,
    UnreadableBatch,
    careful_records,
    guarded_records,
    plain_batch,
    read_head,
)
from headrace.log.port import MAX_POLL_BYTES, Gap, Record, TopicPartition

_new = tuple.__new__  # half the cost of calling a NamedTuple's class
HEADER_OVERHEAD_BYTES: Final = 128
"""Charged for each header against the bytes of a poll: as an object it takes more than its text."""
_SMALL_BATCH_BYTES: Final = 512 * 1024
_MAGIC_AT: Final = 16
_MAX_GAPS: Final = 100
"""A poll that has found so many takes no more, so that what it reports is bounded."""


class Reading:
    """What one consumer knows of its reading beside aiokafka's positions.

    Args:
        decompressed_bytes: how large the records of a batch may be once decompressed.

    Attributes:
        gaps: what the last poll has passed over.
    """

    def __init__(self, decompressed_bytes: int = DEFAULT_DECOMPRESSED_BYTES) -> None:
        self.decompressed_bytes = decompressed_bytes
        self.gaps: list[Gap] = []
        self._doubted: dict[TopicPartition, int] = {}

    def is_doubted(self, partition: TopicPartition, offset: int) -> bool:
        """Whether the batch at this offset came damaged before. The next time, it is."""
        if self._doubted.pop(partition, None) == offset:
            return True
        self._doubted[partition] = offset
        return False


class DamagedOnTheWay(Exception):
    """A batch whose checksum is wrong for the first time: it has to be fetched again."""


class Unread:
    """What is left of a partition's part of a fetch response.

    Args:
        fetched: of which nothing was taken yet.
        reading: the consumer's.

    Attributes:
        next_fetch_offset: where reading goes on; `FetchResult` looks here.
        is_empty: nothing is left, or what is left has to be fetched again.
    """

    def __init__(self, fetched: PartitionRecords, reading: Reading) -> None:
        self.next_fetch_offset: int = fetched.next_fetch_offset
        self.is_empty = False
        self._fetched = fetched
        # Its own iterator, which is not used here, refers to it and it to that: the response would
        # stay in memory until the garbage collector looks.
        fetched._records_iterator = None
        self._partition = TopicPartition(*fetched._tp)
        self._reading = reading
        self._batch: Any = None
        self._content = memoryview(b"")
        self._records: Iterator[Any] = iter(())

    def take(self, most: int, most_bytes: int) -> tuple[list[Record], int]:
        """Return the next records, within both limits, and roughly how many bytes they are.

        One record may exceed the limit of bytes. Fewer come where no more are left, or where what
        is left has to be fetched again.
        """
        found: list[Record] = []
        size_bytes = 0
        while len(found) < most and size_bytes < most_bytes and self._has_batch():
            size_bytes += self._read(most - len(found), most_bytes - size_bytes, found)
        return found, size_bytes

    def _has_batch(self) -> bool:
        """Return whether there is one to be read; go on to the next one if need be."""
        batches: RecordSet = self._fetched._records
        while self._batch is None and batches.has_next():
            if len(self._reading.gaps) >= _MAX_GAPS:
                return False
            try:
                self._open(batches)
            except DamagedOnTheWay:
                break
            except UnreadableBatch as error:
                self._pass_over(batches, error)
        self.is_empty = self._batch is None
        return not self.is_empty

    def _open(self, batches: RecordSet) -> None:
        """Make the next batch the present one, unless it is not for readers.

        Raises:
            DamagedOnTheWay: its checksum is wrong.
            UnreadableBatch: it was wrong before as well, or the batch cannot be decompressed.
        """
        batch = batches.next_batch()
        if not batch.validate_crc():
            if self._reading.is_doubted(self._partition, self.next_fetch_offset):
                raise UnreadableBatch("expected the checksum of the batch, got another one")
            raise DamagedOnTheWay
        if not self._is_for_readers(batch):
            self.next_fetch_offset = batch.next_offset
            return
        content = batches.content
        try:
            batch, content = plain_batch(batch, content, self._reading.decompressed_bytes)
        except UnreadableBatch as error:
            self._add_gap(batch.next_offset, error)
            return
        # A batch lets itself be iterated once; several slices are taken of a chain.
        self._batch, self._content, self._records = batch, content, chain(batch)
        if len(content) > _SMALL_BATCH_BYTES and content[_MAGIC_AT] >= 2:
            self._records = guarded_records(self._records, content)

    def _is_for_readers(self, batch: Any) -> bool:
        """Neither a marker nor of an aborted transaction; for readers of what is committed."""
        fetched = self._fetched
        if batch.producer_id is not None:
            fetched._consume_aborted_up_to(batch.base_offset)
            if batch.is_control_batch and _is_abort_marker(fetched, batch):
                fetched._aborted_producers.discard(batch.producer_id)
            if batch.is_transactional and batch.producer_id in fetched._aborted_producers:
                return False
        return not batch.is_control_batch

    def _pass_over(self, batches: RecordSet, error: UnreadableBatch) -> None:
        """Go on behind a batch of which not even the head can be trusted.

        The next batch says where it ends. Without one, the head does, if its two numbers of
        records agree. Otherwise reading goes on by one offset: too far would be worse.
        """
        following = batches.following_offset()
        if following is None or following <= self.next_fetch_offset:
            following = _announced_end(batches.content)
        self._add_gap(max(following, self.next_fetch_offset + 1), error)

    def _add_gap(self, end: int, error: UnreadableBatch) -> None:
        """Note that nothing is read from where reading stands up to, and without, `end`."""
        first = self.next_fetch_offset
        if end > first:
            self._reading.gaps.append(Gap(self._partition, first, end, error.code, error.reason))
            self.next_fetch_offset = end

    def _read(self, most: int, most_bytes: int, found: list[Record]) -> int:
        """Move records of the present batch into `found`, and return about how many bytes."""
        topic, partition = self._partition
        size_bytes = len(self._content)
        try:
            records, is_over = self._next_records(most, most_bytes)
        except Exception:  # noqa: BLE001  # whatever the parser in C could not read
            # Begins anew; what was taken of the batch before is left out by its offset.
            self._records = self._careful_records()
            records, is_over = self._next_records(most, most_bytes)
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
        if is_over:
            # Its last records may be gone by compaction: the batch says where the next one begins.
            self.next_fetch_offset = self._batch.next_offset
            self._batch = None
            self._content = memoryview(b"")
        elif records:
            self.next_fetch_offset = records[-1].offset + 1
        return size_bytes if is_over else most_bytes

    def _next_records(self, most: int, most_bytes: int) -> tuple[list[Any], bool]:
        """Return the next records of the present batch, and whether they were its last."""
        # No record of a small batch has to be measured.
        if len(self._content) <= min(most_bytes, _SMALL_BATCH_BYTES):
            records = list(islice(self._records, most))
            return records, len(records) < most
        records = []
        for record in self._records:
            records.append(record)
            most_bytes -= _size_bytes(record)
            if len(records) >= most or most_bytes <= 0:
                return records, False
        return records, True

    def _careful_records(self) -> Iterator[CarefulRecord]:
        """Yield what can be read of the present batch; the rest of it becomes a gap."""
        expected = self.next_fetch_offset
        try:
            for record in careful_records(self._content):
                if record.offset >= expected:
                    expected = record.offset + 1
                    yield record
        except UnreadableBatch as error:
            end = self._batch.next_offset
            if expected < end:
                self._reading.gaps.append(
                    Gap(self._partition, expected, end, error.code, error.reason)
                )


def _is_abort_marker(fetched: PartitionRecords, batch: Any) -> bool:
    try:
        return bool(fetched._contains_abort_marker(batch))
    except Exception:  # noqa: BLE001  # no marker that is known: it aborts nothing
        return False


def _announced_end(content: memoryview) -> int:
    """Where a batch says that it ends; -1 where it says nothing that can be trusted."""
    head = read_head(content)
    if head is None:
        return -1
    is_dense = head.last_offset_delta == head.records - 1
    return head.base_offset + head.records if is_dense else -1


def _size_bytes(record: Any) -> int:
    """What a record is charged with against the bytes of a poll."""
    size = len(record.key or b"") + len(record.value or b"") + 1
    for name, value in record.headers:
        size += len(name) + len(value or b"") + HEADER_OVERHEAD_BYTES
    return size


async def fetched_records(
    fetcher: Fetcher,
    timeout_s: float,
    most: int,
    most_bytes: int = MAX_POLL_BYTES,
    reading: Reading | None = None,
) -> dict[TopicPartition, Sequence[Record]]:
    """Return what has been fetched, or will be within the timeout.

    Raises:
        KafkaError: what a fetch has ended with; see `Fetcher.fetched_records`.
    """
    reading = reading or Reading()
    while True:
        subscriptions = fetcher._subscriptions
        if subscriptions.reassignment_in_progress:
            await subscriptions.wait_for_assignment()
        began_s = time.monotonic()
        found = _drain(fetcher, most, most_bytes, reading)
        if found or reading.gaps or not timeout_s:
            return found
        waiter = fetcher._create_fetch_waiter()
        done, _ = await asyncio.wait([waiter], timeout=timeout_s)
        if not done or fetcher._closed:
            waiter.cancel()
            return {}
        waiter.result()  # raises where we are not authorized
        timeout_s = max(0.0, timeout_s - (time.monotonic() - began_s))


def _drain(
    fetcher: Fetcher, most: int, most_bytes: int, reading: Reading
) -> dict[TopicPartition, Sequence[Record]]:
    """Return what is there. An error that does not come first is left to the next call."""
    found: dict[TopicPartition, Sequence[Record]] = {}
    for partition in list(fetcher._records):
        result = fetcher._records[partition]
        failure = result._error if type(result) is FetchError else None
        if failure is not None and found:
            break
        records, size_bytes, is_over = (
            ([], 0, True)
            if failure is not None
            else _take(result, partition, most, most_bytes, reading)
        )
        if is_over:
            # Let more be fetched of the partition.
            del fetcher._records[partition]
            fetcher._notify(fetcher._wait_consume_future)
        if failure is not None:
            raise failure
        if records:
            found[TopicPartition(*partition)] = records
            most -= len(records)
            most_bytes -= size_bytes
        if not most or most_bytes <= 0:
            break
    return found


def _take(
    result: FetchResult,
    partition: aiokafka.TopicPartition,
    most: int,
    most_bytes: int,
    reading: Reading,
) -> tuple[list[Record], int, bool]:
    """Return records, about how many bytes they are, and whether the result is done with."""
    if not result.check_assignment(partition):
        return [], 0, True
    unread = result._partition_records
    if type(unread) is not Unread:
        unread = result._partition_records = Unread(unread, reading)
    records, size_bytes = unread.take(most, most_bytes)
    result._update_position()
    return records, size_bytes, unread.is_empty
