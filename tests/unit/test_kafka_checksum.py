"""The checksum of record batches: known values, and damage wherever it is."""

from __future__ import annotations

import random

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from headrace.log.kafka.checksum import crc32c
from headrace.log.kafka.record_batches import RecordSet, is_intact

HEADER_BYTES = 61


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_checksum_of_known_bytes_is_as_published(content: bytes, expected: int) -> None:
    """The examples of RFC 3720, appendix B.4, and the check value of the CRC catalogues."""
    assert crc32c(memoryview(content)) == expected


@pytest.mark.parametrize("size", [2047, 2048, 2049, 65_535, 65_536, 65_537, 200_000])
def test_checksum_of_any_size_equals_that_of_aiokafka(size: int) -> None:
    """Below and above the sizes from which it is computed in parts."""
    content = random.Random(size).randbytes(size)

    assert crc32c(memoryview(content)) == calc_crc32c(content)


@pytest.mark.parametrize("value_bytes", [10, 5_000, 150_000])
def test_batch_damaged_in_any_part_is_not_intact(value_bytes: int) -> None:
    """In its first and last byte, in the checksum, and between."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1_000_000)
    builder.append(0, 1_700_000_000_000, None, random.Random(1).randbytes(value_bytes), [])
    whole = bytes(builder.build())

    assert is_readable(whole)
    for place in {17, 20, 21, HEADER_BYTES, len(whole) // 2, len(whole) - 1}:
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        assert not is_readable(bytes(damaged)), place


def is_readable(content: bytes) -> bool:
    """Return whether the checksum of the only batch is right."""
    batches = RecordSet(content)
    batch = batches.next_batch()
    return is_intact(batch, batches.content)
