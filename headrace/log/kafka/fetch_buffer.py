"""Take records out of aiokafka's fetch buffer, a batch at a time.

aiokafka parses record batches in C; what its fetcher then does in Python for each record takes
longer than the parsing. This does the same for a batch at a time. aiokafka's own rules still decide
which batches are read: its
`PartitionRecords` tracks aborted transactions, its `FetchResult` checks that the partition is still
read from the offset that was fetched, and the position is aiokafka's.

Two things differ. The result is limited by bytes as well as by number. And a batch that cannot be
read is reported as a `Gap` and skipped. aiokafka raises there, and would raise again at every
start.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import dropwhile, islice
from typing import Any, Final

import aiokafka
from aiokafka.consumer.fetcher import FetchResult, PartitionRecords
from aiokafka.errors import OffsetOutOfRangeError

from headrace.log.kafka._aiokafka import (
    FetchBuffer,
    fetch_error,
    fetched_batches,
    fetched_part,
    is_visible,
    partition_of,
    replace_fetched_part,
    update_position,
)
from headrace.log.kafka.record_batches import (
    DEFAULT_DECOMPRESSED_BYTES,
    ParsedRecord,
    RecordSet,
    UnreadableBatch,
    has_offsets,
    is_dense,
    is_intact,
    parse_records,
    plain_batch,
    read_header,
    records_of,
)
from headrace.log.port import Gap, Record, TopicPartition
from headrace.tuning import TUNING, KafkaTuning

_new = tuple.__new__  # half the cost of calling a NamedTuple's class
_MAGIC_AT: Final = 16


class ReadState:
    """State of one consumer's reading, besides aiokafka's positions.

    Args:
        decompressed_bytes: the limit on the decompressed records of a batch.
        tuning: the bounds of a poll.
        reads_followers: whether fetches may go to followers (KIP-392).

    Attributes:
        gaps: the gaps that the last poll skipped.
        is_fetch_due: True if the next poll has to send the next fetch.
    """

    def __init__(
        self,
        decompressed_bytes: int = DEFAULT_DECOMPRESSED_BYTES,
        tuning: KafkaTuning = TUNING.kafka,
        *,
        reads_followers: bool = False,
    ) -> None:
        self._reads_followers = reads_followers
        self._out_of_range: dict[TopicPartition, int] = {}
        self.decompressed_bytes = decompressed_bytes
        self.tuning = tuning
        self.gaps: list[Gap] = []
        self.is_fetch_due = False
        self._damaged: dict[TopicPartition, int] = {}

    def is_damaged_again(self, partition: TopicPartition, offset: int) -> bool:
        """Return whether the batch at this offset was damaged before, or note that it is now."""
        if self._damaged.pop(partition, None) == offset:
            return True
        self._damaged[partition] = offset
        return False

    def is_to_be_asked_of_leader(self, failure: Exception) -> bool:
        """Return whether an offset that is out of range may be so on a follower only.

        After the first such error aiokafka asks the leader, whose answer counts.
        """
        if not self._reads_followers or not isinstance(failure, OffsetOutOfRangeError):
            return False
        positions = {TopicPartition(*each): at for each, at in failure.args[0].items()}
        if all(self._out_of_range.pop(each, None) == at for each, at in positions.items()):
            return False
        self._out_of_range.update(positions)
        return True


class ChecksumError(Exception):
    """A batch whose checksum is wrong for the first time: it must be fetched again."""


class UnreadPart:
    """The unread rest of one partition's part of a fetch response.

    Args:
        fetched: the part, of which nothing has been read yet.
        state: the consumer's state.

    Attributes:
        next_fetch_offset: the next offset to read; `FetchResult` reads it.
        is_empty: True if nothing is left, or the rest has to be fetched again.
    """

    def __init__(self, fetched: PartitionRecords, state: ReadState) -> None:
        self.next_fetch_offset: int = fetched.next_fetch_offset
        self.is_empty = False
        self._fetched = fetched
        self._batches: RecordSet = fetched_batches(fetched)
        self._partition = partition_of(fetched)
        self._state = state
        self._unmeasured_batch_bytes = state.tuning.unmeasured_batch_bytes
        self._batch: Any = None
        self._content = memoryview(b"")
        self._records: Iterator[Any] = iter(())
        self._is_dense = False

    def read(self, most: int, most_bytes: int) -> tuple[list[Record], int]:
        """Return the next records, within both limits, and their approximate size in bytes.

        The last record may exceed the limit of bytes. Fewer records are returned if no more are
        left, or if the rest has to be fetched again.
        """
        found: list[Record] = []
        size_bytes = 0
        while len(found) < most and size_bytes < most_bytes and self._has_batch():
            size_bytes += self._read_batch(most - len(found), most_bytes - size_bytes, found)
        return found, size_bytes

    def _has_batch(self) -> bool:
        """Return whether there is a batch to read; open the next one if needed."""
        batches = self._batches
        while self._batch is None and batches.has_next():
            if len(self._state.gaps) >= self._state.tuning.max_gaps_per_poll:
                return False
            try:
                self._open(batches)
            except ChecksumError:
                break
            except UnreadableBatch as error:
                self._skip_batch(batches, error)
        self.is_empty = self._batch is None
        return not self.is_empty

    def _open(self, batches: RecordSet) -> None:
        """Make the next batch the current one, unless it is not visible to readers.

        Raises:
            ChecksumError: its checksum is wrong.
            UnreadableBatch: the checksum was wrong before as well, or the batch cannot be
                decompressed.
        """
        batch = batches.next_batch()
        if not is_intact(batch, batches.content):
            if self._state.is_damaged_again(self._partition, self.next_fetch_offset):
                raise UnreadableBatch("expected the checksum of the batch, got another one")
            raise ChecksumError
        content = batches.content
        if content[_MAGIC_AT] >= 2:
            self._check_place(batch, batches.following_offset())
        if not is_visible(self._fetched, batch):
            self._advance(batch)
            return
        try:
            batch, content = plain_batch(batch, content, self._state.decompressed_bytes)
        except UnreadableBatch as error:
            self._add_gap(batch.next_offset, error)
            return
        self._batch, self._content = batch, content
        self._is_dense = content[_MAGIC_AT] >= 2 and is_dense(batch, content)
        self._records = records_of(batch, content, self._unmeasured_batch_bytes)
        # Messages of formats 0 and 1 do not say where they begin, only where they end.
        if content[_MAGIC_AT] < 2 or batch.base_offset < self.next_fetch_offset:
            # A batch arrives whole, even if it was fetched from its middle. The records before are
            # passed over here, outside the limits of a poll: a poll that returned none of the
            # others could be followed by a seek, and the next one would begin here again.
            self._records = dropwhile(self._is_passed, self._records)

    def _check_place(self, batch: Any, following: int | None) -> None:
        """Raise UnreadableBatch if a batch does not lie between the position and the next batch.

        The offset of a batch is outside its checksum. A damaged one would let the next batches be
        passed over as read already, and be committed.
        """
        if following is None or following <= self.next_fetch_offset:
            return
        if not self.next_fetch_offset < batch.next_offset <= following:
            raise UnreadableBatch(
                f"expected a batch of offsets between {self.next_fetch_offset} and {following - 1},"
                f" got {batch.base_offset} to {batch.next_offset - 1}"
            )

    def _advance(self, batch: Any) -> None:
        """Move the position behind a batch, unless all of the batch lies before it."""
        self.next_fetch_offset = max(batch.next_offset, self.next_fetch_offset)

    def _is_passed(self, record: Any) -> bool:
        return bool(record.offset < self.next_fetch_offset)

    def _skip_batch(self, batches: RecordSet, error: UnreadableBatch) -> None:
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
            self._state.gaps.append(Gap(self._partition, first, end, error.code, error.reason))
            self.next_fetch_offset = end

    def _read_batch(self, most: int, most_bytes: int, found: list[Record]) -> int:
        """Move records of the current batch into `found`; return their approximate bytes."""
        topic, partition = self._partition
        size_bytes = len(self._content)
        try:
            records, is_over = self._next_records(most, most_bytes)
            self._check_offsets(records)
        except Exception:  # noqa: BLE001  # whatever the parser in C could not read
            # Start over, behind the records that were already taken from the batch.
            self._records = self._reparse()
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
            # begins. A message of format 0 or 1 may lie before the position altogether.
            self._advance(self._batch)
            self._batch = None
            self._content = memoryview(b"")
        elif records:
            self.next_fetch_offset = records[-1].offset + 1
        return size_bytes if is_over else most_bytes

    def _check_offsets(self, records: list[Any]) -> None:
        """Raise UnreadableBatch if an offset is not the record's own; older formats have no ends.

        A false one would be committed: the records before it would be lost at the next start.
        """
        batch = self._batch
        if self._content[_MAGIC_AT] < 2:
            return
        # Compaction may have removed the batches before this one.
        first = max(self.next_fetch_offset, batch.base_offset)
        if not has_offsets(records, first, batch.next_offset, is_dense=self._is_dense):
            raise UnreadableBatch("expected the offsets of the batch, got others")

    def _next_records(self, most: int, most_bytes: int) -> tuple[list[Any], bool]:
        """Return the next records of the current batch, and whether they are its last."""
        # The records of a small batch need not be measured.
        if len(self._content) <= min(most_bytes, self._unmeasured_batch_bytes):
            records = list(islice(self._records, most))
            return records, len(records) < most
        records, header_bytes = [], self._state.tuning.header_overhead_bytes
        for record in self._records:
            records.append(record)
            most_bytes -= _size_bytes(record, header_bytes)
            if len(records) >= most or most_bytes <= 0:
                return records, False
        return records, True

    def _reparse(self) -> Iterator[ParsedRecord]:
        """Yield the readable records of the current batch; report the rest as a gap."""
        expected = self.next_fetch_offset
        try:
            for record in parse_records(self._content):
                if record.offset >= expected:
                    expected = record.offset + 1
                    yield record
        except UnreadableBatch as error:
            end = self._batch.next_offset
            if expected < end:
                self._state.gaps.append(
                    Gap(self._partition, expected, end, error.code, error.reason)
                )


def _announced_end(content: memoryview) -> int:
    """Return the end offset that a batch's header announces; -1 if it cannot be trusted."""
    header = read_header(content)
    if header is None:
        return -1
    is_dense = header.last_offset_delta == header.records - 1
    return header.base_offset + header.records if is_dense else -1


