"""Deployments whose brokers stop, restart, move, slow down or hang up keep answering requests.

Each trouble is met under the guarantee that has the harder way through it, or under both; the chaos
suite draws its own. One cluster of three nodes serves the tests that only stop nodes and start them
again; each leaves all three running and in sync.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from headrace.config import KafkaSettings
from headrace.log.errors import LogUnavailable
from headrace.log.kafka.cluster import survey
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import Committed, Producer, Record, TopicInfo, TopicPartition
from headrace.tools.local_kafka import LocalKafka, ScramTls
from headrace.topics import Topic
from tests.chaos.cluster import running_cluster
from tests.support.broker import SCRAM_PASSWORD, SCRAM_USER, running
from tests.support.conditions import eventually
from tests.support.flooding import REQUESTS, flooding
from tests.support.logs import PATIENT, RecordingListener, polling, read, values, write, write_to
from tests.support.processes import Process, create_topics, environment
from tests.support.tcp_proxy import HOST, TcpProxy
from tests.support.traffic import PARTITIONS, Traffic

MODELS = Path(__file__).parents[2] / "headrace" / "tools" / "demo" / "models"
ALL = "ingest,batcher,executor,responder"
BUSY = 0.2
"""The share of a core that a process may use while it waits for brokers. A loop without pauses
would use all of it; 0.04 is usual, most of which it uses while it waits for requests, too.
"""

ONE_NODE = {"TOPICS__REPLICATION_FACTOR": "1"}
GUARANTEES = ("at_least_once", "exactly_once")
EACH_GUARANTEE = pytest.mark.parametrize("guarantee", GUARANTEES)
AT_LEAST_ONCE = pytest.mark.parametrize("guarantee", ["at_least_once"])
EXACTLY_ONCE = pytest.mark.parametrize("guarantee", ["exactly_once"])

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(kafka_installed: None) -> Iterator[LocalKafka]:
    """Three nodes; acknowledged records lie on two of them at least."""
    yield from running(LocalKafka(nodes=3))


def settings_for(
    servers: str, namespace: str, guarantee: str, more: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a process; three replicas of everything unless told otherwise."""
    return environment(
        servers,
        namespace,
        MODELS,
        KAFKA__SESSION_TIMEOUT_MS="6000",
        DELIVERY__GUARANTEE=guarantee,
        TOPICS__PARTITIONS=str(PARTITIONS),
        **{"TOPICS__REPLICATION_FACTOR": "3", **more},
    )


@asynccontextmanager
async def deployment(
    servers: str,
    namespace: str,
    guarantee: str,
    more: Mapping[str, str] | None = None,
    *,
    outside: str = "",
) -> AsyncIterator[tuple[Process, Traffic]]:
    """All four stages in a process, with traffic that flows, by other addresses where told so."""
    settings = settings_for(servers, namespace, guarantee, more or {})
    await create_topics(settings)
    async with (
        Process(ALL, settings) as process,
        Traffic(outside or servers, namespace) as traffic,
    ):
        try:
            await traffic.flows()
            yield process, traffic
        except BaseException as error:
            error.add_note(process.output[-8000:])
            raise


class Deployed(NamedTuple):
    """A process under one of the guarantees, in a namespace of its own."""

    guarantee: str
    namespace: str
    process: Process
    traffic: Traffic

    def require_nothing_lost(self) -> None:
        """Each request has an answer, and exactly one where that is the guarantee."""
        require_nothing_lost(self.traffic, self.guarantee)


@asynccontextmanager
async def deployments(
    servers: str, name: str, more: Mapping[str, str] | None = None
) -> AsyncIterator[list[Deployed]]:
    """Start a deployment under each guarantee, so that both meet the same trouble."""
    async with AsyncExitStack() as stack:
        found = []
        for guarantee in GUARANTEES:
            namespace = f"{name}-{guarantee.replace('_', '-')}"
            entering = deployment(servers, namespace, guarantee, more)
            process, traffic = await stack.enter_async_context(entering)
            found.append(Deployed(guarantee, namespace, process, traffic))
        yield found


async def all_flow(deployed: Sequence[Deployed], more: int = 25) -> None:
    """Wait until each of them has answered so many more requests."""
    await asyncio.gather(*[each.traffic.flows(more) for each in deployed])


async def unready(process: Process, deadline_s: float) -> None:
    """Wait until it says that it is not ready."""

    async def is_unready() -> bool:
        return not await process.is_ready()

    await eventually(is_unready, deadline_s=deadline_s, recheck_s=0.2)


