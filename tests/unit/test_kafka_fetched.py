"""Records of fetch results: an error or an outdated result loses none of the others."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, FetchError, FetchResult, PartitionRecords
from aiokafka.errors import OffsetOutOfRangeError
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder

from headrace.errors import Code
from headrace.log.kafka._aiokafka import FetchBuffer
from headrace.log.kafka.fetch_buffer import ReadState, take_records
from headrace.log.kafka.record_batches import RecordSet
from headrace.log.port import MAX_POLL_BYTES, Gap, Record
from headrace.tuning import TUNING
from tests.support.raw_records import (
    CODECS,
    GZIP,
    LZ4,
    SNAPPY,
    ZSTD,
    RawRecord,
    bomb,
    checked,
    compressed,
    framed_batch,
    raw_batch,
)

ONE, TWO = TopicPartition("t", 0), TopicPartition("t", 1)


def batch(first: int, count: int) -> bytes:
    """A record batch with these offsets."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1 << 20)
    for delta in range(count):
        builder.append(delta, 1_000, None, b"v", [])
    content = builder.build()
    content[:8] = first.to_bytes(8, "big")
    return bytes(content)


class State:
    """The position of a partition."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.paused = False

    def consumed_to(self, position: int) -> None:
        self.position = position


class Fetcher:
    """The part of aiokafka's fetcher that the adapter uses."""

    def __init__(self, *, position: int = 0, **fetched: bytes | Exception) -> None:
        self.states = {ONE: State(position), TWO: State(position)}
        self.notified = 0
        self._closed = False
        self._wait_consume_future = None
        self._prefetch_backoff = 60.0
        self._in_flight: set[int] = set()
        self.next_requests: list[str] = []
        self.sent: list[str] = []
        self._fetch_waiters: set[asyncio.Future[None]] = set()
        self.is_found = True
        self._subscriptions = SimpleNamespace(reassignment_in_progress=False)
        self._records: OrderedDict[TopicPartition, Any] = OrderedDict()
        assignment = SimpleNamespace(active=True, state_value=self.states.get)
        for partition, found in zip((ONE, TWO), fetched.values(), strict=False):
            if isinstance(found, Exception):
                self._records[partition] = FetchError(error=found, backoff=0)
                continue
            records = PartitionRecords(
                partition, RecordSet(found), None, position, None, None, True, READ_COMMITTED
            )
            self._records[partition] = FetchResult(
                partition, assignment=assignment, partition_records=records, backoff=0
            )

    @property
    def has_unread(self) -> bool:
        """Whether there are results that no poll has returned whole."""
        return bool(self._records)

    def unread(self, partition: TopicPartition) -> Any:
        """Return the records of a result."""
        return self._records[partition]._partition_records

    def _notify(self, waiting: asyncio.Future[None] | None) -> None:
        self.notified += 1
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _create_fetch_waiter(self) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fetch_waiters.add(waiter)
        return waiter

    async def _proc_fetch_request(self, _assignment: object, _node: int, request: str) -> bool:
        """Return whether something was fetched, or failed."""
        self.sent.append(request)
        return self.is_found

    def _get_actions_per_node(self, _assignment: object) -> tuple[Any, ...]:
        """Find the next request for the broker, unless one is in flight."""
        due, self.next_requests = self.next_requests[:1], self.next_requests[1:]
        return [(1, each) for each in due if not self._in_flight], {}, 0, False, []

    def begin_fetch(self) -> asyncio.Task[bool]:
        """Begin a fetch, as aiokafka's fetcher does."""
        self._in_flight.add(1)
        assignment = SimpleNamespace(active=True)
        return asyncio.create_task(self._proc_fetch_request(assignment, 1, "first"))


def buffer_of(fetcher: Fetcher) -> FetchBuffer:
    """The buffer of a consumer with this fetcher."""
    return FetchBuffer(SimpleNamespace(_fetcher=fetcher))


async def take(fetcher: Fetcher, most: int = 100) -> dict[TopicPartition, list[int]]:
    """The offsets that are returned."""
    found = await take_records(buffer_of(fetcher), 0, most, MAX_POLL_BYTES, ReadState())
    return {partition: [one.offset for one in records] for partition, records in found.items()}


