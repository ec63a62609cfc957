"""The partition of a key is the one that Kafka's own clients choose."""

from __future__ import annotations

import pytest

from headrace.log.partitioner import StickyPartitioner, murmur2, partition_for_key

# From Kafka's own test of the hash (UtilsTest.testMurmur2), where they are signed.
KAFKA_VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("key", "signed"), KAFKA_VECTORS.items())
def test_partitioner_hash_equals_that_of_kafka(key: bytes, signed: int) -> None:
    """The hash has the bits that Kafka's Java client computes."""
    assert murmur2(key) == signed % 2**32


@pytest.mark.parametrize("key", [b"", b"x", b"patient-17", bytes(range(256))])
def test_partitioner_stays_within_topic(key: bytes) -> None:
    """Every key, the empty one too, has one of the topic's partitions."""
    assert 0 <= partition_for_key(key, 7) < 7


def test_record_without_key_within_batch_size_keeps_its_partition() -> None:
    """Three records of 100 bytes fill the 300 bytes of a partition; then the next has its turn."""
    partitioner = StickyPartitioner(first=6, sticky_bytes=300, sticky_s=1.0)
    assert [partitioner.choose(100, 4, now_s=0.0) for _ in range(7)] == [2, 2, 2, 3, 3, 3, 0]


def test_record_without_key_larger_than_batch_size_moves_to_next_partition() -> None:
    """Large records are spread one by one."""
    partitioner = StickyPartitioner(first=0, sticky_bytes=300, sticky_s=1.0)
    assert [partitioner.choose(1000, 3, now_s=0.0) for _ in range(4)] == [0, 1, 2, 0]


def test_record_without_key_after_a_while_moves_to_next_partition() -> None:
    """Few small records do not stay with one partition for longer than a second."""
    partitioner = StickyPartitioner(first=0, sticky_bytes=300, sticky_s=1.0)
    assert [partitioner.choose(1, 3, now_s) for now_s in (10.0, 10.9, 11.0, 11.9, 15.0)] == [
        0,
        0,
        1,
        1,
        2,
    ]


def test_record_without_key_with_fewer_partitions_has_valid_partition() -> None:
    """The topic may have fewer partitions than the number that was chosen first."""
    partitioner = StickyPartitioner(first=5, sticky_bytes=300, sticky_s=1.0)
    assert [partitioner.choose(1, count, now_s=0.0) for count in (6, 3, 1)] == [5, 2, 0]