async def in_sync(cluster: LocalKafka, namespace: str) -> None:
    """Wait until every partition of the namespace's topics has three replicas in sync."""
    settings = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
    topics = [f"{namespace}.{topic}" for topic in (Topic.REQUESTS, Topic.RESPONSES)]

    async def are_in_sync() -> bool:
        found = await survey(settings, topics, namespace, namespace)
        return all(each.in_sync == 3 for each in found.topics.values())

    await eventually(are_in_sync, deadline_s=60, recheck_s=0.2)


def require_nothing_lost(traffic: Traffic, guarantee: str) -> None:
    assert set(traffic.counts) == set(range(traffic.sent))
    assert set(traffic.codes) == {"ok"}
    if guarantee == "exactly_once":
        assert traffic.doubled == set()


async def test_outage_of_all_brokers_loses_no_request(
    cluster: LocalKafka, unique_name: str
) -> None:
    """Processes say that they are not ready, wait without being busy, and go on afterwards."""
    async with deployments(cluster.bootstrap_servers, unique_name) as deployed:
        for node in cluster.node_ids:
            cluster.kill_node(node)
        down_s, used_s = time.monotonic(), [each.process.cpu_s for each in deployed]
        for each in deployed:
            await unready(each.process, deadline_s=60)
        took_s = time.monotonic() - down_s
        busy = [
            (each.process.cpu_s - before_s) / took_s
            for each, before_s in zip(deployed, used_s, strict=True)
        ]
        await asyncio.gather(*map(cluster.start_node, cluster.node_ids))
        for each in deployed:
            await each.traffic.flows()
            await eventually(each.process.is_ready, deadline_s=30, recheck_s=0.2)
            await each.traffic.all_answered()
    for each in deployed:
        each.require_nothing_lost()
    assert max(busy) < BUSY


@EXACTLY_ONCE
async def test_rolling_restart_loses_no_request(
    cluster: LocalKafka, unique_name: str, guarantee: str
) -> None:
    """One node after the other stops and comes back; requests go on being answered."""
    async with deployment(cluster.bootstrap_servers, unique_name, guarantee) as (_, traffic):
        for node in cluster.node_ids:
            await in_sync(cluster, unique_name)
            await cluster.stop_node(node)
            await traffic.flows()
            await cluster.start_node(node)
        await traffic.all_answered()
    require_nothing_lost(traffic, guarantee)


@AT_LEAST_ONCE
async def test_killed_leader_and_coordinator_loses_no_request(
    cluster: LocalKafka, unique_name: str, guarantee: str
) -> None:
    """Leaders and the group's coordinator move to other nodes, and work goes on there."""
    async with deployment(cluster.bootstrap_servers, unique_name, guarantee) as (_, traffic):
        await in_sync(cluster, unique_name)
        coordinator = await _coordinator(cluster.bootstrap_servers, unique_name)
        cluster.kill_node(coordinator)
        await traffic.flows(50)
        moved_to = await _coordinator(cluster.bootstrap_servers, unique_name)
        await cluster.start_node(coordinator)
        await traffic.all_answered()
    assert moved_to != coordinator
    require_nothing_lost(traffic, guarantee)


async def _coordinator(servers: str, group: str) -> int:
    async with administration(servers) as admin:
        return int(await admin.find_coordinator(group))


@asynccontextmanager
async def administration(servers: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """A client for what an operator does to topics."""
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


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
        await flooded.send(replies, count=REQUESTS // 2)
        await flooded.check_budget()

        await cluster.start_node(lost)
        await flooded.until_holds(replies, 1, PARTITIONS + REQUESTS // 2)
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
    more = ONE_NODE | {"KAFKA__REQUEST_TIMEOUT_MS": "5000"}
    async with deployment(servers, unique_name, guarantee, more) as (process, traffic):
        await traffic.all_answered()
        async with administration(servers) as admin:
            await admin.delete_topics([topic])
        await traffic.send_one([])
        assert await process.wait() == 1
        assert f"{topic}/0: expected a topic with this partition" in process.output
    settings = settings_for(servers, unique_name, guarantee, more)
    await create_topics(settings)
    async with Traffic(servers, unique_name) as later, Process(ALL, settings):
        await later.all_answered()
        await eventually(lambda: later.counts[-1] == 1)
    assert set(later.codes) == {"ok"}


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
