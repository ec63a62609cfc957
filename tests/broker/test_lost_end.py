"""Requests at the end of a partition that a real Kafka has lost, and topics that are deleted."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from headrace.config import KafkaSettings, Settings
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import Committed, Log, NewRecord, TopicInfo, TopicPartition
from headrace.protocol.codec import decode_response
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics
from headrace.tools.local_kafka import LocalKafka
from headrace.topics import STAGES
from tests.support.conditions import eventually
from tests.support.logs import read
from tests.support.pipelines import digits_request, settings_of

REQUESTS = TopicPartition("headrace.requests", 0)
RESPONSES = TopicPartition("headrace.responses", 0)
SENT, LOST = 20, 3


def lose_last_batches(directory: Path, partition: TopicPartition, count: int) -> None:
    """Cut batches off the log of a node that is stopped; what is derived from it goes as well."""
    (folder,) = directory.rglob(str(partition).replace("/", "-"))
    (segment,) = folder.glob("*.log")
    content = segment.read_bytes()
    starts: list[int] = []
    place = 0
    while place < len(content):
        starts.append(place)
        _, size_bytes = struct.unpack_from(">qi", content, place)
        place += 12 + size_bytes
    segment.write_bytes(content[: starts[-count]])
    for derived in ("*.index", "*.timeindex", "*.snapshot"):
        for path in folder.glob(derived):
            path.unlink()


class Deployment:
    """A log with all topics, of one partition each, and a caller that numbers its requests."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self._settings = settings
        self._log = log
        self._sent = 0

    async def send(self, count: int) -> None:
        """Send so many requests, each in a batch of its own."""
        async with self._log.producer() as producer:
            for number in range(self._sent, self._sent + count):
                record = NewRecord(None, digits_request(str(number)))
                for sent in await producer.send(REQUESTS, [record]):
                    await sent.acknowledged
        self._sent += count

    async def committed(self, offset: int) -> None:
        """Wait until this offset is committed."""

        async def is_committed() -> bool:
            found = await self._log.committed(self._settings.namespace, [REQUESTS])
            return found[REQUESTS] == Committed(offset)

        await eventually(is_committed, recheck_s=0.1, deadline_s=60)

    async def counts(self) -> Counter[int]:
        """How many answers each request has."""
        async with self._log.reader([RESPONSES]) as reader:
            reader.seek(RESPONSES, 0)
            found = await read(reader, self._sent)
        return Counter(int(decode_response(each.headers, each.value).id or -1) for each in found)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("meanwhile", ["running", "stopped"])
async def test_log_end_lost_by_broker_repeats_no_answer(
    kafka_installed: None, tmp_path: Path, meanwhile: str
) -> None:
    """Records left in the topic are not answered again, and records written next are answered."""
    async with LocalKafka(tmp_path / "kafka") as kafka:
        reach = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
        settings = settings_of(tmp_path / "models").model_copy(update={"kafka": reach})
        async with KafkaLog(reach) as log:
            topics = [plan._replace(partitions=1) for plan in plan_topics(settings).values()]
            await log.create_topics(topics, replication_factor=1)
            deployment = Deployment(settings, log)
            async with running(Pipeline(settings, log, STAGES)):
                await deployment.send(SENT)
                await deployment.committed(SENT)
                if meanwhile == "running":
                    await kafka.stop_node()
                    lose_last_batches(tmp_path / "kafka", REQUESTS, LOST)
                    await kafka.start_node()
                    await deployment.committed(SENT - LOST)
                    await deployment.send(LOST + 1)
                    await deployment.committed(SENT + 1)
            if meanwhile == "stopped":
                await kafka.stop_node()
                lose_last_batches(tmp_path / "kafka", REQUESTS, LOST)
                await kafka.start_node()
                async with running(Pipeline(settings, log, STAGES)):
                    await deployment.send(LOST + 1)
                    await deployment.committed(SENT + 1)
            counts = await deployment.counts()

    assert counts == Counter(range(SENT + LOST + 1))


async def test_deleting_topic_deletes_its_committed_offsets(
    kafka: LocalKafka, unique_name: str
) -> None:
    """An offset committed beyond the end of a topic means therefore that it lost records."""
    topic = TopicInfo(unique_name, 1, {})
    partition = TopicPartition(unique_name, 0)
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    async with KafkaLog(settings) as log:
        await log.create_topics([topic], replication_factor=1)
        await log.commit(unique_name, {partition: Committed(100, "1rAQE")})
        await admin.start()
        try:
            await admin.delete_topics([unique_name])
        finally:
            await admin.close()

        async def is_forgotten() -> bool:
            return (await log.committed(unique_name, [partition]))[partition] is None

        await eventually(is_forgotten, recheck_s=0.1)

        async def is_made_anew() -> bool:
            return (await log.create_topics([topic], replication_factor=1))[unique_name]

        await eventually(is_made_anew, recheck_s=0.1)
        assert (await log.committed(unique_name, [partition]))[partition] is None
