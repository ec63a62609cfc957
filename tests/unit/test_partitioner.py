"""The partition of a key is the one that Kafka's own clients choose."""

from __future__ import annotations

import pytest

from headrace.log.partitioner import murmur2, partition_for_key

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
