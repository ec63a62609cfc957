"""Headrace takes the same records of fetched batches as aiokafka, one by one."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, PartitionRecords
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c
from hypothesis import given
from hypothesis import strategies as st

from headrace.log.kafka.fetch_buffer import ReadState, UnreadPart
from headrace.log.kafka.record_batches import RecordSet, UnreadableBatch, decompressed
from headrace.log.port import MAX_POLL_BYTES
from tests.support.raw_records import RawRecord, compressed, encoded_record, framed_batch

PARTITION = TopicPartition("t", 3)
CONTROL = 0x20
ATTRIBUTES_AT = 21
ABORT, COMMIT = struct.pack(">hh", 0, 0), struct.pack(">hh", 0, 1)
CODECS = [0, 0, 1, 3, 4]
"""None, gzip, lz4 and zstd."""


class Batch(NamedTuple):
    """A record batch to be made; of a producer of transactions unless its id is -1."""

    producer: int
    marker: bytes | None
    codec: int
    deltas: list[int]
    spare: int


batches = st.builds(
    Batch,
    st.sampled_from([-1, -1, 7, 8]),
    st.sampled_from([None, None, None, ABORT, COMMIT]),
    st.sampled_from(CODECS),
    st.lists(st.integers(1, 3), min_size=1, max_size=6),
    st.integers(0, 2),
)


def encoded(batch: Batch, base: int) -> tuple[bytes, int]:
    """The bytes of a batch that begins at an offset, and the next offset.

    Its offsets have gaps, as compaction leaves them, also at its end.
    """
    is_marker = batch.marker is not None and batch.producer >= 0
    codec = 0 if is_marker else batch.codec  # brokers compress no markers
    builder = DefaultRecordBatchBuilder(
        2, codec, batch.producer >= 0, batch.producer, 0, 0, 1 << 20
    )
    delta = 0
    if is_marker:
        builder.append(0, 1_000, batch.marker, b"\0" * 6, [])
    else:
        for step in batch.deltas:
            headers = [("name", b"value"), ("none", None)] if step == 1 else []
            builder.append(delta, 1_000 + delta, b"k" if step == 2 else None, b"v", headers)
            delta += step
    content = bytearray(builder.build())
    last = delta + batch.spare
    struct.pack_into(">q", content, 0, base)
    struct.pack_into(">i", content, ATTRIBUTES_AT + 2, last)
    if is_marker:
        content[ATTRIBUTES_AT + 1] |= CONTROL
    struct.pack_into(">I", content, 17, calc_crc32c(bytes(content[ATTRIBUTES_AT:])))
    return bytes(content), base + last + 1


def fetched(content: bytes, aborted: list[tuple[int, int]], offset: int) -> PartitionRecords:
    """Build the result that aiokafka makes of a response."""
    records = RecordSet(content)
    return PartitionRecords(
        PARTITION, records, list(aborted), offset, None, None, True, READ_COMMITTED
    )


def told(record: Any) -> tuple[Any, ...]:
    """Return the fields of a record that tests compare."""
    return (
        record.topic,
        record.partition,
        record.offset,
        record.timestamp,
        record.key,
        record.value,
        list(record.headers),
    )


@given(
    st.lists(batches, max_size=6),
    st.lists(st.tuples(st.sampled_from([7, 8]), st.integers(0, 30)), max_size=4),
    st.integers(0, 12),
    st.integers(1, 9),
    st.sampled_from([1, 20, MAX_POLL_BYTES]),
)
def test_taking_batches_equals_reading_records(
    given_batches: list[Batch],
    aborted: list[tuple[int, int]],
    offset: int,
    most: int,
    most_bytes: int,
) -> None:
    """Transactions, markers, gaps, compression, a fetch from amid a batch; any size of a poll."""
    content, base = b"", 0
    for each in given_batches:
        part, base = encoded(each, base)
        if not content:  # brokers send no batch that lies before the position
            offset = min(offset, base - 1)
        content += part
    by_record = fetched(content, aborted, offset)
    expected = [told(each) for each in by_record]
    state = ReadState()
    unread = UnreadPart(fetched(content, aborted, offset), state)
    found: list[tuple[Any, ...]] = []
    while not unread.is_empty:
        taken, _ = unread.read(most, most_bytes)
        assert len(taken) <= most
        assert not taken or unread.next_fetch_offset > taken[-1].offset
        found += [told(each) for each in taken]

    assert found == expected
    assert not state.gaps
    assert unread.next_fetch_offset == by_record.next_fetch_offset


@given(st.lists(batches, min_size=1, max_size=5), st.data(), st.integers(1, 9))
def test_damaged_batch_is_fetched_again_and_then_skipped(
    given_batches: list[Batch], data: st.DataObject, most: int
) -> None:
    """Nothing else is lost, and the gap ends where the next batch begins."""
    content, base, starts = b"", 0, []
    for each in given_batches:
        starts.append((len(content), base))
        part, base = encoded(each._replace(producer=-1, spare=0), base)
        content += part
    bad, begins = data.draw(st.sampled_from(starts))
    broken = bytearray(content)
    broken[bad + 30] ^= 0xFF  # in the timestamp, which the checksum covers
    expected = [told(each) for each in fetched(content, [], 0)]
    following = next((first for at, first in starts if at > bad), base)
    state = ReadState()

    found = [told(each) for each in taken_of(bytes(broken), 0, state, most)]
    assert not state.gaps
    assert all(each[2] < begins for each in found)
    found += [told(each) for each in taken_of(bytes(broken[bad:]), begins, state, most)]

    assert found == [each for each in expected if not begins <= each[2] < following]
    assert [gap.first for gap in state.gaps] == [begins]
    # Without a batch behind it, a damaged head may say less than the truth, and never more.
    assert state.gaps[0].end == following or (following == base and state.gaps[0].end <= base)


def taken_of(content: bytes, offset: int, state: ReadState, most: int) -> list[Any]:
    """All that one response gives from an offset on."""
    unread = UnreadPart(fetched(content, [], offset), state)
    found: list[Any] = []
    while not unread.is_empty:
        found += unread.read(most, MAX_POLL_BYTES)[0]
    return found


@given(st.sampled_from([1, 2, 3, 4]), st.binary(max_size=400), st.integers(0, 400))
def test_damaged_frame_is_refused_or_stays_within_bound(codec: int, noise: bytes, cut: int) -> None:
    """Any bytes decompress to no more than the bound, or raise the expected error."""
    whole = compressed(codec, noise * 50)
    for content in (noise, whole[:cut] + noise[cut:], whole[: len(whole) - 1]):
        try:
            found = decompressed(codec, memoryview(content), 10_000)
        except UnreadableBatch:
            continue
        assert len(found) <= 10_000


@given(st.sampled_from([0, 1, 2, 3, 4]), st.data())
def test_noise_in_batch_does_not_end_reading(codec: int, data: st.DataObject) -> None:
    """With a right checksum, as a producer of such bytes sends it: records, gaps, and the end."""
    good = encoded_record(RawRecord(b"value", b"key", [(b"n\xff", b"x")]), 0)
    content = bytearray(good + encoded_record(RawRecord(), 1))
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    state = ReadState()

    found = taken_of(framed_batch(compressed(codec, bytes(content)), 2, codec), 0, state, 9)

    covered = [each.offset for each in found]
    for gap in state.gaps:
        covered += range(gap.first, gap.end)
    assert {0, 1} <= set(covered) or not state.gaps
