"""`headrace offsets` against a real broker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from headrace.cli.outcome import Exit
from headrace.config import KafkaSettings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import Committed, TopicInfo, TopicPartition
from headrace.tools.local_kafka import LocalKafka
from tests.support.command_line import Call
from tests.support.conditions import eventually
from tests.support.logs import RecordingListener, polling, write_to

STUCK = AckedOffsets(3, [(4, 9)])


class Deployment:
    """A namespace of a test's own, with ten requests in one of two partitions."""

    def __init__(self, kafka: LocalKafka, namespace: str, directory: Path) -> None:
        self.namespace = namespace
        self.topic = f"{namespace}.requests"
        self.config = directory / "test.toml"
        self.servers = kafka.bootstrap_servers

    def configure(self, guarantee: str) -> None:
        self.config.write_text(
            f'namespace = "{self.namespace}"\n[delivery]\nguarantee = "{guarantee}"\n'
            f'[kafka]\nbootstrap_servers = "{self.servers}"\n'
        )

    def log(self) -> KafkaLog:
        return KafkaLog(KafkaSettings(bootstrap_servers=self.servers))

    async def set_up(self) -> None:
        async with self.log() as log:
            await log.create_topics([TopicInfo(self.topic, 2, {})], replication_factor=1)
            await write_to(log, TopicPartition(self.topic, 0), *[b"v"] * 10)
            await self.commit(STUCK.committable())

    async def commit(self, committed: Committed) -> None:
        async with self.log() as log:
            await log.commit(self.namespace, {TopicPartition(self.topic, 0): committed})

    async def committed(self) -> Committed | None:
        partition = TopicPartition(self.topic, 0)
        async with self.log() as log:
            return (await log.committed(self.namespace, [partition]))[partition]


@pytest.fixture(params=["at_least_once", "exactly_once"])
def deployment(
    request: pytest.FixtureRequest, kafka: LocalKafka, unique_name: str, tmp_path: Path
) -> Deployment:
    """With either guarantee."""
    deployment = Deployment(kafka, unique_name[-40:].strip("-."), tmp_path)
    deployment.configure(request.param)
    asyncio.run(deployment.set_up())
    return deployment


def test_offsets_command_shows_progress(call: Call, deployment: Deployment) -> None:
    """Base, answered ranges and lag of each partition, in a table and as JSON."""
    config = ("--config", str(deployment.config))
    shown = call(*config, "offsets", "show")
    assert shown.exit_code == Exit.DONE, shown.output
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert rows[2] == ["0", "3", "10", "7", "2", "runs", "4-8"]
    assert rows[3] == ["1", "-", "0", "0", "0", "none", "-"]
    document = json.loads(call(*config, "offsets", "show", "--json").stdout)
    assert document["group"] == deployment.namespace
    assert document["partitions"][0]["answered"] == [[4, 9]]


async def test_open_transaction_that_hides_requests_is_reported(
    call: Call, deployment: Deployment
) -> None:
    """Otherwise there would be neither lag nor answers, and nothing to see of it."""
    command = ("--config", str(deployment.config), "offsets", "show")
    async with (
        AIOKafkaProducer(
            bootstrap_servers=deployment.servers, transactional_id=deployment.namespace
        ) as producer,
        producer.transaction(),
    ):
        await producer.send_and_wait(deployment.topic, b"v", partition=1)
        shown = await asyncio.to_thread(call, *command)
    assert shown.exit_code == Exit.DONE, shown.output
    assert shown.stdout.splitlines()[3].split()[:4] == ["1", "-", "0", "0"]
    assert "partition 1: an open transaction of another producer hides the" in shown.stderr


def test_base_beyond_end_is_reported(call: Call, deployment: Deployment) -> None:
    """A partition that has lost its end shows no lag, though requests were lost."""
    asyncio.run(deployment.commit(Committed(30)))
    shown = call("--config", str(deployment.config), "offsets", "show")
    assert shown.exit_code == Exit.DONE
    assert "partition 0: the base 30 is beyond the end 10: " in shown.stderr


def test_offsets_command_resets_progress(call: Call, deployment: Deployment) -> None:
    """A dry run says the same as the reset after it, and only that one commits."""
    reset = ("--config", str(deployment.config), "offsets", "reset", "--to", "4")
    dry = call(*reset, "--partition", "0", "--dry-run")
    assert asyncio.run(deployment.committed()) == STUCK.committable()
    done = call(*reset, "--partition", "0")
    assert done.exit_code == Exit.DONE, done.output
    assert dry.stdout == done.stdout
    assert "partition 0: 3 -> 9: 1 unanswered are passed over" in done.stdout
    assert asyncio.run(deployment.committed()) == Committed(9)


def test_metadata_of_another_tool_is_reported(call: Call, deployment: Deployment) -> None:
    """`show` fails with the text, since `run` would refuse it; JSON says it too."""
    asyncio.run(deployment.commit(Committed(3, "another tool's")))
    shown = call("--config", str(deployment.config), "offsets", "show", "--json")
    assert shown.exit_code == Exit.FAILED
    assert "another tool's" in shown.stderr
    assert json.loads(shown.stdout)["partitions"][0]["metadata"] == "unreadable"


async def test_reset_is_refused_while_stage_runs(call: Call, deployment: Deployment) -> None:
    """The refusal names the group and the member, and nothing is committed."""
    listener = RecordingListener()
    async with (
        deployment.log() as log,
        log.member(deployment.namespace, [deployment.topic], listener) as member,
        polling(member, []),
    ):
        await eventually(lambda: listener.held)
        arguments = ("--config", str(deployment.config), "offsets", "reset", "--to", "earliest")
        refused = await asyncio.to_thread(call, *arguments)
        assert refused.exit_code == Exit.FAILED
        assert member.member_id in refused.stderr
    assert await deployment.committed() == STUCK.committable()


def test_offsets_need_broker(call: Call, tmp_path: Path) -> None:
    """The embedded log of another process cannot be seen: wrong usage, and no traceback."""
    config = tmp_path / "test.toml"
    config.write_text("")
    shown = call("--config", str(config), "offsets", "show")
    assert (shown.exit_code, shown.stdout) == (Exit.USAGE, "")
