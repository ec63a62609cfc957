"""Deployments whose broker stops, moves, slows down, hangs up or refuses keep answering requests.

Each trouble is met under the guarantee that has the harder way through it, or under both; the chaos
suite draws its own. What several brokers are needed for is in `test_broker_trouble.py`.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from headrace.config import KafkaSettings
from headrace.log.errors import LogUnavailable
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import Committed, Consumer, Producer, Record, TopicInfo, TopicPartition
from headrace.tools.local_kafka import LocalKafka, ScramTls
from headrace.topics import Topic
from tests.chaos.cluster import running_cluster
from tests.support.broker import SCRAM_PASSWORD, SCRAM_USER
from tests.support.conditions import eventually
from tests.support.deployments import (
    ALL,
    GUARANTEES,
    ONE_NODE,
    administration,
    deployment,
    deployments,
    require_nothing_lost,
    settings_for,
    unready,
)
from tests.support.logs import RecordingListener, polling, values, write, write_to
from tests.support.processes import Process, create_topics
from tests.support.tcp_proxy import HOST, TcpProxy
from tests.support.traffic import Traffic

BUSY = 0.2
"""The share of a core that a process may use while it waits for brokers. A loop without pauses
would use all of it; 0.04 is usual, most of which it uses while it waits for requests, too.
"""

EACH_GUARANTEE = pytest.mark.parametrize("guarantee", GUARANTEES)
AT_LEAST_ONCE = pytest.mark.parametrize("guarantee", ["at_least_once"])
EXACTLY_ONCE = pytest.mark.parametrize("guarantee", ["exactly_once"])

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_outage_of_only_broker_loses_no_request(
    kafka_installed: None, unique_name: str
) -> None:
    """Processes say that they are not ready, wait without being busy, and go on afterwards."""
    async with (
        LocalKafka() as cluster,
        deployments(cluster.bootstrap_servers, unique_name, ONE_NODE) as deployed,
    ):
        cluster.kill_node()
        down_s, used_s = time.monotonic(), [each.process.cpu_s for each in deployed]
        for each in deployed:
            await unready(each.process, deadline_s=60)
        took_s = time.monotonic() - down_s
        busy = [
            (each.process.cpu_s - before_s) / took_s
            for each, before_s in zip(deployed, used_s, strict=True)
        ]
        await cluster.start_node()
        for each in deployed:
            await each.traffic.flows()
            await eventually(each.process.is_ready, deadline_s=30, recheck_s=0.2)
            await each.traffic.all_answered()
    for each in deployed:
        each.require_nothing_lost()
    assert max(busy) < BUSY


@EXACTLY_ONCE
async def test_slow_dropping_network_loses_no_request(
    kafka_installed: None, unique_name: str, guarantee: str
) -> None:
    """Delay, cut connections and a silence delay requests, and lose none."""
    async with (
        running_cluster() as cluster,
        deployment(cluster.proxied, unique_name, guarantee, ONE_NODE, outside=cluster.direct) as (
            process,
            traffic,
        ),
    ):
        cluster.proxy.delay_s = 0.2
        await traffic.flows(50)
        cluster.proxy.delay_s = 0.0
        for _ in range(3):
            await cluster.proxy.cut()
            await traffic.flows()
        cluster.proxy.pause()
        await unready(process, 30)
        cluster.proxy.resume()
        await traffic.flows()
        await traffic.all_answered()
    require_nothing_lost(traffic, guarantee)


@AT_LEAST_ONCE
async def test_expiring_logins_lose_no_request(
    kafka_installed: None, unique_name: str, guarantee: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that hangs up on each connection after three seconds loses and stops nothing."""
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dheadrace.connections=DEBUG")
    security = ScramTls({SCRAM_USER: SCRAM_PASSWORD})
    async with LocalKafka(
        security=security, properties={"connections.max.reauth.ms": "3000"}
    ) as cluster:
        login = {
            "KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
            "KAFKA__SASL_MECHANISM": "SCRAM-SHA-512",
            "KAFKA__SASL_USERNAME": SCRAM_USER,
            "KAFKA__SASL_PASSWORD": SCRAM_PASSWORD,
            "KAFKA__SSL_CA_FILE": str(cluster.ca_file),
        }
        async with deployment(
            cluster.bootstrap_servers,
            unique_name,
            guarantee,
            ONE_NODE | login,
            outside=cluster.plaintext_bootstrap_servers,
        ) as (_, traffic):
            async with asyncio.timeout(60):
                while set(expired_in(cluster)) < {"FETCH", "HEARTBEAT", "PRODUCE", "OFFSET_COMMIT"}:
                    await traffic.flows()
            await traffic.flows()
            await traffic.all_answered()
    require_nothing_lost(traffic, guarantee)


def expired_in(cluster: LocalKafka) -> list[str]:
    """Return the kind of the late request for each connection cut after its login expired."""
    written = cluster.node().log_file.read_text("utf-8", "replace")
    return re.findall(r"Disconnecting expired channel: .*?apiKey=(\w+)", written)


