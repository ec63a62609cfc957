"""The bound of connections, TLS handshakes included, and the end of listening, on both loops."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
import uvloop
from aiohttp import web

from headrace.errors import Fatal
from headrace.telemetry.http_listener import (
    Connections,
    HttpListener,
    bind,
    listen,
    port_of,
    reserve,
)
from headrace.tools.local_kafka.security import Certificates, make_certificates
from tests.support.conditions import DEADLINE_S

HOST = "127.0.0.1"
PLACES = 2
LONG_S = 3600.0

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
    """A server that answers every path with `ok`."""

    async def answer(request: web.Request) -> web.Response:
        with connections.answering(request.transport):
            return web.Response(text="ok")

    application = web.Application()
    application.router.add_get("/", answer)
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


async def test_all_addresses_of_host_have_same_port() -> None:
    """A name with addresses of both versions, and a free port."""
    connections = Connections(PLACES, LONG_S, LONG_S)
    listener = HttpListener("telemetry.http_port", ("", 0), connections)
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