async def test_poll_leaves_error_behind_records_for_next_poll() -> None:
    """The records of the other partition are returned first; they would be lost with a raise."""
    fetcher = Fetcher(one=batch(0, 2), two=OffsetOutOfRangeError({TWO: 5}))

    assert await take(fetcher) == {ONE: [0, 1]}
    with pytest.raises(OffsetOutOfRangeError):
        await take(fetcher)
    assert await take(fetcher) == {}


async def test_poll_leaves_error_behind_gap_for_next_poll() -> None:
    """The position is behind the gap already: only this poll can report it."""
    fetcher = Fetcher(one=bomb(GZIP, 2_000_000), two=OffsetOutOfRangeError({TWO: 5}))
    state = ReadState(1_000_000)

    assert await take_records(buffer_of(fetcher), 0, 100, MAX_POLL_BYTES, state) == {}
    assert [gap.partition for gap in state.gaps] == [ONE]
    state.gaps = []
    with pytest.raises(OffsetOutOfRangeError):
        await take_records(buffer_of(fetcher), 0, 100, MAX_POLL_BYTES, state)


async def test_offset_that_follower_lacks_is_asked_of_leader() -> None:
    """A follower may be behind; only the leader's answer says that the log does not hold it."""
    state = ReadState(reads_followers=True)
    lacking = OffsetOutOfRangeError({ONE: 5})
    fetcher = Fetcher(position=5, one=lacking)

    assert await take_records(buffer_of(fetcher), 0, 100, MAX_POLL_BYTES, state) == {}

    assert (fetcher.has_unread, fetcher.notified) == (False, 1)
    again = Fetcher(position=5, one=lacking)
    with pytest.raises(OffsetOutOfRangeError):
        await take_records(buffer_of(again), 0, 100, MAX_POLL_BYTES, state)


async def test_poll_bound_covers_all_partitions() -> None:
    """The rest comes with the next poll."""
    fetcher = Fetcher(one=batch(0, 3), two=batch(0, 3))

    assert await take(fetcher, 4) == {ONE: [0, 1, 2], TWO: [0]}
    assert await take(fetcher, 4) == {TWO: [1, 2]}


FEW = TUNING.kafka.few_records


@pytest.mark.parametrize(("count", "sent"), [(FEW, 0), (FEW + 1, 1)], ids=["few", "many"])
async def test_poll_sends_next_fetch_at_once_only_after_many_records(count: int, sent: int) -> None:
    """The caller answers few records sooner than a fetch is encoded and sent."""
    fetcher = Fetcher(one=batch(0, count))
    await take_records(buffer_of(fetcher), 0, 100, MAX_POLL_BYTES, ReadState())

    assert fetcher.notified == sent


@pytest.mark.parametrize("timeout_s", [0, 0.01])
async def test_poll_after_few_records_sends_next_fetch(timeout_s: float) -> None:
    """A poll that does not wait for the fetch sends it too."""
    fetcher, state = Fetcher(one=batch(0, 1)), ReadState()
    buffer = buffer_of(fetcher)
    await take_records(buffer, timeout_s, 100, MAX_POLL_BYTES, state)
    await take_records(buffer, timeout_s, 100, MAX_POLL_BYTES, state)

    assert fetcher.notified == 1


async def test_fetch_with_records_lasts_until_next_is_due() -> None:
    """Aiokafka's fetcher has nothing to do before; those who wait for records are woken at once."""
    fetcher = Fetcher()
    buffer = buffer_of(fetcher)
    waiting = asyncio.create_task(buffer.wait_for_records(60.0))
    await asyncio.sleep(0)
    fetch = fetcher.begin_fetch()

    assert await waiting
    assert not fetch.done()
    buffer.fetch_again()
    assert await fetch is False  # there is nobody whom aiokafka's fetcher would have to wake


async def test_next_fetch_is_sent_without_aiokafkas_fetcher() -> None:
    """It has to look for fetches only when none follows the last one from the same broker."""
    fetcher = Fetcher()
    fetcher.next_requests = ["second"]
    fetcher._prefetch_backoff = 0.001
    buffer_of(fetcher)
    await fetcher.begin_fetch()

    assert fetcher.sent == ["first", "second"]


async def test_fetch_without_records_ends_at_once() -> None:
    """The next one has to be sent."""
    fetcher = Fetcher()
    fetcher.is_found = False
    buffer_of(fetcher)

    assert await fetcher.begin_fetch() is False


async def test_fetch_whose_records_nobody_reads_ends_after_pause_of_aiokafka() -> None:
    """Other partitions of the broker do not wait for a reader that is slow, or paused."""
    fetcher = Fetcher()
    fetcher._prefetch_backoff = 0.001
    buffer_of(fetcher)

    assert await fetcher.begin_fetch() is False


async def test_cancelled_fetch_ends_without_error() -> None:
    """Aiokafka's fetcher cancels its fetches at a rebalance, and would end with their error."""
    fetcher = Fetcher()
    buffer_of(fetcher)
    fetch = fetcher.begin_fetch()
    await asyncio.sleep(0)
    fetch.cancel()

    assert await fetch is False


async def test_outdated_result_is_fetched_again_in_same_poll() -> None:
    """No record was returned, so that no other poll need follow."""
    fetcher = Fetcher(one=batch(0, 3))
    fetcher.states[ONE].position = 7
    await take_records(buffer_of(fetcher), 0.01, 100, MAX_POLL_BYTES, ReadState())

    assert fetcher.notified == 1


@pytest.mark.parametrize("change", ["paused", "position"])
async def test_outdated_fetch_result_is_dropped(change: str) -> None:
    """A pause or seek since the fetch, or during it, makes the result outdated."""
    fetcher = Fetcher(one=batch(0, 3))
    assert await take(fetcher, 1) == {ONE: [0]}
    setattr(fetcher.states[ONE], change, 7)

    assert await take(fetcher) == {}
    assert not fetcher.has_unread


@pytest.mark.parametrize("content", [None, b""])
def test_part_without_records_is_empty(content: bytes | None) -> None:
    """Kafka sends no bytes; other brokers may send null, which Kafka's own client takes as well."""
    records = RecordSet(content)
    assert (records.has_next(), records.size_in_bytes()) == (False, 0)


async def test_poll_ends_with_its_timeout() -> None:
    """A poll waits no longer than that for something to be fetched."""
    assert await take_records(buffer_of(Fetcher()), 0.01, 1, MAX_POLL_BYTES, ReadState()) == {}


async def test_read_fetch_response_is_freed() -> None:
    """It does not wait for the garbage collector, which seldom looks where requests are served."""
    fetcher = Fetcher(one=batch(0, 2))
    response = weakref.ref(fetcher.unread(ONE))
    gc.disable()
    try:
        assert await take(fetcher) == {ONE: [0, 1]}
        assert response() is None
    finally:
        gc.enable()


# --- what cannot be read ------------------------------------------------------------------------


async def read_all(fetcher: Fetcher, state: ReadState) -> tuple[list[Record], list[Gap]]:
    """Return all records and skipped ranges that polls give until nothing is left."""
    found: list[Record] = []
    gaps: list[Gap] = []
    while fetcher.has_unread:
        state.gaps = []
        for records in (
            await take_records(buffer_of(fetcher), 0, 100, MAX_POLL_BYTES, state)
        ).values():
            found += records
        gaps += state.gaps
    return found, gaps


def places(gaps: list[Gap]) -> list[tuple[int, int, str]]:
    """Return the skipped ranges and their reasons."""
    return [(gap.first, gap.end, gap.code) for gap in gaps]


@pytest.mark.parametrize("codec", [0, GZIP, SNAPPY, LZ4, ZSTD])
async def test_non_utf8_header_name_is_read_without_loss(codec: int) -> None:
    """Its bytes come back with `surrogateescape`; the records beside it are as they were."""
    records = [
        RawRecord(b"1", b"k", [(b"good", b"x")]),
        RawRecord(b"2", None, [(b"caf\xe9", b"y"), (b"none", None)]),
        RawRecord(None, b"k"),
    ]
    state = ReadState()

    found, gaps = await read_all(Fetcher(one=raw_batch(records, codec=codec)), state)

    assert [(r.offset, r.key, r.value) for r in found] == [
        (0, b"k", b"1"),
        (1, None, b"2"),
        (2, b"k", None),
    ]
    assert list(found[1].headers) == [("caf\udce9", b"y"), ("none", None)]
    assert "caf\udce9".encode("utf-8", "surrogateescape") == b"caf\xe9"
    assert not gaps


async def test_non_utf8_header_name_in_rest_of_batch_repeats_no_record() -> None:
    """A batch is taken in parts; the careful parser goes on behind the last one."""
    records = [RawRecord(b"%d" % number) for number in range(6)]
    records.append(RawRecord(b"6", None, [(b"\xff", b"")]))
    fetcher, state = Fetcher(one=raw_batch(records)), ReadState()
    found: list[int] = []
    while fetcher.has_unread:
        for taken in (await take_records(buffer_of(fetcher), 0, 4, MAX_POLL_BYTES, state)).values():
            found += [each.offset for each in taken]

    assert found == list(range(7))


async def test_damaged_batch_is_fetched_again_before_it_is_passed_over() -> None:
    """First the records before it, of all partitions; the position stays at the batch."""
    broken = bytearray(batch(2, 2))
    broken[30] ^= 0xFF
    state = ReadState()
    fetcher = Fetcher(one=batch(0, 1), two=batch(0, 2) + bytes(broken))
    found, gaps = await read_all(fetcher, state)
    assert [each.offset for each in found] == [0, 0, 1]
    assert not gaps
    assert fetcher.states[TWO].position == 2

    again = Fetcher(one=batch(0, 1), two=bytes(broken) + batch(4, 1))
    again.states[TWO].position = 2
    again.unread(TWO).next_fetch_offset = 2
    found, gaps = await read_all(again, state)

    assert [each.offset for each in found] == [0, 4]
    assert places(gaps) == [(2, 4, Code.INVALID_REQUEST)]


@pytest.mark.parametrize("name", CODECS)
async def test_batch_over_bound_is_skipped_as_too_large(name: str) -> None:
    """Batches before and behind it are read."""
    bad = bytearray(bomb(CODECS[name], 3_000_000, 3))
    bad[:8] = (1).to_bytes(8, "big")
    content = batch(0, 1) + bytes(bad) + batch(4, 1)

    found, gaps = await read_all(Fetcher(one=content), ReadState(1_000_000))

    assert [each.offset for each in found] == [0, 4]
    assert places(gaps) == [(1, 4, Code.TOO_LARGE)]
    assert "1000000" in gaps[0].reason


@pytest.mark.parametrize("name", CODECS)
async def test_highly_compressed_batch_within_bound_is_read(name: str) -> None:
    """The bound is for what comes of it, and not for the ratio."""
    found, gaps = await read_all(Fetcher(one=bomb(CODECS[name], 900_000, 3)), ReadState(1_000_000))

    assert [len(each.value or b"") for each in found] == [300_000] * 3
    assert not gaps


@pytest.mark.parametrize("codec", [5, 6, 7])
async def test_batch_of_unknown_compression_is_passed_over(codec: int) -> None:
    """It names what it got."""
    content = framed_batch(b"whatever", 3, codec) + batch(3, 1)

    found, gaps = await read_all(Fetcher(one=content), ReadState())

    assert [each.offset for each in found] == [3]
    assert places(gaps) == [(0, 3, Code.INVALID_REQUEST)]
    assert f"got {codec}" in gaps[0].reason


async def test_batch_of_unknown_format_is_passed_over() -> None:
    """Reading continues with the next batch."""
    unknown = bytearray(batch(0, 3))
    unknown[16] = 3

    found, gaps = await read_all(Fetcher(one=bytes(unknown) + batch(3, 1)), ReadState())

    assert [each.offset for each in found] == [3]
    assert places(gaps) == [(0, 3, Code.INVALID_REQUEST)]


async def test_records_before_damaged_record_are_read() -> None:
    """The rest of the batch is skipped, since nothing tells where its next record begins."""
    good = raw_batch([RawRecord(b"1"), RawRecord(b"2"), RawRecord(b"3")])
    damaged = bytearray(good)
    damaged[good.index(b"2") - 1] = 0x7F  # the length of the second value

    content = checked(bytes(damaged)) + batch(3, 1)
    found, gaps = await read_all(Fetcher(one=content), ReadState())

    assert [each.offset for each in found] == [0, 3]
    assert places(gaps) == [(1, 3, Code.INVALID_REQUEST)]


@pytest.mark.parametrize("false", [1_000, 0, -5, 3])
@pytest.mark.parametrize("most", [1, 100])
async def test_record_with_false_offset_is_passed_over_with_rest_of_batch(
    false: int, most: int
) -> None:
    """Its offset would be committed: what it skips would be lost, what it repeats be read again."""
    content = raw_batch([RawRecord()] * 3, base=4, deltas=[0, false, 2]) + batch(7, 1)
    fetcher, state = Fetcher(one=content), ReadState()
    found: list[int] = []
    while fetcher.has_unread:
        taken = await take_records(buffer_of(fetcher), 0, most, MAX_POLL_BYTES, state)
        found += [each.offset for records in taken.values() for each in records]

    assert found == [4, 7]
    assert places(state.gaps) == [(5, 7, Code.INVALID_REQUEST)]
    assert f"got {4 + false}" in state.gaps[0].reason


async def test_batch_whose_offsets_count_from_one_is_passed_over() -> None:
    """Each record would have the offset of the next one, and the last one no offset."""
    content = raw_batch([RawRecord()] * 2, deltas=[1, 2])

    found, gaps = await read_all(Fetcher(one=content), ReadState())

    assert not found
    assert places(gaps) == [(0, 2, Code.INVALID_REQUEST)]


async def test_records_that_compaction_has_left_are_read() -> None:
    """They are fewer than the offsets of their batch."""
    content = bytearray(raw_batch([RawRecord()] * 2, deltas=[1, 4]))
    content[23:27] = (6).to_bytes(4, "big")  # the last offset of the batch as it was written
    fetcher = Fetcher(one=checked(bytes(content)) + batch(7, 1))

    found, gaps = await read_all(fetcher, ReadState())

    assert [each.offset for each in found] == [1, 4, 7]
    assert not gaps


@pytest.mark.parametrize("magic", [0, 1])
async def test_batch_whose_format_is_damaged_is_passed_over(magic: int) -> None:
    """Read as a format of which it is not, its parts have lengths that cannot be."""
    content = bytearray(batch(0, 2))
    content[16] = magic

    found, gaps = await read_all(Fetcher(one=bytes(content) + batch(2, 1)), ReadState())

    assert [each.offset for each in found] == [2]
    assert places(gaps) == [(0, 2, Code.INVALID_REQUEST)]


@pytest.mark.parametrize("false", [0, 1 << 40])
async def test_batch_with_damaged_offset_hides_no_other(false: int) -> None:
    """No checksum covers its offset: the batches around it show that it cannot be there."""
    damaged = bytearray(batch(8, 2))
    damaged[:8] = false.to_bytes(8, "big")
    content = batch(6, 2) + bytes(damaged) + batch(10, 2)

    found, gaps = await read_all(Fetcher(position=6, one=content), ReadState())

    assert [each.offset for each in found] == [6, 7, 10, 11]
    assert places(gaps) == [(8, 10, Code.INVALID_REQUEST)]


async def test_last_batch_with_damaged_offset_moves_position_back_by_none() -> None:
    """The records before it would be read again and again."""
    damaged = bytearray(batch(8, 2))
    damaged[:8] = bytes(8)
    fetcher = Fetcher(position=6, one=batch(6, 2) + bytes(damaged))

    await read_all(fetcher, ReadState())

    assert fetcher.states[ONE].position == 8


async def test_damaged_length_skips_no_further_than_batch() -> None:
    """Behind it the offset of the next batch would be read from a value, here a tensor's."""
    tensor = bytes.fromhex("3f9df3b63f9df3b6bfc44bf5") * 8
    damaged = bytearray(raw_batch([RawRecord(tensor)] * 2))
    damaged[8:12] = (damaged.index(tensor) - 12).to_bytes(4, "big")
    content, state = bytes(damaged) + batch(2, 1), ReadState()

    await read_all(Fetcher(one=content), state)  # the first time it is fetched again
    fetcher = Fetcher(one=content)
    await take_records(buffer_of(fetcher), 0, 100, MAX_POLL_BYTES, state)

    assert places(state.gaps)[0] == (0, 2, Code.INVALID_REQUEST)


async def test_frame_with_false_size_is_bounded() -> None:
    """Two frames of zstd, of which only the first says how large it is."""
    content = compressed(ZSTD, bytes(10)) + compressed(ZSTD, bytes(3_000_000))

    _, gaps = await read_all(Fetcher(one=framed_batch(content, 2, ZSTD)), ReadState(1_000_000))

    assert places(gaps) == [(0, 2, Code.TOO_LARGE)]


