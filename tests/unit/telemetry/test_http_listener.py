"""The bound of connections, TLS handshakes included, and the end of listening, on both loops."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
import uvloop
from aiohttp import web
from structlog.testing import capture_logs

from headrace.errors import Fatal
from headrace.telemetry.http_listener import (
    AnswerLimits,
    Connections,
    HttpListener,
    bind,
    listen,
    port_of,
    reserve,
)
from headrace.telemetry.logs import Event
from headrace.tools.local_kafka.security import Certificates, make_certificates
from tests.support.conditions import DEADLINE_S, eventually

HOST = "127.0.0.1"
PLACES = 2
LONG_S = 3600.0
LARGE = bytes(range(256)) * 64 * 1024
UNTAKEN = AnswerLimits(2 * len(LARGE) - 1, LONG_S, 2.0**30, 65536)

Run = Callable[[Coroutine[None, None, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine on a loop of each kind."""

    def within_deadline(main: Coroutine[None, None, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(main, DEADLINE_S))

    return within_deadline


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    """A certificate for this machine, and its authority."""
    return make_certificates(tmp_path)


def context_of(files: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.broker)
    return context


@asynccontextmanager
async def listening(
    connections: Connections, tls: ssl.SSLContext | None = None
) -> AsyncIterator[HttpListener]:
    """A server that answers `/large` with more than the kernel buffers, and others with `ok`; on
    `/behind` that waits behind bytes of something else, of which the kernel takes all but the last.
    """

    async def answer(request: web.Request) -> web.Response:
        transport = request.transport
        assert transport is not None
        with connections.answering(transport):
            while request.path == "/behind" and not transport.get_write_buffer_size():
                transport.write(bytes(4096))
            response = web.Response(body=LARGE if request.path == "/large" else b"ok")
            await connections.send(request, response)
        return response

    application = web.Application()
    for path in ("/", "/large", "/behind"):
        application.router.add_get(path, answer)
    listener = HttpListener("telemetry.http_port", (HOST, 0), connections, tls)
    await listener.start(web.AppRunner(application, access_log=None, shutdown_timeout=0.1))
    try:
        yield listener
    finally:
        await listener.stop()


async def body_over_tls(port: int, files: Certificates) -> str:
    context = ssl.create_default_context(cafile=str(files.authority))
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"https://{HOST}:{port}/", ssl=context) as response,
    ):
        return await response.text()


