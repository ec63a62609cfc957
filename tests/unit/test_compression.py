"""Codings of values: what is read of headers, and how damage and size are refused."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import brotli
import pytest

from headrace.errors import Code, Rejected
from headrace.protocol.compression import (
    CODINGS,
    choose_coding,
    compress,
    decompress,
    may_hide_its_size,
    read_coding,
)

LIMIT_BYTES = 1 << 20
RUNS = bytes(LIMIT_BYTES)
TEXT = b"".join(b"%d, " % number for number in range(20_000))


def refusal(content: bytes, coding: str, limit_bytes: int = LIMIT_BYTES) -> Rejected:
    """The error of content that cannot be decompressed."""
    with pytest.raises(Rejected) as raised:
        decompress(content, coding, limit_bytes, "value")
    return raised.value


@pytest.mark.parametrize(
    ("text", "coding"),
    [
        ("", ""),
        ("identity", ""),
        (" GZip ", "gzip"),
        ("zstd", "zstd"),
        ("deflate", "deflate"),
        ("br", "br"),
        ("compress", None),
        ("gzip, gzip", None),
    ],
)
def test_coding_is_read_without_case(text: str, coding: str | None) -> None:
    """One coding, or none; a list or an unknown one is not read."""
    assert read_coding(text) == coding


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("", ""),
        ("gzip", "gzip"),
        ("gzip, zstd", "zstd"),
        ("gzip;q=0.9, zstd;q=0.8, deflate", "deflate"),
        ("*", "zstd"),
        ("*;q=0.5, zstd;q=0", "gzip"),
        ("identity, gzip;q=0.5", ""),
        ("identity;q=0.5, gzip;q=0.5", "gzip"),
        ("gzip;q=0", ""),
        ("br", "br"),
        ("gzip, deflate, br", "gzip"),
        ("compress", ""),
        ("gzip;q=soon", ""),
        ("gzip;q=nan, br;q=0.1", "br"),
        ("gzip ; q=0.2, br;q=-1", "gzip"),
        ("gzip;seq=5;q=0.5, br;q=0.6", "br"),
    ],
)
def test_answer_coding_has_highest_quality(accepted: str, coding: str) -> None:
    """The highest quality of the header wins; among equals zstd precedes gzip."""
    assert choose_coding(accepted) == coding


def test_formats_are_those_of_other_programs() -> None:
    """Headrace reads what Python's own modules write, and they read what Headrace writes."""
    assert decompress(gzip.compress(TEXT), "gzip", LIMIT_BYTES, "value") == TEXT
    assert decompress(zlib.compress(TEXT), "deflate", LIMIT_BYTES, "value") == TEXT
    assert gzip.decompress(compress(TEXT, "gzip")) == TEXT
    assert zlib.decompress(compress(TEXT, "deflate")) == TEXT


@pytest.mark.parametrize("plain", [TEXT, RUNS], ids=["text", "runs"])
@pytest.mark.parametrize("coding", CODINGS)
def test_result_at_limit_is_whole_and_one_byte_more_refused(coding: str, plain: bytes) -> None:
    """The limit is the largest result, also of what becomes a thousand times as large."""
    content = compress(plain, coding)

    assert decompress(content, coding, len(plain), "value") == plain
    error = refusal(content, coding, len(plain) - 1)
    assert error.code == Code.TOO_LARGE
    assert error.message == f"value: expected at most {len(plain) - 1} bytes, got more"


@pytest.mark.parametrize("coding", CODINGS)
def test_bomb_takes_no_more_memory_than_limit(coding: str) -> None:
    """Decompression of 64 MiB stops at the limit."""
    bomb = compress(bytes(64 << 20), coding)
    tracemalloc.start()
    try:
        error = refusal(bomb, coding)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert error.code == Code.TOO_LARGE
    assert peak_bytes < 3 * LIMIT_BYTES


@pytest.mark.parametrize("window_bits", [16, 22, 24])
def test_br_bomb_behind_small_block_stops_at_limit(window_bits: int) -> None:
    """The first block does not declare the others; the library would make twice as much."""
    stream = brotli.Compressor(lgwin=window_bits)
    bomb = stream.process(b"{}") + stream.flush() + stream.process(RUNS * 8) + stream.finish()
    tracemalloc.start()
    try:
        error = refusal(bomb, "br")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert error.code == Code.TOO_LARGE
    assert peak_bytes < 1.6 * LIMIT_BYTES


