"""Deployments of which some of several brokers stop keep answering requests.

One cluster of three nodes serves all tests; each leaves all three running and in sync. What one
broker can do is in `test_one_broker_trouble.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.admin import NewTopic

from headrace.config import KafkaSettings
from headrace.log.kafka.cluster import survey
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import Committed, TopicInfo, TopicPartition
from headrace.tools.local_kafka import LocalKafka
from headrace.topics import Topic
from tests.support.broker import running
from tests.support.conditions import eventually
from tests.support.deployments import (
    administration,
    all_flow,
    deployment,
    deployments,
    require_nothing_lost,
)
from tests.support.flooding import REQUESTS, flooding
from tests.support.logs import PATIENT, RecordingListener, read, write_to
from tests.support.traffic import PARTITIONS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(kafka_installed: None) -> Iterator[LocalKafka]:
    """Three nodes; acknowledged records lie on two of them at least."""
    yield from running(LocalKafka(nodes=3))


async def in_sync(cluster: LocalKafka, namespace: str) -> None:
    """Wait until every partition of the namespace's topics has three replicas in sync."""
    settings = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
    topics = [f"{namespace}.{topic}" for topic in (Topic.REQUESTS, Topic.RESPONSES)]

    async def are_in_sync() -> bool:
        found = await survey(settings, topics, namespace, namespace)
        return all(each.in_sync == 3 for each in found.topics.values())

    await eventually(are_in_sync, deadline_s=60, recheck_s=0.2)


async def test_rolling_restart_with_killed_coordinator_loses_no_request(
    cluster: LocalKafka, unique_name: str
) -> None:
    """One node after the other stops and comes back, the group's coordinator by a kill; leaders and
    coordinator move, and requests go on being answered.
    """
    servers, guarantee = cluster.bootstrap_servers, "exactly_once"
    async with deployment(servers, unique_name, guarantee) as (_, traffic):
        coordinator = await _coordinator(servers, unique_name)
        for node in sorted(cluster.node_ids, key=lambda node: node != coordinator):
            await in_sync(cluster, unique_name)
            if node == coordinator:
                cluster.kill_node(node)
                await traffic.flows(50)
                moved_to = await _coordinator(servers, unique_name)
            else:
                await cluster.stop_node(node)
                await traffic.flows()
            await cluster.start_node(node)
        await traffic.all_answered()
    assert moved_to != coordinator
    require_nothing_lost(traffic, guarantee)


async def _coordinator(servers: str, group: str) -> int:
    async with administration(servers) as admin:
        return int(await admin.find_coordinator(group))


async def test_leaderless_reply_partition_delays_no_other_answers(
    cluster: LocalKafka, unique_name: str
) -> None:
    """The answers for it wait until it has one, and no others with them."""
    servers, lost = cluster.bootstrap_servers, cluster.node_ids[-1]
    async with deployments(servers, unique_name) as deployed:
        replies = [TopicPartition(f"{each.namespace}.mine", 0) for each in deployed]
        places = {0: [lost]}
        async with administration(servers) as admin:
            await admin.create_topics(
                [NewTopic(each.topic, -1, -1, replica_assignments=places) for each in replies]
            )
        for each, mine in zip(deployed, replies, strict=True):
            await in_sync(cluster, each.namespace)
            await each.traffic.send_one([("kafka_replyTopic", mine.topic.encode())])
        await all_flow(deployed)
        await cluster.stop_node(lost)
        await all_flow(deployed)
        for _ in range(3):
            for each, mine in zip(deployed, replies, strict=True):
                await each.traffic.send_one([("kafka_replyTopic", mine.topic.encode())])
            await all_flow(deployed, 50)
        await cluster.start_node(lost)
        for each, mine in zip(deployed, replies, strict=True):
            log = KafkaLog(KafkaSettings(bootstrap_servers=servers))
            async with log, log.reader([mine]) as reader:
                reader.seek(mine, 0)
                assert len(await read(reader, 4)) == 4
            await each.traffic.all_answered()
    for each in deployed:
        each.require_nothing_lost()


async def test_stalled_reply_partition_pauses_reading_within_memory_bound(
    cluster: LocalKafka, unique_name: str, tmp_path: Path
) -> None:
    """A flood waits in the log while a reply partition has no leader, and is answered when it
    has one again.
    """
    replies, lost = f"{unique_name}.replies", cluster.node_ids[-1]
    async with administration(cluster.bootstrap_servers) as admin:
        await admin.create_topics([NewTopic(replies, -1, -1, replica_assignments={0: [lost]})])
    async with flooding(cluster, unique_name, tmp_path) as flooded:
        flooded.gate.touch()
        await flooded.send(replies, count=PARTITIONS)
        await flooded.until_holds(replies, 1, PARTITIONS)

        cluster.kill_node(lost)
        await flooded.send(replies, count=REQUESTS // 4)
        await flooded.check_budget()

        await cluster.start_node(lost)
        await flooded.until_holds(replies, 1, PARTITIONS + REQUESTS // 4)
        flooded.check_memory()


async def test_committed_offsets_are_read_from_coordinator(
    cluster: LocalKafka, unique_name: str
) -> None:
    """With several brokers each group has its own coordinator, and each answer is complete."""
    partition = TopicPartition(unique_name, 0)
    settings = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
    async with KafkaLog(settings, tuning=PATIENT) as log:
        await log.create_topics([TopicInfo(unique_name, 1, {})], replication_factor=3)
        await write_to(log, partition, *([b"v"] * 10))
        groups = [f"{unique_name}-{number}" for number in range(6)]
        for number, group in enumerate(groups):
            async with log.member(group, [unique_name], RecordingListener()) as member:
                await read(member, 10)
                await member.commit({partition: Committed(number, f"of {group}")})
        found = [(await log.committed(group, [partition]))[partition] for group in groups]
        assert found == [Committed(number, f"of {group}") for number, group in enumerate(groups)]