def _size_bytes(record: Any, header_overhead_bytes: int) -> int:
    """Return the bytes that a record is charged against the limit of a poll."""
    size = len(record.key or b"") + len(record.value or b"") + 1
    for name, value in record.headers:
        size += len(name) + len(value or b"") + header_overhead_bytes
    return size


async def take_records(
    buffer: FetchBuffer,
    timeout_s: float,
    most: int,
    most_bytes: int,
    state: ReadState,
) -> dict[TopicPartition, Sequence[Record]]:
    """Return the records fetched already, or else within the timeout.

    With few records, the next fetch is sent by the next call. To encode and send it takes about as
    long as to answer a request, which would wait for it (docs/decisions/0020).

    Raises:
        KafkaError: the error with which a fetch ended.
    """
    _send_due_fetch(buffer, state)
    while True:
        await buffer.wait_for_assignment()
        began_s = time.monotonic()
        found = _drain(buffer, most, most_bytes, state)
        if found or state.gaps or not timeout_s:
            return found
        _send_due_fetch(buffer, state)
        if not await buffer.wait_for_records(timeout_s):
            return {}
        timeout_s = max(0.0, timeout_s - (time.monotonic() - began_s))


def _send_due_fetch(buffer: FetchBuffer, state: ReadState) -> None:
    if state.is_fetch_due:
        state.is_fetch_due = False
        buffer.fetch_again()


