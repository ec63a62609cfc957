"""Base of the stand-in servers of tests: it listens while its context lasts."""

from __future__ import annotations

from typing import Self

from aiohttp import web

HOST = "127.0.0.1"


class StandInServer:
    """Serves an application over HTTP on one port, while its context lasts.

    Attributes:
        url: address of the server, the same each time that it listens.
    """

    def __init__(self) -> None:
        self._application = web.Application(client_max_size=1 << 30)
        self._runner = web.AppRunner(self._application, shutdown_timeout=0.1)
        self._site: web.TCPSite | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """See the class."""
        return f"http://{HOST}:{self._port}"

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        # A connection that still has bytes to send would be left open by the end of the test.
        self.abort_connections()
        await self._runner.cleanup()

    async def listen(self) -> None:
        """Listen, unless it does already."""
        if self._site is None:
            self._site = web.TCPSite(self._runner, HOST, self._port, reuse_address=True)
            await self._site.start()
            self._port = self._runner.addresses[0][1]

    async def refuse(self) -> None:
        """Refuse connections, and break those that there are, until `listen` is called."""
        if self._site is not None:
            await self._site.stop()
            self._site = None
            self.abort_connections()

    def abort_connections(self) -> None:
        """Break all connections."""
        for connection in self._runner.server.connections if self._runner.server else ():
            if connection.transport is not None:
                connection.transport.abort()
