"""A record of a later release, met by a process on a real Kafka."""

from __future__ import annotations

from pathlib import Path

import msgpack

from headrace.config import KafkaSettings
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import TopicPartition
from headrace.tools.local_kafka import LocalKafka
from tests.support.logs import PATIENT, write_to
from tests.support.models import add_version, digits
from tests.support.processes import Process, create_topics, environment


async def test_record_of_later_release_ends_process_with_one_line_and_stays_unread(
    kafka: LocalKafka, unique_name: str, tmp_path: Path
) -> None:
    """The line says what to upgrade; the record is left to a process that can read it."""
    add_version(tmp_path, "digits", 1, digits())
    settings = environment(kafka.bootstrap_servers, unique_name, tmp_path)
    await create_topics(settings)
    items = TopicPartition(f"{unique_name}.items", 0)
    record = msgpack.packb({"format": 4, "rows": {"in": "another form"}})
    kafka_settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)

    async with (
        KafkaLog(kafka_settings, tuning=PATIENT) as log,
        Process("batcher", settings) as process,
    ):
        await write_to(log, items, record)

        assert await process.wait() == 1
        told = [line for line in process.output.splitlines() if not line.startswith("{")]
        committed = (await log.committed(f"{unique_name}.batcher", [items]))[items]

    assert told == [
        "headrace: internal record: expected a format up to 3, got 4: a later release wrote it; "
        "upgrade the processes that read a topic before those that write it"
    ]
    assert committed is None or committed.offset == 0
