"""The local broker is a real Kafka that comes, goes and keeps its data.

The listener with TLS is tested in `test_kafka_security`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError

from headrace.tools.local_kafka import BrokerFailed, BrokerUnavailable, LocalKafka
from headrace.tools.local_kafka.process import wait_until
from tests.support.broker import running

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def cluster(kafka_installed: None) -> Iterator[LocalKafka]:
    """One node for the tests that kill or pause it; each leaves it running."""
    yield from running(LocalKafka())


async def _create_topic(bootstrap_servers: str, topic: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, 1)])
    finally:
        await admin.close()


async def _send(topic: str, value: bytes, **client: Any) -> None:
    producer = AIOKafkaProducer(**client)
    try:
        await producer.start()
        await producer.send_and_wait(topic, value)
    finally:
        await producer.stop()


async def _receive(topic: str, **client: Any) -> bytes:
    consumer = AIOKafkaConsumer(topic, auto_offset_reset="earliest", **client)
    try:
        await consumer.start()
        record = await consumer.getone()
    finally:
        await consumer.stop()
    assert record.value is not None
    return bytes(record.value)


def _is_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_local_kafka_returns_written_record(kafka: LocalKafka, unique_name: str) -> None:
    """A member of a group reads the record that was sent to its topic."""
    servers = kafka.bootstrap_servers
    await _create_topic(servers, unique_name)
    await _send(unique_name, b"there and back", bootstrap_servers=servers)
    received = await _receive(unique_name, bootstrap_servers=servers, group_id=unique_name)
    assert received == b"there and back"


async def test_local_kafka_does_not_create_topic_on_use(
    kafka: LocalKafka, unique_name: str
) -> None:
    """An unknown topic is an error, so that a misspelled name is noticed."""
    with pytest.raises(KafkaError):
        await _send(
            unique_name, b"lost", bootstrap_servers=kafka.bootstrap_servers, request_timeout_ms=1000
        )


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_killed_node_restarts_with_its_data(cluster: LocalKafka, unique_name: str) -> None:
    """A record that was acknowledged is there after the node was killed and started again."""
    servers = cluster.bootstrap_servers
    await _create_topic(servers, unique_name)
    await _send(unique_name, b"kept", bootstrap_servers=servers)
    cluster.kill_node()
    await cluster.start_node()
    assert await _receive(unique_name, bootstrap_servers=servers) == b"kept"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("kafka_installed")
async def test_kept_directory_is_used_again(tmp_path: Path, unique_name: str) -> None:
    """A cluster that was given a directory leaves its data there for the next one."""
    async with LocalKafka(tmp_path) as cluster:
        servers = cluster.bootstrap_servers
        await _create_topic(servers, unique_name)
        await _send(unique_name, b"kept", bootstrap_servers=servers)
    async with LocalKafka(tmp_path) as cluster:
        received = await _receive(unique_name, bootstrap_servers=cluster.bootstrap_servers)
    assert received == b"kept"


@pytest.mark.slow
@pytest.mark.usefixtures("kafka_installed")
async def test_stopped_local_kafka_leaves_no_process_or_files() -> None:
    """Leaving the context ends the process and removes the temporary directory."""
    async with LocalKafka() as cluster:
        process = cluster.node()
        pid = cluster.pid()
        assert pid is not None
    assert (_is_process(pid), process.exit_status, process.directory.exists()) == (
        False,
        128 + signal.SIGTERM,  # a JVM's exit status after an orderly end by SIGTERM
        False,
    )


_STARTS_AND_WAITS = """
import asyncio
from headrace.tools.local_kafka import LocalKafka

async def main():
    async with LocalKafka() as cluster:
        print(cluster.pid(), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def _broker_of_a_killed_parent() -> int:
    """Start a process that starts a broker, kill it, and give the broker's process id."""
    with subprocess.Popen(
        [sys.executable, "-c", _STARTS_AND_WAITS], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    return pid


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
@pytest.mark.usefixtures("kafka_installed")
async def test_broker_dies_with_its_parent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """When the process that started it is killed, the broker is gone too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # nobody is left to remove what lies there
    pid = _broker_of_a_killed_parent()
    assert await wait_until(lambda: not _is_process(pid), timeout_s=10)


@pytest.mark.slow
@pytest.mark.usefixtures("kafka_installed")
async def test_setting_refused_by_kafka_is_reported() -> None:
    """A node that does not start raises an error with what the broker said."""
    cluster = LocalKafka(properties={"num.io.threads": "none"})
    with pytest.raises(BrokerFailed, match=r"num\.io\.threads"):
        await cluster.start()


@pytest.mark.usefixtures("kafka_installed")
async def test_port_in_use_is_named(kafka: LocalKafka) -> None:
    """A port that somebody listens on is refused before anything starts."""
    port = int(kafka.bootstrap_servers.rpartition(":")[2])
    with pytest.raises(BrokerUnavailable, match=f"port {port} on 127.0.0.1 is in use"):
        await LocalKafka(port=port).start()


@pytest.mark.slow
async def test_paused_node_continues_after_resume(cluster: LocalKafka) -> None:
    """A paused node answers nothing and keeps its process; resumed, it answers again."""
    pid = cluster.pid()
    cluster.pause_node()
    admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=500)
    with pytest.raises(KafkaError):
        await admin.start()
    cluster.resume_node()
    await admin.start()
    await admin.close()
    assert cluster.pid() == pid
