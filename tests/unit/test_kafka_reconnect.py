"""How often an unavailable broker is tried."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise
from types import SimpleNamespace
from typing import Self

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.cluster import ClusterMetadata
from msgspec.structs import replace

from headrace.config import KafkaSettings
from headrace.log.errors import LogUnavailable
from headrace.log.kafka.connection import Connection, ReconnectTimes
from headrace.primitives.backoff import Backoff
from headrace.tuning import TUNING
from tests.support.conditions import DEADLINE_S

HERE = ("127.0.0.1", 9092)
THERE = ("127.0.0.1", 9093)
BACKOFF = TUNING.kafka.reconnect
PATIENT = replace(TUNING.kafka, reconnect=Backoff(60.0, 60.0))
"""Pauses that outlast a test, however slow the machine is."""


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


class HangsUp:
    """A server that closes every connection at once, and counts them."""

    def __init__(self) -> None:
        self.tries = 0
        self._servers = AsyncExitStack()

    async def __aenter__(self) -> Self:
        server = await asyncio.start_server(self._hang_up, "127.0.0.1", 0)
        await self._servers.enter_async_context(server)
        self.address: tuple[str, int] = server.sockets[0].getsockname()
        self.settings = KafkaSettings(bootstrap_servers=f"127.0.0.1:{self.address[1]}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._servers.aclose()

    async def _hang_up(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tries += 1
        writer.close()


async def test_clients_pause_between_connections_to_absent_broker() -> None:
    """Twenty requests of two clients, sent at once, lead to one attempt."""
    async with HangsUp() as server:
        connection = Connection(server.settings, tuning=PATIENT)
        clients = [AIOKafkaClient(**connection.client_options()) for _ in range(2)]
        for client in clients:
            connection.take_over_connecting(client)
            client.cluster = _cluster_of_one(server.address)
        for _ in range(10):
            for client in clients:
                assert not await client.ready(1)
        assert server.tries == 1


async def test_opening_log_reports_failure_of_next_attempt() -> None:
    """Opening a log with a single broker waits for the end of the pause, and tries again."""
    async with HangsUp() as server:
        connection = Connection(server.settings)
        for tries in (1, 2):
            with pytest.raises(LogUnavailable, match=str(server.address[1])):
                await connection.open_client()
            assert server.tries == tries


async def test_opening_log_makes_no_attempt_within_pause() -> None:
    """If the pause is longer than a request may take, opening the log fails without an attempt."""
    async with HangsUp() as server:
        settings = server.settings.model_copy(update={"request_timeout_ms": 1000})
        connection = Connection(settings, tuning=PATIENT)
        for _ in range(2):
            with pytest.raises(LogUnavailable):
                await connection.open_client()
        assert server.tries == 1


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
