"""Reading topics of the embedded log as a `read_committed` consumer sees them."""

from __future__ import annotations

from collections import Counter, defaultdict

from headrace.config import Settings
from headrace.log.memory import MemoryLog
from headrace.log.port import Record, TopicPartition
from headrace.topics import Topic


async def visible(log: MemoryLog, topic: str) -> list[Record]:
    """All records of a topic that are visible now, each partition's in its order."""
    info = (await log.describe_topics([topic]))[topic]
    assert info is not None
    names = [TopicPartition(topic, number) for number in range(info.partitions)]
    found: list[Record] = []
    async with log.reader(names) as reader:
        for name in names:
            reader.seek(name, 0)
        while polled := await reader.poll(0, 10_000):
            for records in polled.values():
                found += records
    return sorted(found, key=lambda record: (record.partition, record.offset))


def source_of(answer: Record) -> tuple[int, int]:
    """Partition and offset of the request that an answer answers."""
    _, partition, offset = (dict(answer.headers)["x-request"] or b"").decode().rsplit("/", 2)
    return int(partition), int(offset)


def status_of(answer: Record) -> str:
    """`ok`, or the code."""
    return (dict(answer.headers)["x-status"] or b"").decode()


async def answered(log: MemoryLog, settings: Settings, *topics: str) -> Counter[tuple[int, int]]:
    """How many visible answers each request has, on `responses` and on other topics."""
    found: Counter[tuple[int, int]] = Counter()
    for topic in (settings.topic(Topic.RESPONSES), *topics):
        found.update(source_of(answer) for answer in await visible(log, topic))
    return found


async def orders(log: MemoryLog, settings: Settings) -> dict[int, list[int]]:
    """The source offsets of the answers on `responses`, by source partition, as they stand."""
    found: dict[int, list[int]] = defaultdict(list)
    for answer in await visible(log, settings.topic(Topic.RESPONSES)):
        partition, offset = source_of(answer)
        found[partition].append(offset)
    return found
