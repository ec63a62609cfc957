"""Decompress record batches within a bound, and parse those that aiokafka's parser cannot read.

aiokafka's parser is in C and reads most batches. It has three limitations. It decompresses without
a bound, so that 20 kB in the log can become gigabytes; so every compressed batch is decompressed
here, and passed to it as if it had never been compressed. It raises at a header name that is not
UTF-8, which any client may send. And it rejects a whole batch if one record in it is damaged.
`parse_records` reads such a batch in Python, slowly, as far as it can be read.

Source of the layouts: "Message Format" in Kafka's documentation, RFC 8878 (zstd), and the frame
formats of LZ4, snappy-java (xerial) and gzip.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from operator import ge
from typing import Any, Final, NamedTuple

import cramjam
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.legacy_records import LegacyRecordBatch

from headrace.errors import Code
from headrace.log.kafka._aiokafka import replace_record_sets
from headrace.log.kafka.checksum import crc32c

DEFAULT_DECOMPRESSED_BYTES: Final = 128 * 1024 * 1024
"""The limit on a decompressed batch if the settings give none."""

MAX_HEADERS: Final = 100_000
"""A record with more is not read."""
_LARGE_RECORD_BYTES: Final = 2 * MAX_HEADERS
"""A smaller record cannot have more than `MAX_HEADERS`."""

_FRAME = struct.Struct(">qi")  # base offset, and the number of bytes that follow
_HEADER = struct.Struct(">qiibIhiqqqhii")
_CRC = struct.Struct(">I")
_COUNT = struct.Struct(">i")
_LENGTH_AT, _MAGIC_AT, _CRC_AT, _ATTRIBUTES_AT, _COUNT_AT = 8, 16, 17, 21, 57
_FORMATS: Final = (0, 1, 2)
_CODEC, _LOG_APPEND_TIME = 0x07, 0x08
_NONE, _GZIP, _SNAPPY, _LZ4, _ZSTD = range(5)
_LEGACY_MIN_BYTES = 26
_FIRST_GUESS_BYTES: Final = 64 * 1024
_GROWTH: Final = 4
_MAX_GZIP_MEMBERS: Final = 16
"""Producers write one. The remaining input is copied for each, so many would take very long."""
_XERIAL, _XERIAL_HEAD_BYTES = b"\x82SNAPPY\x00", 16
_ZSTD_MAGIC, _LZ4_MAGIC = b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18"
_BUFFER_IS_FULL = "failed to write whole buffer"
"""The text of `std::io::ErrorKind::WriteZero`, with which cramjam reports a full output buffer."""


class UnreadableBatch(CorruptRecordException):  # type: ignore[misc]  # aiokafka publishes no types
    """A batch, or the rest of one, that cannot be read and has to be skipped.

    Attributes:
        code: `TOO_LARGE` for one that exceeds the bound once decompressed, else `INVALID_REQUEST`.
        reason: what was expected, and what was found.
    """

    def __init__(self, reason: str, code: Code = Code.INVALID_REQUEST) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class BatchHeader(NamedTuple):
    """The header of a batch of format 2."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    first_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records: int


