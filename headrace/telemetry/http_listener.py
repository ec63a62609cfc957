"""A listening HTTP server: start and stop, limits on its connections, and who may call it.

The server of a process (`headrace.telemetry.http`) and the gateway's door for HTTP listen with it.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import re
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias, cast
from urllib.parse import urlsplit

import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from aiohttp.typedefs import Handler

from headrace.access.callers import Credentials, join_values
from headrace.errors import Fatal
from headrace.primitives.waiting_for_callers import WaitingForCallers
from headrace.telemetry.logs import Event
from headrace.tuning import TUNING

log = structlog.get_logger(__name__)

_API_KEY = "X-API-Key"

MakeProtocol: TypeAlias = Callable[[], asyncio.Protocol]


class HttpListener:
    """A server that listens on one address.

    On a loopback address, requests are answered only if their `Host` is a loopback address as well:
    another site's page, whose name was made to resolve to this machine, must not read local data.

    Args:
        setting: name of the port's setting, for errors.
        address: host and port; port 0 picks a free one, see `port`.
        connections: its open connections.
        tls: None to speak without TLS.
        reuse_port: share the port with other processes, see `bind`.
    """

    def __init__(
        self,
        setting: str,
        address: tuple[str, int],
        connections: Connections,
        tls: ssl.SSLContext | None = None,
        *,
        reuse_port: bool = False,
    ) -> None:
        self._tls = tls
        self._reuse_port = reuse_port
        self._setting = setting
        self._host, self._port = address
        self._connections = connections
        self._runner: web.AppRunner | None = None
        self._sockets: list[socket.socket] = []

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
        assert runner.server is not None
        try:
            self._sockets = await bind(
                self._setting, self._host, self._port, reuse_port=self._reuse_port
            )
            listen(self._setting, self._sockets)
        except Fatal:
            await runner.cleanup()
            raise
        self._runner = runner
        self._port = port_of(self._sockets)
        self._connections.start(self._sockets, runner.server, self._tls)

    def stop_listening(self) -> None:
        """Take no further connections. Those that are queued are accepted first, because closing a
        socket resets them.
        """
        sockets, self._sockets = self._sockets, []
        self._connections.stop_accepting(sockets)
        for each in sockets:
            each.close()

    async def stop(self) -> None:
        """Stop listening; requests under way get the runner's `shutdown_timeout` to end."""
        self.stop_listening()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await self._connections.close()


async def bind(
    setting: str, host: str, port: int, *, reuse_port: bool = False
) -> list[socket.socket]:
    """Return sockets that are bound to all addresses of a host, at one port, and do not listen yet.

    Args:
        setting: name of the port's setting, for errors.
        host: a name or an address; empty or `::` for all addresses of this machine.
        port: 0 picks a free one.
        reuse_port: other processes of the same user may listen on the port as well, and the kernel
            spreads the connections over those that do (SO_REUSEPORT).

    Raises:
        Fatal: the name is not known, or an address is taken or is not this machine's.
    """
    sockets: list[socket.socket] = []
    with ExitStack() as opened:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            places = dict.fromkeys(found)
            for family, kind, protocol, _, address in places:
                try:
                    each = opened.enter_context(socket.socket(family, kind, protocol))
                except OSError:
                    continue  # a family that this machine does not have
                each.setblocking(False)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if reuse_port:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if family == socket.AF_INET6:
                    # `::` has IPv4 as well, as it has for gRPC, unless 0.0.0.0 is beside it.
                    v6_only = address[0] != "::" or len(places) > 1
                    each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6_only)
                at_port = port or (port_of(sockets) if sockets else 0)
                each.bind((address[0], at_port, *address[2:]))
                sockets.append(each)
        except OSError as error:
            raise _cannot_listen(setting, host, port, error) from error
        if not sockets:
            raise Fatal(f"{setting}: cannot listen on {host}:{port}: no such address family")
        opened.pop_all()
    return sockets


def port_of(sockets: Sequence[socket.socket]) -> int:
    """Return the port that sockets are bound to."""
    port: int = sockets[0].getsockname()[1]
    return port


def listen(setting: str, sockets: Sequence[socket.socket]) -> None:
    """Begin to listen. Raises `Fatal`: another process listens there; the sockets are closed."""
    try:
        for each in sockets:
            each.listen(socket.SOMAXCONN)
    except OSError as error:
        host, port = each.getsockname()[:2]
        for each in sockets:
            each.close()
        raise _cannot_listen(setting, host, port, error) from error


def _cannot_listen(setting: str, host: str, port: int, error: OSError) -> Fatal:
    hint = "; set another port, or 0 for a free one" if error.errno == errno.EADDRINUSE else ""
    return Fatal(f"{setting}: cannot listen on {host}:{port}: {error.strerror}{hint}")


async def reserve(setting: str, host: str, port: int) -> list[socket.socket]:
    """Return sockets as `bind`, at a port that nobody has, for other processes to share.

    They never listen: they only keep the port for those processes.

    Raises:
        Fatal: see `bind`.
    """
    alone = await bind(setting, host, port)  # SO_REUSEPORT would join another group of processes
    free_port = port_of(alone)
    for each in alone:
        each.close()
    return await bind(setting, host, free_port, reuse_port=True)


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


