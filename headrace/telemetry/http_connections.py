"""Limits on the connections of the HTTP server: their number, and the time that each may take.

aiohttp waits for a request's head without limit, and accepts any number of connections. So clients
that open connections and send nothing would block health checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from headrace.tuning import RuntimeTuning


class Connections:
    """The open connections of a server."""

    def __init__(self, tuning: RuntimeTuning) -> None:
        self._tuning = tuning
        self._open: dict[asyncio.BaseTransport, asyncio.Transport] = {}
        self._timers: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        """Timers of the connections that wait for a request, longest-waiting first."""

    def bounded(self, make: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """Return a protocol factory that wraps another one and enforces the limits."""
        return lambda: _Bounded(self, make())

    def opened(self, transport: asyncio.Transport) -> bool:
        """Count a new connection; False if there were too many, and it was closed."""
        if len(self._open) >= self._tuning.http_max_connections:
            longest_waiting = next(iter(self._timers), None)
            if longest_waiting is None:
                transport.abort()
                return False
            self._close(longest_waiting)
        self._open[transport] = transport
        self._wait(transport, self._tuning.http_head_timeout_s)
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
                self._wait(transport, self._tuning.http_idle_timeout_s)

    def _wait(self, transport: asyncio.BaseTransport, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[transport] = loop.call_later(timeout_s, self._close, transport)

    def _close(self, transport: asyncio.BaseTransport) -> None:
        open_one = self._open.get(transport)
        self.closed(transport)
        if open_one is not None:
            open_one.abort()


class _Bounded(asyncio.Protocol):
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
