"""A listening HTTP server: start and stop, limits on its connections, and who may call it.

The server of a process (`headrace.telemetry.http`) and the gateway's door for HTTP listen with it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import cast
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from headrace.errors import Fatal


class HttpListener:
    """A server that listens on one address.

    On a loopback address, requests are answered only if their `Host` is a loopback address as well:
    another site's page, whose name was made to resolve to this machine, must not read local data.

    Args:
        setting: name of the port's setting, for errors.
        address: host and port; port 0 picks a free one, see `port`.
        connections: its open connections.
        tls: None to speak without TLS.
        handshake_timeout_s: of TLS; None for asyncio's, of a minute.
    """

    def __init__(
        self,
        setting: str,
        address: tuple[str, int],
        connections: Connections,
        tls: ssl.SSLContext | None = None,
        handshake_timeout_s: float | None = None,
    ) -> None:
        self._tls = tls
        self._handshake_timeout_s = None if tls is None else handshake_timeout_s
        self._setting = setting
        self._host, self._port = address
        self._connections = connections
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port that it listens on, once started."""
        return self._port

    async def start(self, runner: web.AppRunner) -> None:
        """Set up the runner and listen.

        Raises:
            Fatal: the address is taken, or is not this machine's.
        """
        if is_loopback(self._host):
            runner.app.middlewares.append(refuse_other_hosts)
        await runner.setup()
        make = runner.server
        assert make is not None
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connections.limit(make),
                self._host,
                self._port,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
        except OSError as error:
            await runner.cleanup()
            raise Fatal(
                f"{self._setting}: cannot listen on {self._host}:{self._port}: {error.strerror}"
            ) from error
        self._runner = runner
        self._port = self._server.sockets[0].getsockname()[1]

    def stop_listening(self) -> None:
        """Take no further connections."""
        if self._server is not None:
            self._server.close()

    async def stop(self) -> None:
        """Stop listening; requests under way get the runner's `shutdown_timeout` to end."""
        self.stop_listening()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


_ABSOLUTE_TARGET = re.compile(r"[a-z][a-z0-9+.-]*://([^/?#]*)", re.IGNORECASE)


@web.middleware
async def refuse_other_hosts(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer only requests whose host is a loopback name or address.

    The host of an absolute target replaces the header (RFC 9112, section 3.2.2).
    """
    absolute = _ABSOLUTE_TARGET.match(request.raw_path)
    host = request.headers.get("Host") if absolute is None else absolute[1]
    if host is None or _names_loopback(host):
        return await handler(request)
    where = "header Host" if absolute is None else "target of the request"
    error = f"{where}: expected a loopback name or address, got {host!r}"
    return web.json_response({"error": error}, status=421)


@lru_cache(maxsize=64)  # callers send the same few with every request
def _names_loopback(host: str) -> bool:
    return is_loopback(_host_name(host))


def _host_name(host: str) -> str:
    """Return the name or address in a `Host` header, without the port; empty if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class Connections:
    """The open connections of a server.

    aiohttp waits for a request's head without limit, and accepts any number of connections, so that
    clients which open connections and send nothing would block health checks.

    Args:
        max_connections: a further one replaces the one that has waited for a request longest.
        head_timeout_s: from a connection to the end of its first request's head.
        idle_timeout_s: from an answer to the end of the next request's head.
    """

    def __init__(self, max_connections: int, head_timeout_s: float, idle_timeout_s: float) -> None:
        self._max_connections = max_connections
        self._head_timeout_s = head_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._open: dict[asyncio.BaseTransport, asyncio.Transport] = {}
        self._timers: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        """Timers of the connections that wait for a request, longest-waiting first."""

    def limit(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """Return a protocol factory that wraps another one and enforces the limits."""
        return lambda: _LimitedConnection(self, make())

    def opened(self, transport: asyncio.Transport) -> bool:
        """Count a new connection; False if there were too many, and it was closed."""
        if len(self._open) >= self._max_connections:
            longest_waiting = next(iter(self._timers), None)
            if longest_waiting is None:
                transport.abort()
                return False
            self._close(longest_waiting)
        self._open[transport] = transport
        self._wait(transport, self._head_timeout_s)
        return True

    def closed(self, transport: asyncio.BaseTransport) -> None:
        """Forget a connection."""
        self._open.pop(transport, None)
        timer = self._timers.pop(transport, None)
        if timer is not None:
            timer.cancel()

    @contextmanager
    def answering(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Suspend a connection's timer while the context lasts: a whole request head has
        arrived.
        """
        if transport is None or transport not in self._open:
            yield  # closed meanwhile
            return
        timer = self._timers.pop(transport, None)
        if timer is not None:
            timer.cancel()
        try:
            yield
        finally:
            if transport in self._open:
                self._wait(transport, self._idle_timeout_s)

    def _wait(self, transport: asyncio.BaseTransport, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[transport] = loop.call_later(timeout_s, self._close, transport)

    def _close(self, transport: asyncio.BaseTransport) -> None:
        open_one = self._open.get(transport)
        self.closed(transport)
        if open_one is not None:
            open_one.abort()


class _LimitedConnection(asyncio.Protocol):
    """Forwards the events of a connection, unless it exceeds the limit."""

    def __init__(self, connections: Connections, inner: asyncio.Protocol) -> None:
        self._connections = connections
        self._inner: asyncio.Protocol | None = inner
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        # uvloop's transports have the methods of asyncio.Transport without deriving from it.
        if not self._connections.opened(cast("asyncio.Transport", transport)):
            self._inner = None
        if self._inner is not None:
            self._inner.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._connections.closed(self._transport)
        if self._inner is not None:
            self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()