def credentials_of(request: web.Request, *, with_certificate: bool) -> Credentials:
    """Return what a request shows of its caller.

    Args:
        request: the request.
        with_certificate: read the certificate of its connection.
    """
    headers = request.headers
    return Credentials(
        join_values(headers.getall("Authorization", ())),
        join_values(headers.getall(_API_KEY, ())),
        request.remote or "",
        _names_in(request.get_extra_info("peercert") or {}) if with_certificate else (),
    )


def _names_in(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in a certificate as `ssl.SSLSocket.getpeercert` describes it."""
    names = [
        f"{kind}:{name}"
        for wanted in ("URI", "DNS")
        for kind, name in certificate.get("subjectAltName", ())
        if kind == wanted
    ]
    subject = [each for part in certificate.get("subject", ()) for each in part]
    return (*names, *(f"CN={name}" for kind, name in subject if kind == "commonName"))


class AnswerLimits(NamedTuple):
    """How much of the answers may wait for the clients to take it, and for how long.

    Attributes:
        max_bytes: of all answers that wait; the newest one alone may have more.
        timeout_s: time for an answer to be taken, and a second more for each `bytes_per_s`.
        part_bytes: an answer is passed to its connection in parts of so many bytes, each once the
            one before has been taken.
    """

    max_bytes: int
    timeout_s: float
    bytes_per_s: float
    part_bytes: int


class _InParts(Payload):
    """A body that is written in parts.

    A TLS transport says nothing of what it has passed on to its socket's. That stops taking more
    when it has a part or two, so that the next parts wait.
    """

    def __init__(self, body: bytes, part_bytes: int) -> None:
        super().__init__(body)
        self._size = len(body)
        self._part_bytes = part_bytes

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the body as text."""
        return str(self._value, encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the parts, each once the one before has been taken."""
        body = memoryview(self._value)
        for start in range(0, len(body), self._part_bytes):
            await writer.write(body[start : start + self._part_bytes])
            await writer.drain()


class Connections:
    """The open connections of a server, each from its accept on, TLS handshakes included.

    aiohttp waits for a request's head without limit, and asyncio accepts any number of connections,
    so that clients which open connections and send nothing would block health checks.

    Args:
        max_connections: a further one replaces the one that has waited for its client longest.
        header_timeout_s: from the accept of a connection to the end of its first request's head,
            the TLS handshake included.
        idle_timeout_s: from an answer to the end of the next request's head.
        accept_retry_s: pause while the process has no file descriptor or memory for a connection.
        answers: limits of those that are sent with `send`; None if none are.
    """

    def __init__(
        self,
        max_connections: int,
        header_timeout_s: float,
        idle_timeout_s: float,
        accept_retry_s: float = TUNING.runtime.http_accept_retry_s,
        answers: AnswerLimits | None = None,
    ) -> None:
        self._max_connections = max_connections
        self._header_timeout_s = header_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._accept_retry_s = accept_retry_s
        self._answers = answers
        self._open: set[HttpConnection] = set()
        self._make: MakeProtocol = asyncio.Protocol
        self._tls: ssl.SSLContext | None = None
        self._timers: dict[HttpConnection, asyncio.TimerHandle] = {}
        """Timers of the connections that wait for their clients, to send a request or to take an
        answer; longest-waiting first.
        """
        self._untaken: WaitingForCallers[HttpConnection] = WaitingForCallers(
            0 if answers is None else answers.max_bytes
        )
        self.closed_early = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def untaken_bytes(self) -> int:
        """Size of the answers whose clients have not taken them."""
        return self._untaken.size_bytes

    def start(
        self, sockets: Sequence[socket.socket], make: MakeProtocol, tls: ssl.SSLContext | None
    ) -> None:
        """Accept connections from now on.

        Args:
            sockets: they listen, and do not block.
            make: returns the protocol of a connection.
            tls: None to speak without TLS.
        """
        self._make, self._tls = make, tls
        for each in sockets:
            asyncio.get_running_loop().add_reader(each, self._accept, each)

    def stop_accepting(self, sockets: Sequence[socket.socket]) -> None:
        """Accept the connections that are queued, and none after them."""
        for each in sockets:
            asyncio.get_running_loop().remove_reader(each)
            for _ in range(socket.SOMAXCONN):  # the length of the queue
                if not self._accept(each):
                    break

    def _accept(self, listening: socket.socket) -> bool:
        """Accept a connection; False if none is queued, or the process cannot have another one."""
        try:
            accepted, _ = listening.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:
            return True  # its client went while it was queued
        except OSError as error:
            log.error(Event.HTTP_ACCEPT_FAILED, reason=error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)  # uvloop's does not say whether there was one
            loop.call_later(self._accept_retry_s, self._resume, listening)
            return False
        if len(self._open) >= self._max_connections:
            self.closed_early += 1
            longest_waiting = next(iter(self._timers), None)
            if longest_waiting is None:
                accepted.close()
                return True
            self._close(longest_waiting)
        accepted.setblocking(False)
        connection = HttpConnection(self, self._make)
        self._open.add(connection)
        self._wait(connection, self._header_timeout_s)
        connection.open(accepted, self._tls, self._header_timeout_s)
        return True

    def _resume(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:  # else it was closed meanwhile
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def closed(self, connection: HttpConnection) -> None:
        """Forget a connection."""
        self._open.discard(connection)
        self._stop_waiting(connection)

    @contextmanager
    def answering(self, transport: asyncio.Transport | None) -> Iterator[None]:
        """Suspend a connection's timer while the context lasts: a whole request head has
        arrived.
        """
        connection = None if transport is None else transport.get_protocol()
        if not isinstance(connection, HttpConnection) or connection not in self._open:
            yield  # closed meanwhile
            return
        self._stop_waiting(connection)
        try:
            yield
        finally:
            self._stop_waiting(connection)
            if connection in self._open:
                self._wait(connection, self._idle_timeout_s)

    async def send(self, request: web.Request, response: web.StreamResponse) -> None:
        """Send an answer, within `answering`; return once its client has taken it, or has gone.

        While it waits for its client it counts in `untaken_bytes`. Its connection is closed when
        its time is over, or when it has waited longest and all of them have too many bytes.
        """
        limits, transport = self._answers, request.transport
        connection = None if transport is None else transport.get_protocol()
        if transport is None or not isinstance(connection, HttpConnection):
            return  # its client has gone, which aiohttp finds too
        if limits is None or not isinstance(response, web.Response):
            return  # aiohttp sends it
        body = response.body
        if not isinstance(body, bytes):
            return  # there is none
        if len(body) > limits.part_bytes:
            response.body = _InParts(body, limits.part_bytes)
        connection.answer_bytes = len(body)
        try:
            if transport.get_write_buffer_size():  # writing was paused before: TLS writes as well
                self.writing_paused(connection)
            with suppress(ConnectionError):  # aiohttp goes on with the response, and finds it too
                await response.prepare(request)
                await response.write_eof()
        finally:
            connection.answer_bytes = None
            response.body = None  # aiohttp has the response until the next request comes

    def writing_paused(self, connection: HttpConnection) -> None:
        """Begin the time in which a client has to take the answer that is being sent to it."""
        limits, size_bytes = self._answers, connection.answer_bytes
        if limits is None or size_bytes is None:
            return
        if connection in self._timers or connection not in self._open:
            return
        self._wait(connection, limits.timeout_s + size_bytes / limits.bytes_per_s)
        for longest in self._untaken.add(connection, size_bytes):
            self._expire(longest)

    async def close(self) -> None:
        """End all connections."""
        connections = list(self._open)
        for each in connections:
            self._close(each)
        for each in connections:
            await each.wait_opened()

    def _wait(self, connection: HttpConnection, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[connection] = loop.call_later(timeout_s, self._expire, connection)

    def _stop_waiting(self, connection: HttpConnection) -> None:
        timer = self._timers.pop(connection, None)
        if timer is not None:
            timer.cancel()
            self._untaken.remove(connection)

    def _expire(self, connection: HttpConnection) -> None:
        self.closed_early += 1
        self._close(connection)

    def _close(self, connection: HttpConnection) -> None:
        self.closed(connection)
        connection.abort()


class HttpConnection(asyncio.Protocol):
    """One connection: forwards its events to the protocol of the server, once it is open.

    Attributes:
        answer_bytes: size of the answer that is being sent; None while none is.
    """

    def __init__(self, connections: Connections, make: MakeProtocol) -> None:
        self._connections = connections
        self._make = make
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._opening: asyncio.Task[None] | None = None
        self.answer_bytes: int | None = None

    def open(
        self, accepted: socket.socket, tls: ssl.SSLContext | None, handshake_timeout_s: float
    ) -> None:
        """Open an accepted connection, in a task because of the TLS handshake."""
        opening = self._shake_hands(accepted, tls, handshake_timeout_s)
        self._opening = asyncio.create_task(opening, name="http-connection")
        # Not in the task: if it is cancelled before its first step, it runs no line.
        self._opening.add_done_callback(partial(self._opened, accepted))

    async def _shake_hands(
        self, accepted: socket.socket, tls: ssl.SSLContext | None, timeout_s: float
    ) -> None:
        with suppress(OSError):  # the handshake failed, or the client went
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self,
                accepted,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else timeout_s,
            )

    def _opened(self, accepted: socket.socket, opening: asyncio.Task[None]) -> None:
        if self._transport is None:
            accepted.close()
            self._connections.closed(self)
        if not opening.cancelled():
            opening.result()

    async def wait_opened(self) -> None:
        """Wait until the connection is open, or will never be."""
        if self._opening is not None:
            await asyncio.wait([self._opening])

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()
        elif self._opening is not None:
            self._opening.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport without deriving from it.
        self._transport = cast("asyncio.Transport", transport)
        self._inner = self._make()
        self._inner.connection_made(transport)
        # Paused until the kernel has taken all; at once, if TLS has written something by itself.
        self._transport.set_write_buffer_limits(high=1)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.closed(self)
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
        self._connections.writing_paused(self)

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()
