"""How often a broker that is away is tried."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection

from headrace.config import KafkaSettings
from headrace.log.errors import LogUnavailable
from headrace.log.kafka.connection import Connection, ReconnectTimes
from headrace.primitives.backoff import Backoff
from headrace.tuning import TUNING
from tests.support.conditions import DEADLINE_S

HERE = ("127.0.0.1", 9092)
THERE = ("127.0.0.1", 9093)
BACKOFF = TUNING.kafka.reconnect


def tries(backoff: ReconnectTimes, seconds: float) -> list[float]:
    """Return the times of attempts at an address that never answers."""
    tried, now_s = [], 0.0
    while now_s < seconds:
        tried.append(now_s)
        backoff.failed(HERE, now_s)
        now_s += backoff.remaining_s(HERE, now_s)
    return tried


def test_reconnect_pauses_double_up_to_second() -> None:
    """They are those of Kafka's own clients."""
    pauses = [
        later - sooner for sooner, later in pairwise(tries(ReconnectTimes(BACKOFF, lambda: 0.5), 6))
    ]
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_reconnect_pauses_have_jitter(share: float) -> None:
    """Clients that lost a broker together do not return together."""
    (_, last_but_one, last) = tries(ReconnectTimes(BACKOFF, lambda: share), 10)[-3:]
    assert last - last_but_one == pytest.approx(BACKOFF.pause_s(10, share))


def test_concurrent_connection_failures_count_once() -> None:
    """Six clients that lose the same broker at once do not make each other wait longer."""
    backoff = ReconnectTimes(BACKOFF, lambda: 0.5)
    for _ in range(6):
        backoff.failed(HERE, 1.0)
    assert backoff.remaining_s(HERE, 1.0) == pytest.approx(0.05)


def test_answering_broker_is_tried_at_once() -> None:
    """An answer ends the pause, and the next failure is a first one again."""
    backoff = ReconnectTimes(BACKOFF, lambda: 0.5)
    tries(backoff, 5)
    backoff.succeeded(HERE)
    assert backoff.remaining_s(HERE, 5.0) == 0
    backoff.failed(HERE, 5.0)
    assert backoff.remaining_s(HERE, 5.0) == pytest.approx(0.05)


def test_pause_of_one_broker_does_not_apply_to_another() -> None:
    """Another broker is tried without a pause."""
    backoff = ReconnectTimes(BACKOFF)
    backoff.failed(HERE, 1.0)
    assert backoff.remaining_s(THERE, 1.0) == 0


class Away:
    """A server that refuses every connection, and counts them."""

    def __init__(self) -> None:
        self.tries = 0

    async def connect(self, *_: object, **__: object) -> AIOKafkaConnection:
        self.tries += 1
        raise ConnectionRefusedError(111, "refused")


async def test_clients_pause_between_connections_to_absent_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty requests of two clients, sent at once, lead to one attempt."""
    away = Away()
    patient = replace(TUNING.kafka, reconnect=Backoff(60.0, 60.0))  # whatever this machine does
    monkeypatch.setattr(AIOKafkaConnection, "connect", away.connect)
    connection = Connection(KafkaSettings(bootstrap_servers="127.0.0.1:9092"), tuning=patient)
    clients = [AIOKafkaClient(**connection.client_options()) for _ in range(2)]
    for client in clients:
        connection.take_over_connecting(client)
        client.cluster = _cluster_of_one()
    for _ in range(10):
        for client in clients:
            assert not await client.ready(1)
    assert away.tries == 1


async def test_opening_log_waits_for_end_of_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a log with a single broker waits, and in the end reports the failure."""
    away = Away()
    monkeypatch.setattr(AIOKafkaConnection, "connect", away.connect)
    connection = Connection(KafkaSettings(bootstrap_servers="127.0.0.1:9092"))
    with pytest.raises(LogUnavailable):
        await connection.open_client()
    opening = asyncio.create_task(connection.open_client())
    await asyncio.sleep(0)
    assert away.tries == 1
    with pytest.raises(LogUnavailable, match="9092: refused"):
        await opening


async def test_silent_broker_is_given_up_after_request_timeout() -> None:
    """A client whose own timeout is that of a JoinGroup does not wait for that long."""
    hung_up = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        hung_up.set()

    async with await asyncio.start_server(say_nothing, HERE[0]) as server:
        address = server.sockets[0].getsockname()
        connection = Connection(
            KafkaSettings(bootstrap_servers="127.0.0.1:9092", request_timeout_ms=1000)
        )
        client = AIOKafkaClient(**connection.client_options(request_timeout_ms=35_000))
        connection.take_over_connecting(client)
        client.cluster = _cluster_of_one(address)
        async with asyncio.timeout(DEADLINE_S):
            assert not await client.ready(1)
            await hung_up.wait()


def _cluster_of_one(address: tuple[str, int] = HERE) -> ClusterMetadata:
    cluster = ClusterMetadata()
    cluster.update_metadata(
        SimpleNamespace(API_VERSION=1, brokers=[(1, *address, None)], controller_id=1, topics=[])
    )
    return cluster
