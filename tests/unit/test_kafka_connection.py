"""What is made of a broker's answers: the first one, and a fetch that it refuses."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest
from aiokafka.protocol.fetch import FetchRequest

from headrace.config import KafkaSettings
from headrace.log.errors import LogUnavailable
from headrace.log.kafka.connection import Connection, RefusedFetches
from headrace.log.kafka.record_requests import FetchResponse
from headrace.log.kafka.security import TokenFile
from headrace.tuning import TUNING
from tests.support.conditions import DEADLINE_S, eventually

API_VERSIONS, METADATA = 18, 3
SUPPORTED = struct.pack(">hi" + 2 * "hhh", 0, 2, API_VERSIONS, 0, 0, METADATA, 0, 0)
"""An answer to ApiVersions: no error, and version 0 of both requests."""
NO_BROKERS = struct.pack(">ii", 0, 0)
"""An answer to Metadata: no broker, and no topic."""


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as a broker that has just begun to listen."""
    try:
        while True:
            (size,) = struct.unpack(">i", await reader.readexactly(4))
            key, _version, correlation_id = struct.unpack_from(
                ">hhi", await reader.readexactly(size)
            )
            body = SUPPORTED if key == API_VERSIONS else NO_BROKERS
            writer.write(struct.pack(">ii", 4 + len(body), correlation_id) + body)
    except asyncio.IncompleteReadError:
        writer.close()


async def test_server_without_brokers_is_retried_as_starting() -> None:
    """It says nothing about our credentials, which would end a process."""
    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        _, port = server.sockets[0].getsockname()
        connection = Connection(KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}"))
        assert await connection.refusal() is None
        with pytest.raises(LogUnavailable, match="it is starting"):
            await connection.open_client()


FETCH = 1
FETCH_SUPPORTED = struct.pack(
    ">hi" + 3 * "hhh", 0, 3, API_VERSIONS, 0, 0, METADATA, 0, 0, FETCH, 11, 11
)
CORRUPT, FAILED_DISK, NO_ERROR = 2, 56, 0
RECORDS = b"whatever is in a batch"


class FetchedFrom:
    """A broker that answers each fetch with these parts.

    Args:
        parts: (error code, record batches) of partitions 0, 1, ...
        pause_s: before a request is repeated.
    """

    def __init__(self, *parts: tuple[int, bytes], pause_s: float) -> None:
        self._parts = parts
        self._tuning = msgspec.structs.replace(TUNING.kafka, request_retry_s=pause_s)

    async def seconds(self) -> list[float]:
        """Return how long each of two fetches takes."""
        async with await asyncio.start_server(self._answer, "127.0.0.1") as server:
            _, self._port = server.sockets[0].getsockname()
            settings = KafkaSettings(bootstrap_servers=f"127.0.0.1:{self._port}")
            connection = Connection(settings, tuning=self._tuning)
            client = await connection.open_client()
            took_s: list[float] = []
            for _ in range(2):
                begun_s = time.monotonic()
                await client.send(1, FetchRequest(500, 1, 1 << 20, 0, [("t", [(0, 0, 1 << 20)])]))
                took_s.append(time.monotonic() - begun_s)
            await connection.close_client(client)
        return took_s

    async def refresh(self, topic: str) -> float:
        """Return how many seconds three refreshes of a topic's metadata take."""
        async with await asyncio.start_server(self._answer, "127.0.0.1") as server:
            _, self._port = server.sockets[0].getsockname()
            settings = KafkaSettings(bootstrap_servers=f"127.0.0.1:{self._port}")
            connection = Connection(settings, tuning=self._tuning)
            client = await connection.open_client()
            begun_s = time.monotonic()
            await client.add_topic(topic)
            for _ in range(2):
                await client.force_metadata_update()
            took_s = time.monotonic() - begun_s
            await connection.close_client(client)
        return took_s

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies = {API_VERSIONS: FETCH_SUPPORTED, METADATA: self._brokers(), FETCH: self._fetched()}
        try:
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                key, _, correlation_id = struct.unpack_from(">hhi", await reader.readexactly(size))
                body = bodies[key]
                writer.write(struct.pack(">ii", 4 + len(body), correlation_id) + body)
        except asyncio.IncompleteReadError:
            writer.close()

    def _brokers(self) -> bytes:
        """Answer that this is the broker, and leads partition 0 of t; 1 of u has no leader."""
        broker = struct.pack(">iih9si", 1, 1, 9, b"127.0.0.1", self._port)
        topics = b"".join(
            struct.pack(">hh1sihiiii", 0, 1, name, 1, 0, number, leader, 0, 0)
            for name, number, leader in ((b"t", 0, 1), (b"u", 1, -1))
        )
        return broker + struct.pack(">i", 2) + topics

    def _fetched(self) -> bytes:
        parts = [
            struct.pack(">ihqqqiii", number, error, 0, 0, 0, -1, -1, len(batches)) + batches
            for number, (error, batches) in enumerate(self._parts)
        ]
        head = struct.pack(">ihiih1si", 0, 0, 0, 1, 1, b"t", len(parts))
        return head + b"".join(parts)


