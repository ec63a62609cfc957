"""Connections whose answers are handed over at once, on a transport without a network."""

from __future__ import annotations

import asyncio
import struct

import pytest
from aiokafka.conn import CloseReason
from aiokafka.errors import KafkaConnectionError

from headrace.log.kafka._aiokafka import DirectConnection


class _Wire(asyncio.Transport):
    """Keeps whoever listens, and brings what the test has for them."""

    def __init__(self) -> None:
        super().__init__()
        self.listener = asyncio.Protocol()
        self._is_closing = False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self.listener = protocol

    def close(self) -> None:
        self._is_closing = True
        asyncio.get_running_loop().call_soon(self.listener.connection_lost, None)

    def is_closing(self) -> bool:
        return self._is_closing


class _Line:
    """A connection on such a wire, and why it was closed, if it was."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.wire, self.reasons = _Wire(), list[CloseReason]()
        self.connection = DirectConnection("localhost", 9092, on_close=self._closed)
        reader = asyncio.StreamReader()
        self.connection._closed_fut = loop.create_future()
        self.connection._reader = reader
        protocol = asyncio.StreamReaderProtocol(reader)
        self.connection._writer = asyncio.StreamWriter(self.wire, protocol, reader, loop)
        self.connection._read_task = self.connection._create_reader_task()

    def _closed(self, _: DirectConnection, reason: CloseReason) -> None:
        self.reasons.append(reason)

    def ask(self) -> asyncio.Future[bytes]:
        """A request whose answer comes as bytes, as those of a SASL handshake do."""
        asked: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.connection._requests.append((None, None, asked))
        return asked


async def test_response_completes_request_at_its_last_byte() -> None:
    """The request completes in the same turn of the event loop; the next response is another
    request's.
    """
    line = _Line()
    first, second = line.ask(), line.ask()
    line.wire.listener.data_received(struct.pack(">i", 5) + b"he")
    assert not first.done()
    line.wire.listener.data_received(b"llo" + struct.pack(">i", 0))
    assert first.result() == b"hello"
    assert second.result() == b""
    await line.connection.close()


async def test_closed_connection_fails_open_requests() -> None:
    """The error makes the client look for the broker again."""
    line = _Line()
    asked = line.ask()
    line.wire.listener.connection_lost(None)
    with pytest.raises(KafkaConnectionError):
        await asked
    assert line.reasons == [CloseReason.CONNECTION_BROKEN]
    assert line.connection._closed_fut.done()


async def test_invalid_response_length_ends_connection(caplog: pytest.LogCaptureFixture) -> None:
    """A length below zero: somebody else listens there."""
    line = _Line()
    asked = line.ask()
    line.wire.listener.data_received(struct.pack(">i", -1))
    with pytest.raises(KafkaConnectionError) as failed:
        await asked
    assert "length of a frame, got -1" in str(failed.value.__cause__)
    assert "length of a frame, got -1" in caplog.text


async def test_responses_after_close_are_dropped() -> None:
    """Answers that come with the one that closed the connection are nobody's."""
    line = _Line()
    seen = []

    def close(frame: bytes) -> None:
        seen.append(frame)
        line.connection.close(reason=CloseReason.OUT_OF_SYNC)

    line.connection._handle_frame = close
    line.wire.listener.data_received((struct.pack(">i", 1) + b"x") * 2)
    assert seen == [b"x"]
    await line.connection._closed_fut
