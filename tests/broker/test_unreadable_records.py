"""Records that no client should send, on a real Kafka: raw header names, bombs, damaged batches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from headrace.config import KafkaSettings
from headrace.errors import Code
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import Gap, NewRecord, Record, TopicInfo, TopicPartition
from headrace.protocol.codec import encode_request
from headrace.tools.dead_letters import DeadLetterSelection, read_dead_letters
from headrace.tools.local_kafka import LocalKafka
from headrace.tools.replay.recording import Selection
from headrace.tools.replay.topic_recording import open_topic
from headrace.topics import Topic
from tests.support.logs import read, write_to
from tests.support.models import add_version, digits
from tests.support.processes import Process, create_topics, environment, headrace
from tests.support.raw_records import CODECS, GZIP, RawRecord, bomb, produce_raw, raw_batch

RAW_NAME = b"caf\xe9"
NAME = "caf\udce9"
BOUND_BYTES = 4 * 1024 * 1024
BOMB_BYTES = 96 * 1024 * 1024


def good(number: int) -> RawRecord:
    """A request of `digits`."""
    pixels = np.full((1, 64), number, np.float32)
    value = encode_request("application/msgpack", "digits", {"pixels": pixels}, id=str(number))
    return RawRecord(value, b"key", [(b"order", b"%d" % number)])


def place(name: str, topic: Topic) -> TopicPartition:
    """Partition 0 of a topic of the namespace."""
    return TopicPartition(f"{name}.{topic}", 0)


async def stored(log: KafkaLog, partition: TopicPartition, count: int) -> list[Record]:
    """Return so many records of a partition, from its beginning."""
    async with log.reader([partition]) as reader:
        reader.seek(partition, 0)
        async with asyncio.timeout(30):
            return await read(reader, count)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("guarantee", "compression"), [("at_least_once", "none"), ("exactly_once", "zstd")]
)
async def test_non_utf8_header_name_is_kept_byte_for_byte(
    kafka: LocalKafka, unique_name: str, tmp_path: Path, guarantee: str, compression: str
) -> None:
    """The request is refused, those around it are answered, and tools read what was kept."""
    add_version(tmp_path, "digits", 1, digits())
    settings = environment(
        kafka.bootstrap_servers,
        unique_name,
        tmp_path,
        DELIVERY__GUARANTEE=guarantee,
        KAFKA__COMPRESSION=compression,
    )
    await create_topics(settings)
    requests = place(unique_name, Topic.REQUESTS)
    strange = good(1)._replace(headers=[(b"order", b"1"), (RAW_NAME, b"x"), (b"none", None)])
    batch = raw_batch([good(0), strange, good(2)])
    kafka_settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    async with KafkaLog(kafka_settings) as log:
        await produce_raw(kafka.bootstrap_servers, requests, batch)
        async with Process("ingest,batcher,executor,responder", settings) as process:
            answers = await stored(log, place(unique_name, Topic.RESPONSES), 3)
            (letter,) = await stored(log, place(unique_name, Topic.DEAD_LETTERS), 1)
            assert await process.terminate() == 0
        copied: list[Record] = []
        async with open_topic(log, requests.topic, Selection()) as recording:
            copied += [record async for record in recording]
        topic = place(unique_name, Topic.DEAD_LETTERS).topic
        (read_letter,) = [
            each async for each in read_dead_letters(log, topic, DeadLetterSelection())
        ]

    statuses = {dict(each.headers)["order"]: dict(each.headers)["x-status"] for each in answers}
    assert statuses == {b"0": b"ok", b"1": b"INVALID_REQUEST", b"2": b"ok"}
    assert list(letter.headers[:3]) == [("order", b"1"), (NAME, b"x"), ("none", None)]
    assert (letter.key, letter.value) == (strange.key, strange.value)
    assert read_letter.code == Code.INVALID_REQUEST
    assert [dict(each.headers).get(NAME) for each in copied] == [None, b"x", None]
    shown = await headrace(["dlq", "show", "0/0"], settings)
    assert "caf\\xe9: x" in shown


@pytest.mark.timeout(180)
async def test_compression_bomb_is_skipped_within_memory(
    kafka: LocalKafka, unique_name: str, tmp_path: Path
) -> None:
    """With every codec the next request is answered, and the process has not grown."""
    add_version(tmp_path, "digits", 1, digits())
    settings = environment(
        kafka.bootstrap_servers,
        unique_name,
        tmp_path,
        LIMITS__MAX_DECOMPRESSED_BYTES=str(BOUND_BYTES),
    )
    await create_topics(settings)
    requests = place(unique_name, Topic.REQUESTS)
    async with (
        KafkaLog(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as log,
        Process("ingest,batcher,executor,responder", settings) as process,
    ):
        await produce_raw(kafka.bootstrap_servers, requests, raw_batch([good(0)]))
        await stored(log, place(unique_name, Topic.RESPONSES), 1)
        before_bytes = process.resident_bytes
        for codec in CODECS.values():
            batch = await asyncio.to_thread(bomb, codec, BOMB_BYTES, 4)
            await produce_raw(kafka.bootstrap_servers, requests, batch)
        await produce_raw(kafka.bootstrap_servers, requests, raw_batch([good(1)], codec=GZIP))
        answers = await stored(log, place(unique_name, Topic.RESPONSES), 2)
        grown_bytes = process.peak_resident_bytes - before_bytes
        assert await process.terminate() == 0
        said = process.output

    assert [dict(each.headers)["x-status"] for each in answers] == [b"ok", b"ok"]
    assert said.count("records.unreadable") == len(CODECS)
    assert "TOO_LARGE" in said
    assert grown_bytes < BOMB_BYTES / 2


async def test_reader_continues_behind_oversized_batch(kafka: LocalKafka, unique_name: str) -> None:
    """It tells which offsets it has passed over, and its position is behind them."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    partition = TopicPartition(unique_name, 0)
    async with KafkaLog(settings, decompressed_bytes=BOUND_BYTES) as log:
        info = TopicInfo(unique_name, 1, {"max.message.bytes": "8388608"})
        await log.create_topics([info], replication_factor=1)
        gaps: list[Gap] = []
        async with log.reader([partition]) as reader:
            await write_to(log, partition, NewRecord(None, b"1"))
            batch = bomb(CODECS["zstd"], 2 * BOUND_BYTES, 3)
            assert await produce_raw(kafka.bootstrap_servers, partition, batch) == 1
            found: list[Record] = []
            async with asyncio.timeout(20):
                while await reader.position(partition) < 4:
                    for records in (await reader.poll(0.2, 10)).values():
                        found += records
                    gaps += reader.gaps()

    assert [each.offset for each in found] == [0]
    assert [(gap.partition, gap.first, gap.end, gap.code) for gap in gaps] == [
        (partition, 1, 4, Code.TOO_LARGE)
    ]


async def test_false_offset_in_uncompressed_batch_is_not_returned(
    kafka: LocalKafka, unique_name: str
) -> None:
    """The broker takes such a batch, and does not look at the offsets of its records."""
    partition = TopicPartition(unique_name, 0)
    async with KafkaLog(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as log:
        await log.create_topics([TopicInfo(unique_name, 1, {})], replication_factor=1)
        batch = raw_batch([RawRecord()] * 3, deltas=[0, 1_000, 2])
        await produce_raw(kafka.bootstrap_servers, partition, batch)
        await produce_raw(kafka.bootstrap_servers, partition, raw_batch([RawRecord()]))
        found = await stored(log, partition, 2)

    assert [each.offset for each in found] == [0, 3]