async def test_fetch_that_is_refused_again_is_held_back() -> None:
    """A broker would get the same request hundreds of times a second, until another one leads."""
    broker = FetchedFrom((FAILED_DISK, b""), (NO_ERROR, b""), pause_s=0.2)
    _, second_s = await broker.seconds()
    assert second_s >= 0.2


async def test_records_beside_refused_partition_are_not_held_back() -> None:
    """They are there, and the broker waits for others before it answers again."""
    broker = FetchedFrom((FAILED_DISK, b""), (NO_ERROR, RECORDS), pause_s=3600.0)
    async with asyncio.timeout(30):
        assert len(await broker.seconds()) == 2


def test_first_refusal_for_a_while_is_not_held_back() -> None:
    """The leader is found anew at once, unless the refusals go on."""
    refused = FetchResponse([("t", [(0, FAILED_DISK, 0, 0, 0, None, -1, b"")])])
    refusals = RefusedFetches(pause_s=1.0)
    assert [refusals.pause_s(refused, now_s) for now_s in (0.0, 1.0, 2.0, 13.0)] == [0, 1, 1, 0]


def test_partition_that_broker_cannot_read_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The line of aiokafka has only the name of the error; other partitions may have records."""
    parts = [(0, NO_ERROR, 1, 1, 0, None, -1, RECORDS), (1, CORRUPT, -1, -1, -1, None, -1, b"")]
    RefusedFetches(pause_s=1.0).pause_s(FetchResponse([("t", parts)]), 0.0)
    (line,) = caplog.messages
    assert line.startswith("Cannot fetch from t/1: ")
    assert "CorruptRecordException" in line


@pytest.mark.parametrize("topic", ["absent", "u"])
async def test_metadata_without_leader_is_requested_again_after_pause(topic: str) -> None:
    """A reader of such a partition requested it thousands of times a second."""
    assert await FetchedFrom(pause_s=0.2).refresh(topic) >= 0.4


async def test_metadata_with_all_leaders_is_requested_again_at_once() -> None:
    """A new topic, or a new leader, is found without delay."""
    async with asyncio.timeout(30):
        await FetchedFrom(pause_s=3600.0).refresh("t")


async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Disconnect at once, as a listener of another protocol does."""
    writer.close()


async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accept the connection and answer nothing, as a paused broker does."""
    await reader.read()
    writer.close()


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (stay_silent, "expected an answer within 0.2 s, got none"),
        (hang_up, "expected an answer, but the connection was closed; is this a listener for"),
    ],
)
async def test_server_without_answer_is_unavailable_with_reason(
    server: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], reason: str
) -> None:
    """The names of Python's and aiokafka's exceptions do not say what happened."""
    tuning = msgspec.structs.replace(TUNING.kafka, bootstrap_timeout_s=0.2)
    async with await asyncio.start_server(server, "127.0.0.1") as listening:
        address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        connection = Connection(KafkaSettings(bootstrap_servers=address), tuning=tuning)
        with pytest.raises(LogUnavailable) as caught:
            await connection.open_client()
    assert str(caught.value).startswith(f"{address}: {reason}")


class HangingFile:
    """A file whose reads get no answer until the test says so."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.answers = threading.Event()

    def read_text(self, encoding: str) -> str:
        self.begun += 1
        self.answers.wait(DEADLINE_S)
        self.ended += 1
        return "token\n"


def test_token_file_that_never_answers_is_read_once_and_ends_with_event_loop() -> None:
    """Each attempt to connect asks for the token; a mount that hangs gets one thread of them."""
    file = HangingFile()
    token_file = TokenFile(cast(Path, file))

    async def ask_twice() -> None:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await token_file.token()
        await eventually(lambda: file.begun > 0)

    asyncio.run(ask_twice())

    assert (file.begun, file.ended) == (1, 0)
    file.answers.set()
    assert asyncio.run(token_file.token()) == "token"