async def ask_on(
    server: HttpListener, tls: ssl.SSLContext | None = None, path: str = "/large"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for an answer on a connection whose client's kernel buffers little."""
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    narrow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(narrow, (HOST, server.port))
    name = None if tls is None else HOST
    reader, writer = await asyncio.open_connection(sock=narrow, ssl=tls, server_hostname=name)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return reader, writer


async def is_whole(reader: asyncio.StreamReader) -> bool:
    """Return whether the large answer comes whole."""
    try:
        await reader.readuntil(b"\r\n\r\n")
        return await reader.readexactly(len(LARGE)) == LARGE
    except (asyncio.IncompleteReadError, ConnectionError):
        return False


async def end_of(reader: asyncio.StreamReader) -> None:
    """Wait until the server has closed a connection."""
    with suppress(ConnectionError):
        assert await reader.read() == b""


def test_stalled_handshakes_give_way_to_further_connection(run: Run, files: Certificates) -> None:
    """They count from their accept on: connections that send nothing keep nobody out."""

    async def main() -> None:
        connections = Connections(PLACES, LONG_S, LONG_S)
        async with listening(connections, context_of(files)) as server:
            stalled = [await asyncio.open_connection(HOST, server.port) for _ in range(PLACES + 2)]
            assert await body_over_tls(server.port, files) == "ok"
            for reader, _ in stalled[:-PLACES]:
                await end_of(reader)
            assert len(connections) <= PLACES
            for _, writer in stalled:
                writer.close()
        assert len(connections) == 0

    run(main())


def test_handshake_and_head_share_one_deadline(run: Run, files: Certificates) -> None:
    """A connection that ends its handshake in time and sends no head is closed as well."""

    async def main() -> None:
        connections = Connections(PLACES, 0.1, LONG_S)
        context = ssl.create_default_context(cafile=str(files.authority))
        async with listening(connections, context_of(files)) as server:
            silent, writer = await asyncio.open_connection(HOST, server.port)
            with suppress(OSError):  # a slow machine takes all of the time for the handshake
                reader, other = await asyncio.open_connection(HOST, server.port, ssl=context)
                await end_of(reader)
                other.close()
            await end_of(silent)
            writer.close()
            assert (len(connections), connections.closed_early) == (0, 2)

    run(main())


def test_handshake_that_fails_leaves_no_connection(run: Run, files: Certificates) -> None:
    """Plain text at a port for TLS."""

    async def main() -> None:
        connections = Connections(PLACES, LONG_S, LONG_S)
        async with listening(connections, context_of(files)) as server:
            reader, writer = await asyncio.open_connection(HOST, server.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
            assert await body_over_tls(server.port, files) == "ok"
            assert len(connections) <= 1

    run(main())


def test_connection_over_tls_is_no_fault_of_loop(run: Run, files: Certificates) -> None:
    """TLS 1.3 writes at once: the transport pauses and resumes its protocol before any request."""

    async def main() -> None:
        faults: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        async with listening(Connections(PLACES, LONG_S, LONG_S), context_of(files)) as server:
            assert await body_over_tls(server.port, files) == "ok"
        assert faults == []

    run(main())


def test_connections_are_accepted_again_once_there_are_file_descriptors(run: Run) -> None:
    """A process that had none for a moment answers its health checks after it."""

    async def main() -> None:
        connections = Connections(PLACES, LONG_S, LONG_S, accept_retry_s=0.01)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        async with listening(connections) as server:
            client = socket.socket()
            client.setblocking(False)
            with capture_logs() as logged:
                # A new file descriptor has the lowest free number.
                resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, hard))
                try:
                    await asyncio.get_running_loop().sock_connect(client, (HOST, server.port))
                    await eventually(lambda: bool(logged))
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            reader, writer = await asyncio.open_connection(sock=client)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            writer.close()
        assert logged[0]["event"] == Event.HTTP_ACCEPT_FAILED

    run(main())


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_answers_not_taken_give_way_to_newest(run: Run, files: Certificates, secured: bool) -> None:
    """One of them is within the limit; what is taken counts no longer, and its connection goes on.

    Then a connection with an answer that is not taken gives way to a further connection.
    """
    context = ssl.create_default_context(cafile=str(files.authority)) if secured else None

    async def main() -> None:
        connections = Connections(PLACES, LONG_S, LONG_S, answers=UNTAKEN)
        async with listening(connections, context_of(files) if secured else None) as server:
            first, writer = await ask_on(server, context)
            await eventually(lambda: connections.untaken_bytes == len(LARGE))
            second, other = await ask_on(server, context)
            await eventually(lambda: connections.closed_early == 1)
            assert connections.untaken_bytes == len(LARGE)
            assert [await is_whole(each) for each in (first, second)] == [False, True]
            await eventually(lambda: connections.untaken_bytes == 0)
            other.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await second.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            other.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await eventually(lambda: connections.untaken_bytes == len(LARGE))
            more = [await asyncio.open_connection(HOST, server.port) for _ in range(PLACES)]
            await eventually(lambda: connections.untaken_bytes == 0)
            assert not await is_whole(second)
            for each in (writer, other, *(sending for _, sending in more)):
                each.close()

    run(main())


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_answer_not_taken_ends_with_its_time(run: Run, files: Certificates, secured: bool) -> None:
    """Its connection is closed, however long it might be idle."""
    context = ssl.create_default_context(cafile=str(files.authority)) if secured else None

    async def main() -> None:
        limits = UNTAKEN._replace(timeout_s=0.1)
        connections = Connections(PLACES, LONG_S, LONG_S, answers=limits)
        async with listening(connections, context_of(files) if secured else None) as server:
            reader, writer = await ask_on(server, context)
            await eventually(lambda: connections.closed_early == 1)
            assert (len(connections), connections.untaken_bytes) == (0, 0)
            assert not await is_whole(reader)
            writer.close()

    run(main())


