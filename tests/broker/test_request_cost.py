"""Requests to the broker that inference requests cost, counted without a clock.

Beside `tests/flow/test_guards.py`: ceilings on requests to the broker. Each is a system call here
and one for its answer, which cost what a whole request may, and as much again for the broker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.config import KafkaSettings, Settings, make_settings
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import NewRecord, Record, TopicInfo, TopicPartition
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics
from headrace.tools.local_kafka import LocalKafka
from headrace.topics import STAGES, Stage, Topic
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.logs import PATIENT, polling, read, write, write_to
from tests.support.models import add_version, digits
from tests.support.services import digits_value

REQUESTS = 20_000
APART_REQUESTS = 10_000
PARTITIONS = 4
BROKER_REQUESTS = 0.01
"""For each answer: a produce request has dozens of answers, and a fetch hundreds of records."""
APART_PRODUCE_REQUESTS = 0.02
"""For each answer, with each stage apart: items, batches, results and answers are written, and what
executors say of batches."""
APART_FETCHES = 0.03
"""Likewise, with those that waited in vain."""


@pytest.fixture
def settings(kafka: LocalKafka, unique_name: str, tmp_path: Path) -> Settings:
    """Return settings of a pipeline with the model `digits`."""
    add_version(tmp_path, "digits", 1, digits())
    return make_settings(
        {
            "namespace": unique_name,
            "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
            "topics": {"partitions": PARTITIONS},
            "models": {"repository": tmp_path},
        }
    )


async def fill(log: KafkaLog, topic: str, requests: int) -> None:
    """Requests in all partitions, acknowledged."""
    value = digits_value()
    async with log.producer() as producer:
        for partition in range(PARTITIONS):
            records = [NewRecord(None, value)] * (requests // PARTITIONS)
            for sent in await producer.send(TopicPartition(topic, partition), records):
                await sent.acknowledged


async def answer_all(
    settings: Settings, requests: int, *stages: Sequence[Stage]
) -> dict[str, float]:
    """Have a backlog answered by processes of these stages; requests of each kind to the broker,
    for each answer.
    """
    sent: Counter[str] = Counter()

    def count(api: str) -> None:
        sent[api] += 1

    assert settings.kafka is not None
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(KafkaLog(settings.kafka, on_request=count))
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        await fill(log, settings.topic(Topic.REQUESTS), requests)
        topic = settings.topic(Topic.RESPONSES)
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        pipelines = [Pipeline(settings, log, each) for each in stages]
        sent.clear()
        for pipeline in pipelines:
            await stack.enter_async_context(running(pipeline))
        totals = pipelines[-1].metrics.totals
        await eventually(
            lambda: sum(each["count"] for each in totals()["requests"]) >= requests,
            deadline_s=50.0,
            recheck_s=0.05,
        )
        counted = {api: count / requests for api, count in sent.items()}
        async with log.reader(partitions) as reader:
            assert sum((await reader.end_offsets(partitions)).values()) == requests
    return counted


async def test_broker_requests_per_request_stay_under_ceiling(settings: Settings) -> None:
    """A backlog is read, answered and committed with few requests to the broker."""
    counted = await answer_all(settings, REQUESTS, STAGES)

    assert sum(counted.values()) <= BROKER_REQUESTS, counted


async def test_broker_requests_of_separate_stages_stay_under_ceiling(settings: Settings) -> None:
    """Records that gather at a stage travel together, at each of the topics between the stages."""
    counted = await answer_all(settings, APART_REQUESTS, *[[stage] for stage in STAGES])

    assert counted["Produce"] <= APART_PRODUCE_REQUESTS, counted
    assert counted["Fetch"] <= APART_FETCHES, counted


async def test_idle_reader_fetches_more_rarely_and_still_gets_next_record(
    settings: Settings, unique_name: str
) -> None:
    """Beside a reader that is never idle, of the same topic. A record ends the fetch under way."""
    assert settings.kafka is not None
    counts = {"idle": 0, "busy": 0}
    tunings = {
        "idle": replace(PATIENT, idle_after_s=0.0, idle_fetch_max_wait_s=5.0),
        "busy": replace(PATIENT, idle_after_s=0.0, idle_fetch_max_wait_s=0.0),
    }
    partition = TopicPartition(unique_name, 0)
    seen: dict[str, list[Record]] = {name: [] for name in tunings}

    async with AsyncExitStack() as stack:
        for name, tuning in tunings.items():

            def count(api: str, name: str = name) -> None:
                counts[name] += api == "Fetch"

            log = KafkaLog(settings.kafka, tuning=tuning, on_request=count)
            log = await stack.enter_async_context(log)
            await log.create_topics([TopicInfo(unique_name, 1, {})], replication_factor=1)
            reader = await stack.enter_async_context(log.reader([partition]))
            await stack.enter_async_context(polling(reader, seen[name]))
        await eventually(lambda: counts["busy"] >= 40)

        assert counts["idle"] <= counts["busy"] / 2

        await write_to(log, partition, b"next")
        await eventually(lambda: all(seen.values()))
    assert [[record.value for record in records] for records in seen.values()] == [[b"next"]] * 2
    assert TUNING.kafka.idle_fetch_max_wait_s > TUNING.kafka.fetch_max_wait_s


async def test_record_sought_after_burst_does_not_wait_for_fetch_of_idle_reader(
    settings: Settings, unique_name: str
) -> None:
    """The fetch that follows a burst is sent at once; the reader is not idle any more."""
    assert settings.kafka is not None
    servers = settings.kafka.bootstrap_servers
    patient = KafkaSettings(bootstrap_servers=servers, request_timeout_ms=600_000)
    tuning = replace(PATIENT, idle_after_s=0.01, idle_fetch_max_wait_s=300.0)
    partition = TopicPartition(unique_name, 0)
    burst = [b"%d" % number for number in range(2 * TUNING.kafka.few_records)]

    async with KafkaLog(patient, tuning=tuning) as log:
        await log.create_topics([TopicInfo(unique_name, 1, {})], replication_factor=1)
        async with log.producer() as producer, log.reader([partition]) as reader:
            await write(producer, partition, b"first")
            await read(reader, 1)
            assert await reader.poll(0.2, 1) == {}  # it becomes idle
            assert await reader.poll(0.2, 1) == {}
            await write(producer, partition, *burst)
            await read(reader, len(burst))
            await log.describe_topics([unique_name])  # the next fetch is sent meanwhile
            reader.seek(partition, 0)

            assert (await read(reader, 1))[0].value == b"first"
