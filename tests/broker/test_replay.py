"""`headrace replay` on a real broker: counts, live groups, ends, kills."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from headrace.config import KafkaSettings
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import Committed, Log, Record, TopicInfo, TopicPartition
from headrace.tools.local_kafka import LocalKafka
from headrace.tools.replay.recording import Selection
from headrace.tools.replay.topic_recording import open_topic
from tests.support.conditions import eventually
from tests.support.logs import RecordingListener, polling
from tests.support.processes import environment
from tests.support.recordings import (
    Ended,
    ended,
    originals_of,
    recorded,
    replay,
    replay_process,
    write_recorded,
)

RECORDS = 5000
PARTITIONS = 4
SPAN_S = 2.5

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def log(kafka: LocalKafka, unique_name: str) -> AsyncIterator[Log]:
    """The shared broker, with this test's source of four partitions and target of three."""
    async with KafkaLog(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as log:
        topics = [
            TopicInfo(f"{unique_name}.requests", PARTITIONS, {}),
            TopicInfo(f"{unique_name}.copies", 3, {}),
        ]
        await log.create_topics(topics, replication_factor=1)
        yield log


@pytest.fixture
def settings(kafka: LocalKafka, unique_name: str) -> dict[str, str]:
    """The environment of a command in this test's namespace."""
    return environment(kafka.bootstrap_servers, unique_name, Path())


async def record_requests(log: Log, name: str, records: int = RECORDS) -> list[str]:
    """Requests that came evenly within `SPAN_S`; returns what copies call them."""
    requests = [
        recorded(number, PARTITIONS)._replace(
            timestamp=1_700_000_000_000 + int(number * SPAN_S * 1000 / records)
        )
        for number in range(records)
    ]
    await write_recorded(log, f"{name}.requests", requests)
    return [f"{name}.requests/{each.partition}/{each.offset}" for each in requests]


async def copies(log: Log, name: str) -> list[Record]:
    """All that is in the target."""
    async with open_topic(log, f"{name}.copies", Selection()) as recording:
        return [record async for record in recording]


@pytest.mark.parametrize("speed", ["4", "max"])
async def test_every_record_is_replayed_once(
    log: Log, unique_name: str, settings: dict[str, str], speed: str
) -> None:
    """At any speed, 5,000 requests become 5,000 copies, each partition's in its order."""
    expected = await record_requests(log, unique_name)

    done = await replay(
        ["send", "--to", f"{unique_name}.copies", "--speed", speed, "--json"], settings
    )

    found = originals_of(await copies(log, unique_name))
    assert done.code == 0, done.stderr
    assert (done.json["records"], sorted(found)) == (RECORDS, sorted(expected))
    for partition in range(PARTITIONS):
        prefix = f"{unique_name}.requests/{partition}/"
        offsets = [int(each.removeprefix(prefix)) for each in found if each.startswith(prefix)]
        assert offsets == sorted(offsets)


async def test_replay_does_not_touch_group_of_source(
    log: Log, unique_name: str, settings: dict[str, str]
) -> None:
    """While a group reads the source, a replay neither rebalances it nor moves its offsets."""
    await record_requests(log, unique_name, 1000)
    topic = f"{unique_name}.requests"
    partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    listener = RecordingListener()
    seen: list[Record] = []
    async with log.member(unique_name, [topic], listener) as member, polling(member, seen):
        await eventually(lambda: len(seen) == 1000)
        offsets = {partition: Committed(100 + partition.partition) for partition in partitions}
        await member.commit(offsets)

        done = await replay(["send", "--to", f"{unique_name}.copies", "--speed", "max"], settings)

        assert done.code == 0, done.stderr
        assert await log.committed(unique_name, partitions) == offsets
        assert (listener.assignments, listener.held) == (1, frozenset(partitions))


async def test_replay_killed_and_resumed_twice_writes_each_record_once(
    log: Log, unique_name: str, settings: dict[str, str], tmp_path: Path
) -> None:
    """A run ended by SIGKILL goes on from its checkpoint; nothing is missing or there twice."""
    expected = await record_requests(log, unique_name)
    arguments = [
        "send",
        "--to",
        f"{unique_name}.copies",
        "--checkpoint",
        str(tmp_path / "checkpoint"),
    ]

    for until in (800, 3500):
        process = await replay_process([*arguments, "--rate", "1500"], settings)
        await eventually(partial(_has, log, unique_name, until))
        process.kill()
        assert (await ended(process)).code != 0
    killed_at = len(await copies(log, unique_name))
    done = await replay([*arguments, "--speed", "max", "--json"], settings)
    again = await replay([*arguments, "--speed", "max", "--json"], settings)

    assert killed_at < RECORDS
    assert done.code == 0, done.stderr
    assert (done.json["resumed"], done.json["records"]) == (True, RECORDS - killed_at)
    assert Counter(originals_of(await copies(log, unique_name))) == Counter(expected)
    assert (again.code, again.json["records"]) == (0, 0)


async def _has(log: Log, name: str, count: int) -> bool:
    partitions = [TopicPartition(f"{name}.copies", number) for number in range(3)]
    async with log.reader(partitions) as reader:
        return sum((await reader.end_offsets(partitions)).values()) >= count


async def test_recording_ends_at_last_stable_offset(
    kafka: LocalKafka, log: Log, unique_name: str, settings: dict[str, str]
) -> None:
    """Markers do not keep it waiting; aborted records, and those of an open transaction, are not
    part of it.
    """
    topic = f"{unique_name}.requests"
    producer = AIOKafkaProducer(
        bootstrap_servers=kafka.bootstrap_servers, transactional_id=unique_name
    )
    await producer.start()
    try:
        for value in (b"committed", b"aborted", b"open"):
            await producer.begin_transaction()
            await (await producer.send(topic, value, partition=0))
            if value == b"committed":
                await producer.commit_transaction()
            elif value == b"aborted":
                await producer.abort_transaction()
        done = await replay(["count", "--json"], settings)
        await producer.abort_transaction()
    finally:
        await producer.stop()

    assert done.code == 0, done.stderr
    assert [(each["records"], each["bytes"]) for each in done.json] == [(1, len(b"committed"))]


async def test_recording_saved_to_file_is_replayed(
    log: Log, unique_name: str, settings: dict[str, str], tmp_path: Path
) -> None:
    """A capture holds what the topic held, and its replay names the topic's records."""
    expected = await record_requests(log, unique_name, 1000)
    file = str(tmp_path / "requests.capture")

    saved = await replay(["save", file], settings)
    done = await replay(
        ["send", "--file", file, "--to", f"{unique_name}.copies", "--speed", "max"], settings
    )

    assert (saved.code, done.code) == (0, 0), saved.stderr + done.stderr
    assert sorted(originals_of(await copies(log, unique_name))) == sorted(expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["send", "--to", "no-such-topic"], "no-such-topic: expected a topic"),
        (["count", "--topic", "no-such-topic"], "no-such-topic: expected a topic"),
        (["count", "--partition", "9"], "expected a partition below 4, got 9"),
        (["count", "--from-offset", "9:3"], "expected a partition below 4, got 9"),
        (["count", "--until-offset", "9:3"], "expected a partition below 4, got 9"),
    ],
)
async def test_replay_of_missing_topic_or_partition_is_refused_in_one_line(
    log: Log, unique_name: str, settings: dict[str, str], arguments: list[str], said: str
) -> None:
    """A topic or partition that does not exist is wrong usage, by name."""
    done: Ended = await replay(arguments, settings)

    assert (done.code, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