def test_br_is_read_from_blocks_of_any_size() -> None:
    """Dense parts, other parts and parts written in pieces are decompressed."""
    stream = brotli.Compressor()
    pieces = [TEXT[:3], RUNS, TEXT[3:], bytes(range(256)) * 40, RUNS[:100_000]]
    content = b"".join(stream.process(piece) + stream.flush() for piece in pieces)
    plain = b"".join(pieces)

    assert decompress(content + stream.finish(), "br", len(plain), "value") == plain


@pytest.mark.parametrize("window_bits", [10, 18, 22, 24])
@pytest.mark.parametrize("size", [1_000, 50_000, len(TEXT)])
def test_br_of_several_blocks_may_hide_its_size(window_bits: int, size: int) -> None:
    """A value compressed at once has one block, which declares its size; gzip is bounded anyway."""
    stream = brotli.Compressor(lgwin=window_bits)
    several = stream.process(b"{}") + stream.flush() + stream.process(RUNS) + stream.finish()

    assert not may_hide_its_size(compress(TEXT[:size], "br"), "br")
    assert may_hide_its_size(several, "br")
    assert not may_hide_its_size(compress(RUNS, "gzip"), "gzip")


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_damage_is_refused_with_its_place(coding: str) -> None:
    """A wrong byte shows where it is read, which is a little behind it."""
    content = bytearray(compress(TEXT, coding))
    content[20_000] ^= 0xFF
    message = refusal(bytes(content), coding).message

    place = message.partition("in bytes ")[2].split()
    assert 20_000 <= int(place[2]) <= len(content)


@pytest.mark.parametrize("plain", [TEXT, RUNS], ids=["text", "runs"])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_truncated_stream_is_refused_with_both_sizes(coding: str, plain: bytes) -> None:
    """It is not taken for a shorter value."""
    whole = compress(plain, coding)
    end = len(whole) - 5
    error = refusal(whole[:end], coding)

    assert error.code == Code.INVALID_REQUEST
    assert error.message.startswith(
        f"value: expected a whole {coding} stream, got {end} bytes that end early, after "
    )


@pytest.mark.parametrize("plain", [TEXT, RUNS], ids=["text", "runs"])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_bytes_behind_stream_are_refused_with_their_place(coding: str, plain: bytes) -> None:
    """Nothing is dropped without a word."""
    content = compress(plain, coding)
    error = refusal(content + b"more", coding)

    assert error.message.endswith(f"got other bytes from byte {len(content)} on")


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_wrong_checksum_behind_runs_is_refused(coding: str) -> None:
    """What becomes very large is checked like anything else."""
    content = bytearray(compress(RUNS, coding))
    content[-5 if coding == "gzip" else -1] ^= 1

    assert refusal(bytes(content), coding).code == Code.INVALID_REQUEST


@pytest.mark.parametrize("window_bits", [10, 16, 17, 18, 22, 24])
@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, LIMIT_BYTES, LIMIT_BYTES + 1])
def test_br_of_each_window_is_refused_by_its_result_alone(window_bits: int, size: int) -> None:
    """The size that its first block declares is never taken for a larger one."""
    content = brotli.compress(bytes(size), lgwin=window_bits)
    if size > LIMIT_BYTES:
        assert refusal(content, "br").code == Code.TOO_LARGE
    else:
        assert decompress(content, "br", max(size, 1), "value") == bytes(size)


def test_truncated_zstd_is_refused_with_its_size() -> None:
    """The library says no place."""
    error = refusal(compress(TEXT, "zstd")[:5_000], "zstd")

    assert error.code == Code.INVALID_REQUEST
    assert error.message.endswith("in 5000 bytes")


@pytest.mark.parametrize(
    "change", [lambda one: one[:2_000], lambda one: one + b"more", lambda one: b"text" + one]
)
def test_br_that_is_no_whole_stream_is_refused(change: Callable[[bytes], bytes]) -> None:
    """The library says no place, and takes bytes behind the stream for damage."""
    error = refusal(change(compress(TEXT, "br")), "br")

    assert error.code == Code.INVALID_REQUEST
    assert "br stream" in error.message
