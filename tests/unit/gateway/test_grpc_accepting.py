"""Calls over gRPC that are accepted several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from headrace.gateway.grpc_accepting import CallAcceptors, can_accept_several
from tests.support.conditions import DEADLINE_S, eventually

SERVICE, METHOD = "test.Echo", "Echo"
MOST_CALLS = 2


class Echo:
    """Answers with its request, once the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = 0

    async def answer(self, message: bytes, _context: object) -> bytes:
        self.begun += 1
        await self.gate.wait()
        return message


@asynccontextmanager
async def served(echo: Echo) -> AsyncIterator[tuple[grpc.aio.Channel, CallAcceptors]]:
    """Serve the method, with few calls at once in each of the two ways of accepting."""
    server = grpc.aio.server(maximum_concurrent_rpcs=MOST_CALLS)
    handler = grpc.unary_unary_rpc_method_handler(echo.answer)  # type: ignore[var-annotated]
    acceptors = CallAcceptors(server, SERVICE, METHOD, handler, (), MOST_CALLS)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    acceptors.start(4)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel, acceptors
    await server.stop(DEADLINE_S)
    await acceptors.join(DEADLINE_S)
    assert not [each for each in asyncio.all_tasks() if each.get_name().startswith("grpc-")]


def test_pinned_grpcio_has_every_private_name() -> None:
    """With another release the door accepts one call after the other."""
    assert can_accept_several()


async def test_calls_are_answered_and_acceptors_end_with_the_server() -> None:
    """Each gets its own answer."""
    echo = Echo()
    echo.gate.set()
    async with served(echo) as (channel, _):
        call: Any = channel.unary_unary(f"/{SERVICE}/{METHOD}")
        for number in range(20):
            assert await call(b"%d" % number, timeout=DEADLINE_S) == b"%d" % number


async def test_calls_over_the_limit_are_refused() -> None:
    """They end while those within it are under way."""
    echo = Echo()
    async with served(echo) as (channel, _):
        call: Any = channel.unary_unary(f"/{SERVICE}/{METHOD}")
        calls = [call(b"", timeout=DEADLINE_S) for _ in range(20)]
        await eventually(lambda: sum(each.done() for each in calls) == 20 - echo.begun)
        refused = [each for each in calls if each.done()]
        echo.gate.set()
        codes = [await each.code() for each in refused]

        assert 1 <= echo.begun <= 2 * MOST_CALLS
        assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert sum([await each.code() == grpc.StatusCode.OK for each in calls]) == echo.begun


async def test_acceptors_that_have_ended_are_a_fault() -> None:
    """The door says so unless it has stopped the server itself."""
    async with served(Echo()) as (_, acceptors):
        fault = acceptors.fault()
    assert fault == ""
    assert acceptors.fault() == "gRPC calls are no longer accepted: the server has ended"