async def test_record_with_too_many_headers_is_passed_over_before_it_is_parsed() -> None:
    """One of two bytes becomes an object of dozens; the records before it are read."""
    many = RawRecord(b"2", None, [(b"", None)] * 300_000)
    content = raw_batch([RawRecord(b"1"), many], codec=ZSTD) + batch(2, 1)

    found, gaps = await read_all(Fetcher(one=content), ReadState())

    assert [each.offset for each in found] == [0, 2]
    assert places(gaps) == [(1, 2, Code.TOO_LARGE)]
    assert "got 300000" in gaps[0].reason


async def test_poll_from_middle_of_batch_returns_records_from_there() -> None:
    """The first poll returns records however many stand before the position: a reader that seeks
    before each of its polls would otherwise make no progress.
    """
    fetcher = Fetcher(position=900, one=batch(0, 1000))

    assert await take(fetcher, 64) == {ONE: list(range(900, 964))}


def legacy_messages(magic: int, codec: int, first: int, count: int) -> bytes:
    """Messages of format 0 or 1 with these offsets, in one message if they are compressed."""
    builder = LegacyRecordBatchBuilder(magic, codec, 1 << 20)
    is_relative = magic == 1 and codec != 0
    for delta in range(count):
        builder.append(delta if is_relative else first + delta, 1_000, None, b"v")
    content = bytearray(builder.build())
    if codec:  # a broker gives it the offset of its last message
        content[:8] = (first + count - 1).to_bytes(8, "big")
    return bytes(content)


@pytest.mark.parametrize("position", [0, 8])
@pytest.mark.parametrize("codec", [0, GZIP, SNAPPY])
@pytest.mark.parametrize("magic", [0, 1])
async def test_messages_of_old_formats_are_read_from_position(
    magic: int, codec: int, position: int
) -> None:
    """A log may hold them since before an upgrade: no client that writes them is needed."""
    content = legacy_messages(magic, codec, 6, 4)

    found = await take(Fetcher(position=position, one=content))

    assert found == {ONE: list(range(max(position, 6), 10))}


@pytest.mark.parametrize(("magic", "timestamp_ms"), [(0, None), (1, -1)])
async def test_message_of_old_format_without_timestamp_is_read_with_minus_one(
    magic: int, timestamp_ms: int | None
) -> None:
    """Format 0 has no timestamps; in format 1 a broker wrote -1 for clients that knew none."""
    builder = LegacyRecordBatchBuilder(magic, 0, 1 << 20)
    builder.append(0, timestamp_ms, None, b"v")

    (found,), _ = await read_all(Fetcher(one=bytes(builder.build())), ReadState())

    assert found.timestamp == -1


async def test_large_batch_read_from_middle_returns_its_records() -> None:
    """The bytes of records that are passed over do not count."""
    records = [RawRecord(bytes(300_000))] * 6

    fetcher = Fetcher(position=5, one=raw_batch(records))
    polled = await take_records(buffer_of(fetcher), 0, 100, 1_000_000, ReadState())

    assert [each.offset for each in polled[ONE]] == [5]


async def test_large_batch_is_read_like_small_one() -> None:
    """Any records, read in any number of polls, come back alike."""
    records = [
        RawRecord(bytes(300_000), b"k", [(b"a", b"1")] * 10),
        RawRecord(None),
        RawRecord(b"", bytes(400_000)),
        RawRecord(b"v", None, [(b"", None)] * 90_000),
    ]
    found, gaps = await read_all(Fetcher(one=raw_batch(records)), ReadState())

    assert [(each.value, each.key, len(each.headers)) for each in found] == [
        (each.value, each.key, len(each.headers)) for each in records
    ]
    assert not gaps


async def test_poll_is_limited_by_bytes() -> None:
    """The record that meets the limit is its last; the rest comes with the next ones."""
    content = raw_batch([RawRecord(bytes(400_000))] * 5)
    fetcher, state = Fetcher(one=content, two=content), ReadState()
    polls = []
    while fetcher.has_unread:
        polled = await take_records(buffer_of(fetcher), 0, 100, 1_000_000, state)
        polls.append({partition: len(records) for partition, records in polled.items()})

    assert polls[:2] == [{ONE: 3}, {ONE: 2}]
    assert sum(sum(each.values()) for each in polls) == 10