def test_small_answer_behind_other_bytes_counts(run: Run) -> None:
    """Such as those that TLS itself sends: the connection was paused before the answer."""

    async def main() -> None:
        connections = Connections(PLACES, LONG_S, LONG_S, answers=UNTAKEN)
        async with listening(connections) as server:
            reader, writer = await ask_on(server, path="/behind")
            await eventually(lambda: connections.untaken_bytes == len(b"ok"))
            received = b""
            while not received.endswith(b"ok"):
                received += await reader.read(65536)
            assert b"HTTP/1.1 200" in received
            await eventually(lambda: connections.untaken_bytes == 0)
            writer.close()

    run(main())


def test_idle_connection_keeps_nothing_of_its_answer(run: Run) -> None:
    """The response has none of it any more, which aiohttp keeps until the next request comes."""

    async def main() -> None:
        connections = Connections(PLACES, LONG_S, LONG_S, answers=UNTAKEN)
        async with listening(connections) as server:
            before = sys.getrefcount(LARGE)
            reader, writer = await ask_on(server)
            assert await is_whole(reader)
            await eventually(lambda: sys.getrefcount(LARGE) == before)
            assert len(connections) == 1
            writer.close()

    run(main())


def test_queued_connection_is_answered_after_end_of_listening(run: Run) -> None:
    """The kernel has accepted it; closing the socket would reset it."""

    async def main() -> None:
        async with listening(Connections(PLACES, LONG_S, LONG_S)) as server:
            queued = socket.create_connection(
                (HOST, server.port)
            )  # the loop does not run meanwhile
            queued.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            server.stop_listening()
            reader, writer = await asyncio.open_connection(sock=queued)
            assert (await reader.read()).endswith(b"ok")
            writer.close()
            with pytest.raises(OSError, match="Connect"):
                await asyncio.open_connection(HOST, server.port)

    run(main())


async def test_reserved_port_is_shared_by_those_that_listen() -> None:
    """The one that keeps it does not listen, so that the kernel sends it no connection."""
    kept = await reserve("gateway.http_port", HOST, 0)
    port = port_of(kept)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(HOST, port)
    for _ in range(2):
        (sharing,) = await bind("gateway.http_port", HOST, port, reuse_port=True)
        listen("gateway.http_port", [sharing])
        _, writer = await asyncio.open_connection(HOST, port)
        writer.close()
        sharing.close()
    for each in kept:
        each.close()


async def test_shared_port_is_not_reserved_again() -> None:
    """Else two groups of processes would answer each other's callers."""
    kept = await reserve("gateway.http_port", HOST, 0)
    (sharing,) = await bind("gateway.http_port", HOST, port_of(kept), reuse_port=True)
    listen("gateway.http_port", [sharing])
    with pytest.raises(Fatal, match=rf"gateway\.http_port: cannot listen on {HOST}:\d+: Address"):
        await reserve("gateway.http_port", HOST, port_of(kept))
    for each in (*kept, sharing):
        each.close()


@pytest.mark.parametrize("host", ["", "::"])
async def test_all_addresses_have_same_port(host: str) -> None:
    """Of both versions, at a free port. `::` has those of IPv4 as well, as with other servers."""
    connections = Connections(PLACES, LONG_S, LONG_S)
    listener = HttpListener("telemetry.http_port", (host, 0), connections)
    await listener.start(web.AppRunner(web.Application()))
    try:
        _, writer = await asyncio.open_connection(HOST, listener.port)
        writer.close()
        if socket.has_dualstack_ipv6():
            _, writer = await asyncio.open_connection("::1", listener.port)
            writer.close()
    finally:
        await listener.stop()


async def test_unknown_host_is_named_at_start() -> None:
    """With the setting of its port."""
    connections = Connections(PLACES, LONG_S, LONG_S)
    listener = HttpListener("telemetry.http_port", ("203.0.113.1", 0), connections)
    with pytest.raises(Fatal, match=r"telemetry\.http_port: cannot listen on 203\.0\.113\.1:0"):
        await listener.start(web.AppRunner(web.Application()))
