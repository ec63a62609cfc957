"""Take records out of aiokafka's fetch buffer, a batch at a time.

aiokafka parses record batches in C; what its fetcher then does in Python for each record takes
longer than the parsing. This does the same for a batch at a time. aiokafka's own rules still decide
which batches are read (`aiokafka.consumer.fetcher`, of 0.14, to which the version is pinned): its
`PartitionRecords` tracks aborted transactions, its `FetchResult` checks that the partition is still
read from the offset that was fetched, and the position is aiokafka's.

Two things differ. The result is limited by bytes as well as by number. And a batch that cannot be
read is reported as a `Gap` and skipped. aiokafka raises there, and would raise again at every
start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import chain, dropwhile, islice
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
"""Charged for each header against the bytes of a poll: as an object it is larger than its text."""
_SMALL_BATCH_BYTES: Final = 512 * 1024
_MAGIC_AT: Final = 16
_MAX_GAPS: Final = 100
"""A poll that has found this many gaps returns no more records, so that its report is bounded."""


class Reading:
    """State of one consumer's reading, besides aiokafka's positions.

    Args:
        decompressed_bytes: the limit on the decompressed records of a batch.

    Attributes:
        gaps: the gaps that the last poll skipped.
    """

    def __init__(self, decompressed_bytes: int = DEFAULT_DECOMPRESSED_BYTES) -> None:
        self.decompressed_bytes = decompressed_bytes
        self.gaps: list[Gap] = []
        self._doubted: dict[TopicPartition, int] = {}

    def is_doubted(self, partition: TopicPartition, offset: int) -> bool:
        """Return whether the batch at this offset was damaged before, or note that it is now."""
        if self._doubted.pop(partition, None) == offset:
            return True
        self._doubted[partition] = offset
        return False


class DamagedOnTheWay(Exception):
    """A batch whose checksum is wrong for the first time: it must be fetched again."""


class Unread:
    """The unread rest of one partition's part of a fetch response.

    Args:
        fetched: the part, of which nothing has been read yet.
        reading: the consumer's state.

    Attributes:
        next_fetch_offset: the next offset to read; `FetchResult` reads it.
        is_empty: True if nothing is left, or the rest has to be fetched again.
    """

    def __init__(self, fetched: PartitionRecords, reading: Reading) -> None:
        self.next_fetch_offset: int = fetched.next_fetch_offset
        self.is_empty = False
        self._fetched = fetched
        # Break the reference cycle with its own iterator, which is not used here: it would keep the
        # response in memory until the garbage collector runs.
        fetched._records_iterator = None
        self._partition = TopicPartition(*fetched._tp)
        self._reading = reading
        self._batch: Any = None
        self._content = memoryview(b"")
        self._records: Iterator[Any] = iter(())

    def take(self, most: int, most_bytes: int) -> tuple[list[Record], int]:
        """Return the next records, within both limits, and their approximate size in bytes.

        The last record may exceed the limit of bytes. Fewer records are returned if no more are
        left, or if the rest has to be fetched again.
        """
        found: list[Record] = []
        size_bytes = 0
        while len(found) < most and size_bytes < most_bytes and self._has_batch():
            size_bytes += self._read(most - len(found), most_bytes - size_bytes, found)
        return found, size_bytes

    def _has_batch(self) -> bool:
        """Return whether there is a batch to read; open the next one if needed."""
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
        """Make the next batch the current one, unless it is not visible to readers.

        Raises:
            DamagedOnTheWay: its checksum is wrong.
            UnreadableBatch: the checksum was wrong before as well, or the batch cannot be
                decompressed.
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
        # A batch can be iterated only once; a chain allows several slices.
        self._batch, self._content, self._records = batch, content, chain(batch)
        if len(content) > _SMALL_BATCH_BYTES and content[_MAGIC_AT] >= 2:
            self._records = guarded_records(self._records, content)
        if batch.base_offset < self.next_fetch_offset:
            # A batch arrives whole, even if it was fetched from its middle. The records before are
            # passed over here, outside the limits of a poll: a poll that returned none of the
            # others could be followed by a seek, and the next one would begin here again.
            self._records = dropwhile(self._is_passed, self._records)

    def _is_passed(self, record: Any) -> bool:
        return bool(record.offset < self.next_fetch_offset)

    def _is_for_readers(self, batch: Any) -> bool:
        """Return whether the batch is neither a marker nor part of an aborted transaction."""
        fetched = self._fetched
        if batch.producer_id is not None:
            fetched._consume_aborted_up_to(batch.base_offset)
            if batch.is_control_batch and _is_abort_marker(fetched, batch):
                fetched._aborted_producers.discard(batch.producer_id)
            if batch.is_transactional and batch.producer_id in fetched._aborted_producers:
                return False
        return not batch.is_control_batch

    def _pass_over(self, batches: RecordSet, error: UnreadableBatch) -> None:
        """Skip a batch of which not even the header can be trusted.

        The next batch's base offset tells where it ends. Without a next batch its own header does,
        if its two record counts agree. Otherwise reading advances by one offset: skipping too far
        would be worse.
        """
        following = batches.following_offset()
        if following is None or following <= self.next_fetch_offset:
            following = _announced_end(batches.content)
        self._add_gap(max(following, self.next_fetch_offset + 1), error)

    def _add_gap(self, end: int, error: UnreadableBatch) -> None:
        """Report offsets from the current position up to `end` (exclusive) as unreadable."""
        first = self.next_fetch_offset
        if end > first:
            self._reading.gaps.append(Gap(self._partition, first, end, error.code, error.reason))
            self.next_fetch_offset = end

    def _read(self, most: int, most_bytes: int, found: list[Record]) -> int:
        """Move records of the current batch into `found`; return their approximate bytes."""
        topic, partition = self._partition
        size_bytes = len(self._content)
        try:
            records, is_over = self._next_records(most, most_bytes)
        except Exception:  # noqa: BLE001  # whatever the parser in C could not read
            # Start over, behind the records that were already taken from the batch.
            self._records = self._careful_records()
            records, is_over = self._next_records(most, most_bytes)
        found += [
            _new(
                Record,
                (topic, partition, r.offset, r.timestamp, r.key, r.value, r.headers or ()),
            )
            for r in records
        ]
        if is_over:
            # Compaction may have removed its last records: the batch says where the next one
            # begins.
            self.next_fetch_offset = self._batch.next_offset
            self._batch = None
            self._content = memoryview(b"")
        elif records:
            self.next_fetch_offset = records[-1].offset + 1
        return size_bytes if is_over else most_bytes

    def _next_records(self, most: int, most_bytes: int) -> tuple[list[Any], bool]:
        """Return the next records of the current batch, and whether they are its last."""
        # The records of a small batch need not be measured.
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
        """Yield the readable records of the current batch; report the rest as a gap."""
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
    """Return the end offset that a batch's header announces; -1 if it cannot be trusted."""
    head = read_head(content)
    if head is None:
        return -1
    is_dense = head.last_offset_delta == head.records - 1
    return head.base_offset + head.records if is_dense else -1


def _size_bytes(record: Any) -> int:
    """Return the bytes that a record is charged against the limit of a poll."""
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
    """Return the records fetched already, or else within the timeout.

    Raises:
        KafkaError: the error with which a fetch ended; see `Fetcher.fetched_records`.
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
        waiter.result()  # raises if we are not authorized
        timeout_s = max(0.0, timeout_s - (time.monotonic() - began_s))


def _drain(
    fetcher: Fetcher, most: int, most_bytes: int, reading: Reading
) -> dict[TopicPartition, Sequence[Record]]:
    """Return the buffered records. An error that is not first is left to the next call."""
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
            # Allow the next fetch of the partition.
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
    """Return records, their approximate size in bytes, and whether the result is used up."""
    if not result.check_assignment(partition):
        return [], 0, True
    unread = result._partition_records
    if type(unread) is not Unread:
        unread = result._partition_records = Unread(unread, reading)
    records, size_bytes = unread.take(most, most_bytes)
    result._update_position()
    return records, size_bytes, unread.is_empty
