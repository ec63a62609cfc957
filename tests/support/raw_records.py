"""Record batches made by hand: header names of any bytes, and bombs; and a way to produce them.

No client library writes these, and librdkafka and others let their callers write some of them.
"""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import cramjam
from aiokafka.client import AIOKafkaClient
from aiokafka.codec import lz4_encode
from aiokafka.errors import KafkaError, LeaderNotAvailableError, for_code
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.util import calc_crc32c, encode_varint

from headrace.log.port import TopicPartition
from tests.support.conditions import DEADLINE_S

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
CODECS = {"gzip": GZIP, "snappy": SNAPPY, "lz4": LZ4, "zstd": ZSTD}

HEAD = struct.Struct(">qiibIhiqqqhii")
CRC_AT, ATTRIBUTES_AT = 17, 21
RETRY_S = 0.1
_TIMESTAMP_MS = 1_700_000_000_000


class RawRecord(NamedTuple):
    """A record whose headers' names are bytes."""

    value: bytes | None = b"v"
    key: bytes | None = None
    headers: Sequence[tuple[bytes, bytes | None]] = ()


def encoded_record(record: RawRecord, delta: int) -> bytes:
    """The bytes of one record of a batch."""
    body = bytearray(b"\0")
    for number in (0, delta):
        encode_varint(number, body.append)
    for content in (record.key, record.value):
        _append(body, content)
    encode_varint(len(record.headers), body.append)
    for name, value in record.headers:
        _append(body, name)
        _append(body, value)
    framed = bytearray()
    encode_varint(len(body), framed.append)
    return bytes(framed + body)


def _append(body: bytearray, content: bytes | None) -> None:
    encode_varint(-1 if content is None else len(content), body.append)
    body += content or b""


def raw_batch(
    records: Sequence[RawRecord],
    *,
    codec: int = NONE,
    base: int = 0,
    timestamp_ms: int | None = None,
    deltas: Sequence[int] | None = None,
) -> bytes:
    """A batch of format 2 with these records, as a producer sends it; or with false offsets."""
    deltas = range(len(records)) if deltas is None else deltas
    pairs = zip(records, deltas, strict=True)
    content = b"".join(encoded_record(each, delta) for each, delta in pairs)
    return framed_batch(compressed(codec, content), len(records), codec, base, timestamp_ms)


def framed_batch(
    content: bytes,
    records: int,
    codec: int = NONE,
    base: int = 0,
    timestamp_ms: int | None = None,
) -> bytes:
    """A batch whose records have these bytes, be they right or not, with a right checksum."""
    at_ms = _TIMESTAMP_MS if timestamp_ms is None else timestamp_ms
    length = HEAD.size - 12 + len(content)
    head = (base, length, -1, 2, 0, codec, records - 1, at_ms, at_ms, -1, -1, -1, records)
    return checked(HEAD.pack(*head) + content)


def checked(batch: bytes) -> bytes:
    """The batch with a checksum that is right."""
    changed = bytearray(batch)
    struct.pack_into(">I", changed, CRC_AT, calc_crc32c(bytes(changed[ATTRIBUTES_AT:])))
    return bytes(changed)


def compressed(codec: int, content: bytes) -> bytes:
    """Compress as a producer compresses a batch; as a raw frame where there is a choice."""
    if codec == GZIP:
        return gzip.compress(content)
    if codec == SNAPPY:
        return bytes(cramjam.snappy.compress_raw(content))
    if codec == LZ4:
        return bytes(lz4_encode(content))  # brokers take no linked blocks
    if codec == ZSTD:
        return bytes(cramjam.zstd.compress(content))
    return content


def bomb(codec: int, size_bytes: int, records: int = 1) -> bytes:
    """A batch of records of zeros that is small until it is decompressed."""
    value = bytes(size_bytes // records)
    return raw_batch([RawRecord(value)] * records, codec=codec)


async def produce_raw(bootstrap_servers: str, partition: TopicPartition, batch: bytes) -> int:
    """Write a batch as it is, and return the offset of its first record.

    Raises:
        KafkaError: the broker does not take it.
    """
    client = AIOKafkaClient(bootstrap_servers=bootstrap_servers)
    await client.bootstrap()
    try:
        async with asyncio.timeout(DEADLINE_S):
            await client.add_topic(partition.topic)
            while True:
                error, offset = await _produced(client, partition, batch)
                if error is None:
                    return offset
                if not error.retriable:
                    raise error
                await client.force_metadata_update()
                await asyncio.sleep(RETRY_S)
    finally:
        await client.close()


async def _produced(
    client: AIOKafkaClient, partition: TopicPartition, batch: bytes
) -> tuple[KafkaError | None, int]:
    """Try once; a topic that was made a moment ago has no leader yet."""
    node = client.cluster.leader_for_partition(partition)
    if node in (None, -1):
        return LeaderNotAvailableError(str(partition)), -1
    request = ProduceRequest(None, -1, 10_000, [(partition.topic, [(partition.partition, batch)])])
    answer: Any = await client.send(node, request)
    _, code, offset, *_ = answer.topics[0][1][0]
    return (for_code(code)(f"{partition}: {answer.topics}") if code else None), int(offset)
