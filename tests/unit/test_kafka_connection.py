"""Judging a server's first answer."""

from __future__ import annotations

import asyncio
import struct

import pytest

from headrace.config import KafkaSettings
from headrace.log.errors import LogUnavailable
from headrace.log.kafka.connection import Connection

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
