"""A connection that hands answers over in the turn of the event loop in which they arrive.

aiokafka reads its answers from a stream, in a task. The stream's buffer grows with every read of
the socket, which moves what is there again and again: a fetch of some MiB is moved about five
times. And the task comes one turn of the loop later than the bytes, and whoever asked yet another
one later. Here the protocol puts an answer together once, and completes the request itself.
"""

from __future__ import annotations

import asyncio
import struct
import weakref
from typing import Final

from aiokafka import conn as aiokafka_conn
from aiokafka.conn import AIOKafkaConnection, CloseReason

_LENGTH: Final = struct.Struct(">i")


class Frames:
    """Cuts a stream of bytes into frames, each of which follows its length.

    Source: "Network" in Kafka's protocol guide: a frame is INT32 and so many bytes.
    """

    def __init__(self) -> None:
        self._parts: list[bytes | memoryview] = []
        self._missing = 0
        """Of the frame whose parts these are; 0: they are what there is of a length."""

    def cut(self, data: bytes) -> list[bytes]:
        """The frames that end with these bytes.

        Raises:
            ValueError: a length is negative.
        """
        found: list[bytes] = []
        at = 0
        if self._parts:
            if not self._missing:
                data = b"".join((*self._parts, data))
                self._parts = []
            elif len(data) < self._missing:
                self._parts.append(data)
                self._missing -= len(data)
                return found
            else:
                at = self._missing
                self._parts.append(memoryview(data)[:at])
                found.append(b"".join(self._parts))
                self._parts, self._missing = [], 0
        while len(data) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(data, at)
            if size < 0:
                raise ValueError(f"expected the length of a frame, got {size}")
            at += _LENGTH.size
            end = at + size
            if end > len(data):
                self._missing = end - len(data)
                self._parts = [memoryview(data)[at:]]
                return found
            found.append(data[at:end])
            at = end
        if at < len(data):
            self._parts = [data[at:]]
        return found


class _Answers(asyncio.Protocol):
    """What comes in on a connection. Refers to it weakly, as aiokafka's own reading does.

    Args:
        closed: told when the transport has let go of the socket.
    """

    def __init__(self, connection: DirectConnection, closed: asyncio.Future[None]) -> None:
        self._connection = weakref.ref(connection)
        self._closed = closed
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        connection = self._connection()
        try:
            for frame in self._frames.cut(data):
                if connection is None or not connection.connected():
                    return
                connection._handle_frame(frame)
        except Exception as error:  # noqa: BLE001  # whatever it is, nothing more can be read
            # In the words of aiokafka's own reading, in whose place this stands.
            aiokafka_conn.log.exception("Unexpected exception in AIOKafkaConnection")
            self._break(error)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        self._break(error or EOFError("the broker has closed the connection"))

    def _break(self, error: Exception) -> None:
        connection = self._connection()
        if connection is not None and connection.connected():
            connection.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)


class DirectConnection(AIOKafkaConnection):  # type: ignore[misc]  # aiokafka publishes no types
    """aiokafka's, but for how the answers are read."""

    def _create_reader_task(self) -> asyncio.Future[None]:
        """Called where aiokafka begins to read: on the new transport, before anything was sent.

        Returns:
            In the place of its task, something that does not end by itself.
        """
        self._writer.transport.set_protocol(_Answers(self, self._closed_fut))
        return asyncio.get_running_loop().create_future()
