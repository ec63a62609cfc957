"""Dead letters for tests: a request that a limit made one, and the places that it names."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import Settings, make_settings
from headrace.log.port import Log, NewRecord, Record, TopicInfo, TopicPartition
from headrace.protocol.codec import encode_request
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics
from headrace.topics import Topic
from tests.support.conditions import eventually
from tests.support.logs import read, write_to
from tests.support.models import add_version, digits

STRICT_BYTES = 1024
ROWS = 8
"""Rows of 64 FP32 pixels in a request: together twice `STRICT_BYTES`."""

CORRELATION_ID = b"\x00order 7"


def serving(tmp_path: Path, namespace: str, max_request_bytes: int, **more: Any) -> Settings:
    """Settings with a model and this limit; the model is made where it is not there yet."""
    if not (tmp_path / "models").exists():
        add_version(tmp_path / "models", "digits", 1, digits())
    return make_settings(
        {
            "namespace": namespace,
            "models": {"repository": tmp_path / "models"},
            "limits": {"max_request_bytes": max_request_bytes},
            "topics": {"partitions": 2},
            **more,
        }
    )


def reply_topic(settings: Settings) -> str:
    """A caller's own topic that answers may go to."""
    return f"{settings.namespace}.replies"


def large_request(settings: Settings, *headers: tuple[str, bytes]) -> NewRecord:
    """A sound request with more bytes than the strict limit takes, answered to `replies`."""
    pixels = np.full((ROWS, 64), 0.5, np.float32)
    return NewRecord(
        b"the key",
        encode_request("application/msgpack", "digits", {"pixels": pixels}, id="7"),
        [
            ("kafka_replyTopic", reply_topic(settings).encode()),
            ("kafka_correlationId", CORRELATION_ID),
            ("order-line", b"of the caller's"),
            *headers,
        ],
    )


def letter_headers(topic: str, partition: int, offset: int, **changed: bytes) -> dict[str, bytes]:
    """Return the headers of a dead letter; `code`, `message`, `stage`, `attempt` can be set."""
    return {
        "kafka_dlt-original-topic": topic.encode(),
        "kafka_dlt-original-partition": struct.pack(">i", partition),
        "kafka_dlt-original-offset": struct.pack(">q", offset),
        "kafka_dlt-original-timestamp": struct.pack(">q", 1_700_000_000_000),
        "kafka_dlt-exception-fqcn": changed.get("code", b"TOO_LARGE"),
        "kafka_dlt-exception-message": changed.get("message", b"value: expected less"),
        "x-stage": changed.get("stage", b"ingest"),
        "x-attempt": changed.get("attempt", b"1"),
    }


async def create_topics(log: Log, settings: Settings) -> None:
    """Headrace's topics, and the caller's."""
    topics = [*plan_topics(settings).values(), TopicInfo(reply_topic(settings), 1, {})]
    await log.create_topics(topics, replication_factor=1)

    async def are_known() -> bool:
        return None not in (await log.describe_topics([each.name for each in topics])).values()

    await eventually(are_known, what="all topics are described")


async def make_dead_letter(log: Log, settings: Settings, *records: NewRecord) -> list[Record]:
    """Serve with these settings until each of the records, sent to partition 1, is a letter."""
    requests = TopicPartition(settings.topic(Topic.REQUESTS), 1)
    letters = TopicPartition(settings.topic(Topic.DEAD_LETTERS), 1)
    async with log.reader([letters]) as reader, running(Pipeline(settings, log)):
        await write_to(log, requests, *records)
        return await read(reader, len(records))


async def records_of(log: Log, topic: str, partitions: int) -> list[Record]:
    """All that a topic holds now."""
    names = [TopicPartition(topic, number) for number in range(partitions)]
    async with log.reader(names) as reader:
        ends = await reader.end_offsets(names)
        begins = await reader.beginning_offsets(names)
        for name in names:
            reader.seek(name, begins[name])
        return await read(reader, sum(ends.values()) - sum(begins.values()))