class ParsedRecord(NamedTuple):
    """A record with the same attributes as aiokafka's, as far as they are needed."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


class RecordSet:
    """One partition's part of a fetch response; provides each batch's bytes beside aiokafka's
    object.

    It replaces aiokafka's `MemoryRecords`, which is in C and does not expose the bytes.

    Attributes:
        content: the bytes of the last batch that `next_batch` returned or failed at.
    """

    def __init__(self, content: bytes | None) -> None:
        self.content = memoryview(b"")
        # A broker may send null if there are no records. Kafka's own client takes that as well.
        self._all = memoryview(content or b"")
        self._at = 0

    def size_in_bytes(self) -> int:
        """Return the size of all batches, including a last one that is incomplete."""
        return len(self._all)

    def has_next(self) -> bool:
        """Return whether there is another complete batch."""
        left = len(self._all) - self._at
        if left < _FRAME.size:
            return False
        _, length = _FRAME.unpack_from(self._all, self._at)
        return bool(length < 0 or _FRAME.size + length <= left)

    def following_offset(self) -> int | None:
        """Return the base offset of the next batch; None if there is no complete one.

        Also None if what follows does not look like a batch: behind one whose length is damaged
        these are any bytes.
        """
        if not self.has_next() or len(self._all) - self._at <= _MAGIC_AT:
            return None
        offset, length = _FRAME.unpack_from(self._all, self._at)
        is_batch = length >= 0 and self._all[self._at + _MAGIC_AT] in _FORMATS
        return int(offset) if is_batch else None

    def next_batch(self) -> Any:
        """Return aiokafka's object for the next batch; None if there is none.

        Raises:
            UnreadableBatch: its format is unknown, or it has no message of the older format.
        """
        if not self.has_next():
            return None
        _, length = _FRAME.unpack_from(self._all, self._at)
        end = self._at + _FRAME.size + length if length >= 0 else len(self._all)
        self.content = content = self._all[self._at : end]
        self._at = end
        magic = content[_MAGIC_AT] if len(content) > _MAGIC_AT else -1
        if magic == 2 and len(content) >= _HEADER.size:
            return DefaultRecordBatch(content)
        if magic in (0, 1) and len(content) >= _LEGACY_MIN_BYTES:
            try:
                return LegacyRecordBatch(content, magic)
            except Exception as error:  # noqa: BLE001  # its parser in C raises at false lengths
                raise UnreadableBatch(f"damaged message of format {magic}: {error}") from None
        raise UnreadableBatch(
            f"expected a batch of format 0, 1 or 2, got format {magic} in {len(content)} bytes"
        )


# aiokafka's fetcher creates one for each partition of a fetch response.
replace_record_sets(RecordSet)


def is_intact(batch: Any, content: memoryview) -> bool:
    """Return whether the checksum of a batch is right.

    Args:
        batch: aiokafka's object for it.
        content: its bytes.
    """
    if content[_MAGIC_AT] < 2:
        return bool(batch.validate_crc())
    (expected,) = _CRC.unpack_from(content, _CRC_AT)
    return bool(crc32c(content[_ATTRIBUTES_AT:]) == expected)


def plain_batch(batch: Any, content: memoryview, most_bytes: int) -> tuple[Any, memoryview]:
    """Return a batch, and its bytes, as if it had not been compressed.

    Args:
        batch: aiokafka's object for it, whose checksum is right.
        content: its bytes.
        most_bytes: the limit on its decompressed records.

    Raises:
        UnreadableBatch: the records are larger, or cannot be decompressed.
    """
    is_legacy = content[_MAGIC_AT] < 2
    codec = content[_MAGIC_AT + 1] & _CODEC if is_legacy else batch.attributes & _CODEC
    if codec == _NONE:
        return batch, content
    if is_legacy:
        # Only check the size here: aiokafka decompresses such a batch itself afterwards.
        decompressed(codec, _legacy_value(content), most_bytes)
        return batch, content
    records = decompressed(codec, content[_HEADER.size :], most_bytes, _HEADER.size)
    records[: _HEADER.size] = content[: _HEADER.size]
    struct.pack_into(">i", records, _LENGTH_AT, len(records) - _FRAME.size)
    struct.pack_into(">h", records, _ATTRIBUTES_AT, batch.attributes & ~_CODEC)
    plain = memoryview(records)
    return DefaultRecordBatch(plain), plain


def _legacy_value(content: memoryview) -> memoryview:
    """Return the messages inside a compressed message of format 0 or 1."""
    at = _MAGIC_AT + (10 if content[_MAGIC_AT] else 2)
    try:
        (key_size,) = struct.unpack_from(">i", content, at)
        at += 4 + max(key_size, 0)
        (size,) = struct.unpack_from(">i", content, at)
    except struct.error as error:
        raise UnreadableBatch(f"damaged message: {error}") from None
    return content[at + 4 : at + 4 + max(size, 0)]


# --- decompressing ----------------------------------------------------------------------------


def decompressed(
    codec: int, content: memoryview, most_bytes: int, reserved_bytes: int = 0
) -> bytearray:
    """Decompress into a buffer after `reserved_bytes` at its front.

    A size that the frame announces is compared with the bound before anything is allocated. If none
    is announced, or a wrong one, the buffer grows with the content, up to the bound.

    Raises:
        UnreadableBatch: it is larger than the bound, damaged, or of an unknown codec.
    """
    decompress = _DECOMPRESS.get(codec)
    if decompress is None:
        raise UnreadableBatch(f"expected compression 0 to 4, got {codec}")
    return decompress(content, most_bytes, reserved_bytes)


def _gzip(content: memoryview, most_bytes: int, reserved_bytes: int) -> bytearray:
    out = bytearray(reserved_bytes)
    left: Any = content
    try:
        for _ in range(_MAX_GZIP_MEMBERS):
            member = zlib.decompressobj(wbits=31)
            out += member.decompress(left, most_bytes + reserved_bytes - len(out) + 1)
            if len(out) > most_bytes + reserved_bytes:
                raise _too_large("gzip", most_bytes)
            if not member.eof:
                raise UnreadableBatch("damaged gzip: it ends too early")
            left = member.unused_data.lstrip(b"\0")
            if not left:
                return out
    except zlib.error as error:
        raise UnreadableBatch(f"damaged gzip: {error}") from None
    raise UnreadableBatch(f"expected at most {_MAX_GZIP_MEMBERS} gzip members, got more")


def _snappy(content: memoryview, most_bytes: int, reserved_bytes: int) -> bytearray:
    """Decompress blocks, each of which announces its size; decompressing verifies it."""
    announce = cramjam.snappy.decompress_raw_len
    try:
        # Iterate over the blocks twice, since a list of many small ones takes more than they do.
        announced = sum(announce(block) for block in _snappy_blocks(content))
        if announced > most_bytes:
            raise _too_large("snappy", most_bytes, announced)
        out = bytearray(reserved_bytes + announced)
        at = reserved_bytes
        for block in _snappy_blocks(content):
            end = at + announce(block)
            cramjam.snappy.decompress_raw_into(block, memoryview(out)[at:end])
            at = end
    except cramjam.DecompressionError as error:
        raise UnreadableBatch(f"damaged snappy: {error}") from None
    return out


def _snappy_blocks(content: memoryview) -> Iterator[memoryview]:
    if content[: len(_XERIAL)] != _XERIAL:
        yield content
        return
    at = _XERIAL_HEAD_BYTES
    while at < len(content):
        if len(content) - at < 4:
            raise UnreadableBatch("damaged snappy: it ends too early")
        (size,) = struct.unpack_from(">i", content, at)
        at += 4
        if not 0 <= size <= len(content) - at:
            raise UnreadableBatch(f"damaged snappy: a block of {size} bytes")
        yield content[at : at + size]
        at += size


def _lz4(content: memoryview, most_bytes: int, reserved_bytes: int) -> bytearray:
    announced = None
    if content[:4] == _LZ4_MAGIC and len(content) >= 14 and content[4] & 0x08:
        announced = int.from_bytes(content[6:14], "little")
    into = cramjam.lz4.decompress_into
    return _grown("lz4", into, content, announced, most_bytes, reserved_bytes)


def _zstd(content: memoryview, most_bytes: int, reserved_bytes: int) -> bytearray:
    announced = _zstd_announced(content)
    into = cramjam.zstd.decompress_into
    return _grown("zstd", into, content, announced, most_bytes, reserved_bytes)


def _zstd_announced(content: memoryview) -> int | None:
    """Return `Frame_Content_Size` of the first frame; None if it has none."""
    if content[:4] != _ZSTD_MAGIC or len(content) < 5:
        return None
    descriptor = content[4]
    is_single_segment = bool(descriptor & 0x20)
    size = (1 if is_single_segment else 0, 2, 4, 8)[descriptor >> 6]
    at = 5 + (not is_single_segment) + (0, 1, 2, 4)[descriptor & 0x03]
    if not size or len(content) < at + size:
        return None
    return int.from_bytes(content[at : at + size], "little") + (256 if size == 2 else 0)


def _grown(
    name: str,
    decompress_into: Callable[[Any, Any], int],
    content: memoryview,
    announced: int | None,
    most_bytes: int,
    reserved_bytes: int,
) -> bytearray:
    """Decompress into a buffer that is enlarged until all fits or the bound is reached."""
    if announced is not None and announced > most_bytes:
        raise _too_large(name, most_bytes, announced)
    guess = max(_FIRST_GUESS_BYTES, _GROWTH * len(content)) if announced is None else announced
    while True:
        guess = min(guess, most_bytes)
        out = bytearray(reserved_bytes + guess)
        try:
            size = decompress_into(content, memoryview(out)[reserved_bytes:])
        except cramjam.DecompressionError as error:
            if _BUFFER_IS_FULL not in str(error):
                raise UnreadableBatch(f"damaged {name}: {error}") from None
        else:
            del out[reserved_bytes + size :]
            return out
        if guess >= most_bytes:
            raise _too_large(name, most_bytes)
        guess = max(guess * _GROWTH, _FIRST_GUESS_BYTES)


def _too_large(name: str, most_bytes: int, announced: int | None = None) -> UnreadableBatch:
    got = "more" if announced is None else f"{announced}"
    return UnreadableBatch(
        f"expected at most {most_bytes} bytes once decompressed ({name}), got {got}", Code.TOO_LARGE
    )


_DECOMPRESS: Final = {_GZIP: _gzip, _SNAPPY: _snappy, _LZ4: _lz4, _ZSTD: _zstd}


# --- parsing ----------------------------------------------------------------------------------


def read_header(content: memoryview) -> BatchHeader | None:
    """Return the header of a batch of format 2; None if it is cut off."""
    return BatchHeader(*_HEADER.unpack_from(content)) if len(content) >= _HEADER.size else None


def parse_records(content: memoryview) -> Iterator[ParsedRecord]:
    """Yield the records of a batch of format 2 that is not compressed.

    A header's name that is not UTF-8 is decoded with `surrogateescape`, so that nothing of it is
    lost, and the producer writes the same bytes again.

    Raises:
        UnreadableBatch: at the first damaged record, or the first whose offset cannot be its own;
            at once in an older format, which has no headers, so that aiokafka's parser can read
            whatever is intact.
    """
    if content[_MAGIC_AT] < 2:
        raise UnreadableBatch("damaged messages of format 0 or 1")
    header = BatchHeader(*_HEADER.unpack_from(content))
    stamp = header.max_timestamp if header.attributes & _LOG_APPEND_TIME else None
    cursor = _Cursor(content, _HEADER.size)
    first, end = header.base_offset, header.base_offset + header.last_offset_delta + 1
    is_dense = header.records == end - first
    for _ in range(header.records):
        record = _parse_record(cursor, header, stamp)
        if not has_offsets([record], first, end, is_dense=is_dense):
            raise UnreadableBatch(
                f"damaged record: expected an offset from {first} to {end - 1}, got {record.offset}"
            )
        first = record.offset + 1
        yield record


def is_dense(batch: Any, content: memoryview) -> bool:
    """Return whether a batch of format 2 has a record for each of its offsets.

    Args:
        batch: aiokafka's object for it.
        content: its bytes.
    """
    (records,) = _COUNT.unpack_from(content, _COUNT_AT)
    return bool(records == batch.next_offset - batch.base_offset)


def has_offsets(records: Sequence[Any], first: int, end: int, *, is_dense: bool) -> bool:
    """Return whether the offsets of records ascend, from `first` at the lowest to below `end`.

    Brokers compare the number of records with the offsets of their batch. But only in a compressed
    batch do they check the offset that the producer has written into each record.

    Args:
        records: some that follow each other in a batch.
        first: the lowest offset that the first one may have.
        end: the offset behind the batch.
        is_dense: whether the batch has a record for each offset: the first one has `first` then,
            and no offset is left out, as it is after compaction.
    """
    offsets = [first - 1, *[record.offset for record in records], end]
    if is_dense and offsets[-2] != first + len(records) - 1:
        return False
    return not any(map(ge, offsets, islice(offsets, 1, None)))


def _parse_record(cursor: _Cursor, header: BatchHeader, stamp: int | None) -> ParsedRecord:
    length = cursor.varint()
    end = cursor.at + length
    cursor.skip(1)  # attributes, which have no meaning yet
    timestamp = header.first_timestamp + cursor.varint()
    offset = header.base_offset + cursor.varint()
    key, value = cursor.nullable(), cursor.nullable()
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(cursor.count()):
        name = cursor.nullable()
        if name is None:
            raise UnreadableBatch("damaged record: a header without a name")
        headers.append((name.decode("utf-8", "surrogateescape"), cursor.nullable()))
    if cursor.at != end:
        raise UnreadableBatch(f"damaged record: expected its end at byte {end}, got {cursor.at}")
    return ParsedRecord(offset, timestamp if stamp is None else stamp, key, value, headers)


def records_of(batch: Any, content: memoryview, unmeasured_bytes: int) -> Iterator[Any]:
    """Yield the records of a batch, as aiokafka's parser reads them. Several slices may be taken.

    Args:
        batch: aiokafka's object for it, as `plain_batch` returns it. It can be iterated only once.
        content: its bytes.
        unmeasured_bytes: in a larger batch the header count of each record is checked first.

    Raises:
        UnreadableBatch: at a record with more than `MAX_HEADERS`, before it is parsed.
    """
    records = chain(batch)
    if content[_MAGIC_AT] < 2:
        return map(_with_timestamp, records)
    return _guarded_records(records, content) if len(content) > unmeasured_bytes else records


def _with_timestamp(message: Any) -> ParsedRecord:
    """Return a message of format 0 or 1; not all have a timestamp."""
    timestamp = -1 if message.timestamp is None else message.timestamp
    return ParsedRecord(message.offset, timestamp, message.key, message.value, [])


def _guarded_records(records: Iterator[Any], content: memoryview) -> Iterator[Any]:
    """Yield the records of aiokafka's parser, checking the header count of each first.

    A header takes two bytes in the batch and dozens as an object, so that one large record could
    become gigabytes.

    Raises:
        UnreadableBatch: at a record with more than `MAX_HEADERS`, before it is parsed.
    """
    cursor = _Cursor(content, _HEADER.size)
    while True:
        if cursor.at < len(content):
            length = cursor.varint()
            end = cursor.at + length
            if length > _LARGE_RECORD_BYTES:
                cursor.skip(1)
                cursor.varint()
                cursor.varint()
                for _ in range(2):  # the key and the value
                    cursor.skip(max(cursor.varint(), 0))
                cursor.count()
            cursor.at = end
        try:
            record = next(records)
        except StopIteration:
            return
        yield record


class _Cursor:
    """A position in the bytes of a batch that never reads past their end."""

    def __init__(self, content: memoryview, at: int) -> None:
        self.at = at
        self._content = content

    def varint(self) -> int:
        """Read a zigzag varint of up to ten bytes."""
        number = shift = 0
        while True:
            if self.at >= len(self._content) or shift > 63:
                raise UnreadableBatch(f"damaged record: no number at byte {self.at}")
            byte = self._content[self.at]
            self.at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (number >> 1) ^ -(number & 1)
            shift += 7

    def count(self) -> int:
        """Read a number of parts, each of which takes at least two bytes."""
        number = self.varint()
        if number > MAX_HEADERS:
            raise UnreadableBatch(
                f"expected at most {MAX_HEADERS} headers in a record, got {number}", Code.TOO_LARGE
            )
        if not 0 <= 2 * number <= len(self._content) - self.at:
            raise UnreadableBatch(f"damaged record: {number} headers")
        return number

    def nullable(self) -> bytes | None:
        """Read bytes after their length; None if the length is negative."""
        size = self.varint()
        if size < 0:
            return None
        start = self.at
        self.skip(size)
        return bytes(self._content[start : self.at])

    def skip(self, size: int) -> None:
        """Advance by `size` bytes."""
        if size > len(self._content) - self.at:
            raise UnreadableBatch(f"damaged record: {size} bytes at byte {self.at} are missing")
        self.at += size
