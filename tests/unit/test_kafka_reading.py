"""Responses of brokers, handed to their connection as soon as their last byte is there."""

from __future__ import annotations

import asyncio
import struct
from typing import cast

import pytest
from aiokafka.conn import CloseReason

from headrace.log.kafka._aiokafka import DirectConnection, ResponseProtocol


class Connection:
    """The part of aiokafka's connection that reading uses; it keeps the responses.

    Args:
        last: the response at which it closes itself; None for none.
    """

    def __init__(self, last: bytes | None = None) -> None:
        self.last = last
        self.responses: list[bytes] = []
        self.ends: list[tuple[CloseReason, BaseException | None]] = []

    def connected(self) -> bool:
        return not self.ends

    def close(self, reason: CloseReason, exc: BaseException | None = None) -> None:
        self.ends.append((reason, exc))

    def _handle_frame(self, response: bytes) -> None:
        self.responses.append(response)
        if response == self.last:
            self.close(CloseReason.OUT_OF_SYNC)


def protocol_of(connection: Connection) -> tuple[ResponseProtocol, asyncio.Future[None]]:
    """Return what reads for the connection, and the future that tells of the socket's end."""
    closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    return ResponseProtocol(cast("DirectConnection", connection), closed), closed


def framed(response: bytes) -> bytes:
    """Return a response as a broker sends it: after its length."""
    return struct.pack(">i", len(response)) + response


async def test_response_is_handed_over_at_its_last_byte() -> None:
    """Neither before it nor in a later turn of the event loop."""
    connection = Connection()
    protocol, _ = protocol_of(connection)
    bytes_sent = framed(b"hello") + framed(b"")
    protocol.data_received(bytes_sent[:6])
    assert connection.responses == []
    protocol.data_received(bytes_sent[6:])
    assert connection.responses == [b"hello", b""]


async def test_lost_socket_ends_connection() -> None:
    """The reason makes the client look for the broker again."""
    connection = Connection()
    protocol, closed = protocol_of(connection)
    protocol.connection_lost(None)
    ((reason, error),) = connection.ends
    assert reason == CloseReason.CONNECTION_BROKEN
    assert isinstance(error, EOFError)
    assert closed.done()


async def test_invalid_response_length_ends_connection(caplog: pytest.LogCaptureFixture) -> None:
    """A length below zero: somebody else listens there."""
    connection = Connection()
    protocol, _ = protocol_of(connection)
    protocol.data_received(struct.pack(">i", -1))
    ((reason, error),) = connection.ends
    assert reason == CloseReason.CONNECTION_BROKEN
    assert "length of a frame, got -1" in str(error)
    assert "length of a frame, got -1" in caplog.text


async def test_responses_after_close_are_dropped() -> None:
    """Those that come with the one that closed the connection belong to no request."""
    connection = Connection(last=b"x")
    protocol, _ = protocol_of(connection)
    protocol.data_received(framed(b"x") * 2)
    assert connection.responses == [b"x"]


async def test_response_for_connection_that_is_gone_is_dropped() -> None:
    """The protocol does not keep its connection alive."""
    connection = Connection()
    protocol, _ = protocol_of(connection)
    del connection
    protocol.data_received(framed(b"late"))
