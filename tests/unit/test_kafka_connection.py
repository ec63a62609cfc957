"""A Kafka client's connections, without a broker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop
from aiokafka.errors import KafkaConnectionError

from headrace.config import KafkaSettings
from headrace.log.kafka_connection import Connection


class Client:
    """As much of aiokafka's client as is taken over; `write` is what sending a request does."""

    def __init__(self, write: Any) -> None:
        self._write = write
        self.bootstrap: Any = None
        self._metadata_update: Any = None

    async def send(self, node_id: int, request: Any, *, group: int = 0) -> Any:
        return self._write(request)


def _taken_over(write: Any) -> Client:
    client = Client(write)
    Connection(KafkaSettings(bootstrap_servers="127.0.0.1:1")).take_over_bootstrap(client)
    return client


def test_a_request_on_a_transport_that_is_closed_fails_as_its_connection() -> None:
    """What uvloop raises is aiokafka's own error by the time that aiokafka sees it."""

    async def send() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await reader.read()
            writer.transport.abort()
            await asyncio.sleep(0)
            await _taken_over(writer.write).send(1, b"request", group=1)

    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        pytest.raises(KafkaConnectionError, match="node 1"),
    ):
        runner.run(send())


async def test_other_faults_are_nobodys_connection() -> None:
    """A RuntimeError about something else stays what it is."""

    def write(_: Any) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        await _taken_over(write).send(1, b"request")


async def test_an_answer_is_passed_on() -> None:
    """What the broker answers comes back as it is."""
    assert (
        await _taken_over(lambda request: request + b" answered").send(1, b"it") == b"it answered"
    )