def _drain(
    buffer: FetchBuffer, most: int, most_bytes: int, state: ReadState
) -> dict[TopicPartition, Sequence[Record]]:
    """Return the buffered records. An error behind records or gaps is left to the next call."""
    found: dict[TopicPartition, Sequence[Record]] = {}
    for partition, result in buffer.results():
        failure = fetch_error(result)
        if failure is not None:
            if found or state.gaps:
                break
            buffer.drop_result(partition)
            buffer.fetch_again()
            if state.is_to_be_asked_of_leader(failure):
                continue
            raise failure
        records, size_bytes, is_over = _read_result(result, partition, most, most_bytes, state)
        if is_over:
            buffer.drop_result(partition)
            state.is_fetch_due = True
        if records:
            found[TopicPartition(*partition)] = records
            most -= len(records)
            most_bytes -= size_bytes
        if not most or most_bytes <= 0:
            break
    if sum(map(len, found.values())) > state.tuning.few_records:
        _send_due_fetch(buffer, state)
    return found


def _read_result(
    result: FetchResult,
    partition: aiokafka.TopicPartition,
    most: int,
    most_bytes: int,
    state: ReadState,
) -> tuple[list[Record], int, bool]:
    """Return records, their approximate size in bytes, and whether the result is used up."""
    if not result.check_assignment(partition):
        return [], 0, True
    unread = fetched_part(result)
    if type(unread) is not UnreadPart:
        unread = UnreadPart(unread, state)
        replace_fetched_part(result, unread)
    records, size_bytes = unread.read(most, most_bytes)
    update_position(result)
    return records, size_bytes, unread.is_empty
