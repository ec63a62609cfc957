"""One partition of the embedded log: offsets, gaps, retention, time."""

from __future__ import annotations

import pytest

from headrace.log.memory.broker import Partition, payload_bytes
from headrace.log.port import NewRecord, TopicPartition
from tests.support.traced_memory import held_bytes_of

NAME = TopicPartition("t", 0)
NOW_MS = 1_700_000_000_000


def _append(partition: Partition, count: int, *, value: bytes = b"v") -> None:
    records = [NewRecord(None, value)] * count
    partition.append(records, [payload_bytes(record) for record in records], NOW_MS)


def _partition(count: int = 0) -> Partition:
    partition = Partition(NAME, retention_bytes=1_000_000)
    _append(partition, count)
    return partition


def _offsets(partition: Partition, offset: int, max_records: int = 100) -> list[int]:
    return [record.offset for record in partition.read(offset, max_records)[0]]


def test_partition_offsets_count_from_zero() -> None:
    """The first record has offset 0, and the end is the next one's."""
    partition = _partition(3)
    assert _offsets(partition, 0) == [0, 1, 2]
    assert (partition.begin, partition.end) == (0, 3)


def test_read_starts_at_any_offset_and_is_bounded() -> None:
    """Reading starts at the offset asked for and gives no more than asked for."""
    assert _offsets(_partition(10), 4, 3) == [4, 5, 6]


def test_read_skips_gap() -> None:
    """An offset that holds no record gives the next one that does."""
    partition = _partition(2)
    partition.skip(3)
    _append(partition, 2)
    assert _offsets(partition, 1) == [1, 5, 6]
    assert _offsets(partition, 3) == [5, 6]


def test_read_of_gap_at_end_is_empty() -> None:
    """Offsets used up by markers count in the end, and hold nothing."""
    partition = _partition(2)
    partition.skip(1)
    assert partition.end == 3
    assert _offsets(partition, 2) == []


def test_trim_moves_beginning_of_partition() -> None:
    """Records below are gone; the others keep their offsets."""
    partition = _partition(10)
    partition.trim(4)
    assert partition.begin == 4
    assert _offsets(partition, 4) == [4, 5, 6, 7, 8, 9]


def test_small_trim_of_many_records_moves_beginning() -> None:
    """Reading begins at the right record, although only a few were dropped."""
    partition = _partition(100)
    partition.trim(3)
    partition.trim(5)
    assert _offsets(partition, 5, 2) == [5, 6]


def test_trim_of_everything_empties_partition() -> None:
    """An emptied partition goes on counting."""
    partition = _partition(5)
    partition.trim(5)
    _append(partition, 1)
    assert (partition.begin, partition.end) == (5, 6)
    assert _offsets(partition, 5) == [5]


def test_trim_below_beginning_changes_nothing() -> None:
    """An offset below the beginning changes nothing."""
    partition = _partition(5)
    partition.trim(3)
    partition.trim(1)
    assert partition.begin == 3


def test_trim_beyond_end_is_refused() -> None:
    """Kafka refuses it too."""
    with pytest.raises(ValueError, match="up to 5, got 6"):
        _partition(5).trim(6)


def test_retention_drops_oldest_records() -> None:
    """The bytes held stay within the bound."""
    partition = Partition(NAME, retention_bytes=100_000)
    for _ in range(100):
        _append(partition, 10, value=bytes(1000))
    assert 90_000 < partition.held_bytes <= 100_000
    assert partition.end == 1000
    assert _offsets(partition, partition.begin)[0] == partition.begin


def test_retention_keeps_newest_record() -> None:
    """A record larger than the bound is still there to be read."""
    partition = Partition(NAME, retention_bytes=1000)
    _append(partition, 1)
    _append(partition, 1, value=bytes(5000))
    assert _offsets(partition, partition.begin) == [1]


def test_dropped_records_free_memory() -> None:
    """A partition keeps no more than its retention and the places of what was dropped last."""
    partition = Partition(NAME, retention_bytes=100_000)

    def append_ten_times_the_retention() -> None:
        for _ in range(1000):
            _append(partition, 1, value=b"%01000d" % 0)

    assert 90_000 < held_bytes_of(append_ten_times_the_retention) < 200_000


def test_partition_counts_held_bytes() -> None:
    """Trimming everything leaves nothing to account for."""
    partition = _partition(50)
    partition.trim(50)
    assert partition.held_bytes == 0


def test_lookup_by_time_finds_record_behind_later_timestamp() -> None:
    """Timestamps need not ascend: the first record at or after the time counts."""
    partition = _partition()
    records = [NewRecord(None, b"v", (), at) for at in (10, 50, 20, 60)]
    partition.append(records, [1] * 4, NOW_MS)
    assert [partition.offset_at(at) for at in (0, 20, 55, 61)] == [0, 1, 3, None]


def test_lookup_by_time_skips_trimmed_record() -> None:
    """Only what can be read counts."""
    partition = _partition(10)
    partition.trim(2)
    assert partition.offset_at(0) == 2


def test_watchers_are_called_on_append() -> None:
    """From `watch` to `unwatch` each append calls, once."""
    calls: list[int] = []

    def wake() -> None:
        calls.append(partition.end)

    partition = _partition(1)
    partition.watch(wake)
    _append(partition, 2)
    partition.unwatch(wake)
    _append(partition, 1)
    assert calls == [3]


def test_truncated_partition_reports_no_unreadable_offsets_of_lost_records() -> None:
    """Other records have the offsets from then on."""
    partition = _partition(1)
    partition.write_unreadable(4, "INVALID_REQUEST", "damaged")
    partition.truncate(3)
    assert [(gap.first, gap.end) for gap in partition.gaps_between(0, 9)] == [(1, 3)]
    partition.truncate(0)
    _append(partition, 9)
    assert partition.gaps_between(0, 9) == []


def test_transaction_whose_records_were_truncated_can_end() -> None:
    """As in Kafka, its marker is written all the same."""
    partition = _partition(1)
    partition.append([NewRecord(None, b"v")], [1], NOW_MS, transaction="one")
    partition.truncate(1)
    partition.end_transaction("one", commit=True)
    assert (partition.end, partition.stable_end) == (2, 2)