@EACH_GUARANTEE
async def test_reply_topic_too_small_for_one_answer_fails_only_it(
    kafka: LocalKafka, unique_name: str, guarantee: str
) -> None:
    """The one that does not fit is answered with `TOO_LARGE`, and the others as ever."""
    servers = kafka.bootstrap_servers
    async with deployment(servers, unique_name, guarantee, ONE_NODE) as (_, traffic):
        async with administration(servers) as admin:
            smaller = {"max.message.bytes": "2000"}
            topic = f"{unique_name}.{Topic.RESPONSES}"
            await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, smaller)])
        await traffic.flows()
        await traffic.send_one([("x-note", b"copied to the answer" * 500)])
        await eventually(lambda: traffic.codes["TOO_LARGE"], deadline_s=30)
        await traffic.flows()
        await traffic.all_answered()
    assert set(traffic.codes) == {"ok", "TOO_LARGE"}
    assert traffic.codes["ok"] >= traffic.sent


@AT_LEAST_ONCE
async def test_deleted_responses_topic_ends_process_and_loses_no_request(
    kafka: LocalKafka, unique_name: str, guarantee: str
) -> None:
    """The process ends and names it; once there is one again, its successor answers the rest."""
    servers, topic = kafka.bootstrap_servers, f"{unique_name}.{Topic.RESPONSES}"
    async with deployment(servers, unique_name, guarantee, ONE_NODE) as (process, traffic):
        await traffic.all_answered()
        async with administration(servers) as admin:
            await admin.delete_topics([topic])
        await traffic.send_one([])
        assert await process.wait() == 1
        assert f"{topic}/0: expected a topic with this partition" in process.output
    settings = settings_for(servers, unique_name, guarantee, ONE_NODE)
    await create_topics(settings)
    async with Traffic(servers, unique_name) as later, Process(ALL, settings):
        await later.all_answered()
        await eventually(lambda: later.counts[-1] == 1)
    assert set(later.codes) == {"ok"}


async def test_silently_lost_connections_cost_no_membership(
    kafka_installed: None, unique_name: str
) -> None:
    """A member finds out within the request timeout, and within half of its session."""
    partition = TopicPartition(unique_name, 0)
    seen: list[Record] = []
    listener = RecordingListener()
    async with running_cluster() as cluster:
        settings = KafkaSettings(
            bootstrap_servers=cluster.proxied, request_timeout_ms=2000, session_timeout_ms=6000
        )
        async with (
            KafkaLog(KafkaSettings(bootstrap_servers=cluster.direct)) as direct,
            KafkaLog(settings) as log,
        ):
            await direct.create_topics([TopicInfo(unique_name, 1, {})], replication_factor=1)
            member = log.member(unique_name, [unique_name], listener)
            async with member, polling(member, seen):
                await eventually(lambda: listener.held == {partition})
                assignments = listener.assignments
                cluster.proxy.lose_connections()
                await write_to(direct, partition, b"after")
                await eventually(lambda: values(seen) == [b"after"])
                await eventually(lambda: _is_committed(member, partition))
                assert listener.assignments == assignments


async def _is_committed(member: Consumer, partition: TopicPartition) -> bool:
    try:
        await member.commit({partition: Committed(1)})
    except LogUnavailable:
        return False
    return True


async def test_changed_broker_addresses_lose_no_request(
    kafka_installed: None, tmp_path: Path, unique_name: str
) -> None:
    """A member and a producer ask the bootstrap servers again, and go on with the new ones."""
    partition = TopicPartition(unique_name, 0)
    seen: list[Record] = []
    async with TcpProxy() as names, AsyncExitStack() as entered:
        servers = f"{HOST}:{names.port}"
        log = await entered.enter_async_context(
            KafkaLog(KafkaSettings(bootstrap_servers=servers, session_timeout_ms=6000))
        )
        async with LocalKafka(tmp_path) as former:
            names.upstream = former_port = _port(former)
            await log.create_topics([TopicInfo(unique_name, 1, {})], replication_factor=1)
            member = await entered.enter_async_context(
                log.member(unique_name, [unique_name], RecordingListener())
            )
            producer = await entered.enter_async_context(log.producer())
            await write(producer, partition, b"before")
        async with polling(member, seen), LocalKafka(tmp_path) as moved:
            names.upstream = _port(moved)
            assert names.upstream != former_port
            await eventually(lambda: _is_written(producer, partition), deadline_s=60)
            await eventually(lambda: values(seen)[-1:] == [b"after"], deadline_s=60)
    assert values(seen)[0] == b"before"


def _port(cluster: LocalKafka) -> int:
    return int(cluster.bootstrap_servers.rpartition(":")[2])


async def _is_written(producer: Producer, partition: TopicPartition) -> bool:
    try:
        await write(producer, partition, b"after")
    except LogUnavailable:
        return False
    return True
