"""A connection that delivers responses in the event-loop iteration in which they arrive.

aiokafka reads responses from a stream, in a task. The stream's buffer grows with every read of the
socket, which moves its content each time: a fetch of some MiB is moved about five times. The task
runs one loop iteration after the bytes arrive, and the caller yet another one later. Here the
protocol assembles a response once, and completes the request itself.
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

    Source: "Network" in Kafka's protocol guide: a frame is an INT32 and that many bytes.
    """

    def __init__(self) -> None:
        self._parts: list[bytes | memoryview] = []
        self._missing = 0
        """Bytes missing from the frame whose parts are held; 0 if the parts are of a length prefix.
        """

    def cut(self, data: bytes) -> list[bytes]:
        """Return the frames that these bytes complete.

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
    """Protocol that reads responses; refers to its connection weakly, as aiokafka's own reading
    does.

    Args:
        closed: set when the transport has released the socket.
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
            # Log as aiokafka's own reading does, which this replaces.
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
    """aiokafka's connection, except for how responses are read."""

    def _create_reader_task(self) -> asyncio.Future[None]:
        """Called where aiokafka begins to read: on the new transport, before anything was sent.

        Returns:
            A future that does not end by itself, instead of aiokafka's reading task.
        """
        self._writer.transport.set_protocol(_Answers(self, self._closed_fut))
        return asyncio.get_running_loop().create_future()
