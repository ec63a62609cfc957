"""A TCP proxy on the loopback, to make a network as bad as a test wants it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Self

_CHUNK_BYTES = 64 * 1024
_HELD_PIECES = 256
HOST = "127.0.0.1"


class TcpProxy:
    """Passes bytes between its clients and one address.

    It listens from `open` to `close`, or while it is entered; where it leads may be said later,
    since a broker has to know the proxy's port before it can tell its own.

    Attributes:
        port: where it listens; 0 before it is open.
        upstream: the port on the loopback where connections are passed on to.
        delay_s: how long each piece is held, each way, at most: each connection has a share of it
            that is drawn when it is made, so that what one carries overtakes what another does.
    """

    def __init__(self, upstream: int = 0) -> None:
        self.port = 0
        self.upstream = upstream
        self.delay_s = 0.0
        self._refusing = False
        self._there = _open_gate()
        self._back = _open_gate()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self, port: int = 0) -> None:
        """Listen; on any free port, if none is given."""
        self._server = await asyncio.start_server(self._accept, HOST, port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Listen no longer, and cut all connections."""
        if self._server is not None:
            self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """End all connections that there are, in the middle of whatever they carry."""
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def pause(self) -> None:
        """Pass nothing on, and keep connections open: a network that swallows everything."""
        self._there.clear()
        self._back.clear()

    def pause_answers(self) -> None:
        """Pass on what clients ask, and not what they are answered: it is done, and none knows."""
        self._back.clear()

    def lose_connections(self) -> None:
        """Pass nothing more on of the connections that there are, which stay open; new ones work:
        a firewall that has forgotten them.
        """
        self.pause()
        self._there, self._back = _open_gate(), _open_gate()

    def resume(self) -> None:
        """Undo `pause` and `pause_answers`: what was held goes on."""
        self._there.set()
        self._back.set()

    def refuse(self) -> None:
        """Hang up on new connections; those that there are stay."""
        self._refusing = True

    def accept(self) -> None:
        """Undo `refuse`."""
        self._refusing = False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        try:
            if not self._refusing:
                await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # one end has hung up, or `cut` has: both look the same to the other end
        finally:
            self._connections.discard(connection)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(HOST, self.upstream)
        share = random.random()
        try:
            # What is held when one end hangs up is lost, as it is when a machine fails.
            ways = [
                asyncio.create_task(way, name="proxy-way")
                for way in (
                    *self._way(reader, back, self._there, share),
                    *self._way(there, writer, self._back, share),
                )
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            back.transport.abort()

    def _way(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        gate: asyncio.Event,
        share: float,
    ) -> tuple[Coroutine[None, None, None], Coroutine[None, None, None]]:
        """Copy bytes one way until either end hangs up."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_HELD_PIECES)
        return self._read(reader, held, share), self._write(held, writer, gate)

    async def _read(
        self, reader: asyncio.StreamReader, held: asyncio.Queue[tuple[float, bytes]], share: float
    ) -> None:
        clock = asyncio.get_running_loop().time
        while piece := await reader.read(_CHUNK_BYTES):
            await held.put((clock() + share * self.delay_s, piece))
        if not self.delay_s:
            await held.join()

    async def _write(
        self,
        held: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        gate: asyncio.Event,
    ) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due_s, piece = await held.get()
            if (wait_s := due_s - clock()) > 0:
                await asyncio.sleep(wait_s)
            await gate.wait()
            writer.write(piece)
            await writer.drain()
            held.task_done()


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate
