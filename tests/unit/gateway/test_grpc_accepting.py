"""Calls over gRPC that are accepted several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from headrace.gateway.grpc_accepting import CallAcceptors, can_accept_several, make_server
from headrace.tuning import TUNING
from tests.support.conditions import DEADLINE_S, eventually

SERVICE, METHOD = "test.Echo", "Echo"
MOST_CALLS = 2
MIB = 1024 * 1024
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1))
"""Options of a channel that takes less than a MiB of an answer that is not read."""


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
async def served(
    echo: Echo,
    end_timeout_s: float = DEADLINE_S,
    message_timeout_s: float = DEADLINE_S,
    max_untaken_bytes: int = 2**30,
    max_waiting_calls: int = TUNING.gateway.max_waiting_calls,
) -> AsyncIterator[tuple[grpc.aio.Channel, CallAcceptors]]:
    """Serve the method, with few calls at once."""
    server = make_server((), (), MOST_CALLS)
    handler = grpc.unary_unary_rpc_method_handler(echo.answer)  # type: ignore[var-annotated]
    acceptors = CallAcceptors(
        server,
        SERVICE,
        METHOD,
        handler,
        (),
        MOST_CALLS,
        max_untaken_bytes,
        message_timeout_s,
        replace(
            TUNING.gateway,
            max_waiting_calls=max_waiting_calls,
            end_timeout_s=end_timeout_s,
            end_bytes_per_s=2.0**30,
        ),
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    acceptors.start(4)
    target = f"127.0.0.1:{port}"
    async with grpc.aio.insecure_channel(target, options=SMALL_WINDOW) as channel:
        yield channel, acceptors
    await server.stop(DEADLINE_S)
    await acceptors.join(DEADLINE_S)
    assert not [each for each in asyncio.all_tasks() if each.get_name().startswith("grpc-")]


def unread(channel: grpc.aio.Channel, *messages: bytes) -> Any:
    """Begin a call whose answer is not read, and whose caller would send further messages."""

    async def sent() -> AsyncIterator[bytes]:
        for each in messages:
            yield each
        await asyncio.Event().wait()

    call: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")
    return call(sent(), timeout=DEADLINE_S)


def open_calls() -> int:
    return sum(each.get_name() == "grpc-call" for each in asyncio.all_tasks())


async def end_of(call: Any) -> grpc.StatusCode:
    """Read a call until it ends; before that its caller does not learn of a reset."""
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    code: grpc.StatusCode = await call.code()
    return code


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


async def test_every_call_is_counted_and_none_passes_by() -> None:
    """The loop of the server itself takes none of them."""
    echo = Echo()
    async with served(echo) as (channel, _):
        call: Any = channel.unary_unary(f"/{SERVICE}/{METHOD}")
        calls = [call(b"", timeout=DEADLINE_S) for _ in range(40)]
        await eventually(lambda: sum(each.done() for each in calls) == 40 - MOST_CALLS)
        echo.gate.set()
        codes = [await each.code() for each in calls]

    assert echo.begun == codes.count(grpc.StatusCode.OK) == MOST_CALLS


async def test_answers_nobody_takes_leave_room_for_others() -> None:
    """A call whose handler has ended does not count, and the longest-waiting ones are dropped."""
    echo = Echo()
    echo.gate.set()
    async with served(echo, max_waiting_calls=MOST_CALLS) as (channel, _):
        stalled = []
        for _ in range(3 * MOST_CALLS):
            stalled.append(unread(channel, bytes(MIB)))
            await eventually(lambda: echo.begun == len(stalled))
        first = [await end_of(each) for each in stalled[:MOST_CALLS]]
        call: Any = channel.unary_unary(f"/{SERVICE}/{METHOD}")
        answer = await call(b"other", timeout=DEADLINE_S)
        for each in stalled:
            each.cancel()

    assert answer == b"other"
    assert set(first) == {grpc.StatusCode.CANCELLED}


async def test_answer_nobody_takes_is_dropped_after_its_time() -> None:
    """The core of gRPC resets the stream, which frees the answer."""
    echo = Echo()
    echo.gate.set()
    async with served(echo, end_timeout_s=0.1) as (channel, _):
        call = unread(channel, bytes(MIB))
        await eventually(lambda: echo.begun == 1)
        await eventually(lambda: not open_calls())
        # A turn of the loop passes between the end of the tasks and the reset, and a read within it
        # would still get the answer: the answer of another call is later than that.
        other: Any = channel.unary_unary(f"/{SERVICE}/{METHOD}")
        answer = await other(b"other", timeout=DEADLINE_S)
        code = await end_of(call)

    assert (answer, code) == (b"other", grpc.StatusCode.CANCELLED)


async def test_answers_of_too_many_bytes_drop_the_one_waiting_longest() -> None:
    """The newest one may have any size."""
    echo = Echo()
    echo.gate.set()
    async with served(echo, max_untaken_bytes=MIB) as (channel, _):
        first = unread(channel, bytes(MIB))
        await eventually(lambda: echo.begun == 1)
        second = unread(channel, bytes(2 * MIB))
        await eventually(lambda: echo.begun == 2)
        answer = await second.read()  # before the first one, whose reset takes a turn of the loop
        code = await end_of(first)

    assert code is grpc.StatusCode.CANCELLED
    assert len(answer) == 2 * MIB


async def test_end_of_call_whose_caller_has_just_gone_logs_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """So gRPC fails to send the end of a call whose deadline passes at its caller meanwhile."""

    class Late(Echo):
        async def answer(self, message: bytes, _context: object) -> bytes:
            raise grpc.aio.InternalError("Failed execute_batch")

    async with served(Late(), end_timeout_s=0.05) as (channel, _):
        begin: Any = channel.unary_unary(f"/{SERVICE}/{METHOD}")
        code = await begin(b"", timeout=DEADLINE_S).code()

    assert code is grpc.StatusCode.CANCELLED
    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == []


async def test_call_that_ends_without_message_is_refused_at_once() -> None:
    """With the status by which gRPC's other servers refuse it."""

    async def nothing() -> AsyncIterator[bytes]:
        empty: list[bytes] = []
        for each in empty:
            yield each

    echo = Echo()
    async with served(echo) as (channel, _):
        call: Any = channel.stream_unary(f"/{SERVICE}/{METHOD}")
        begun = call(nothing(), timeout=DEADLINE_S / 2)
        code, details = await begun.code(), await begun.details()

    assert (echo.begun, code) == (0, grpc.StatusCode.UNIMPLEMENTED)
    assert details == "expected exactly one request message, got none"


async def test_call_without_message_is_dropped_after_its_time() -> None:
    """Such calls do not count as handled."""
    echo = Echo()
    async with served(echo, message_timeout_s=0.1) as (channel, _):
        code = await end_of(unread(channel))

    assert (echo.begun, code) == (0, grpc.StatusCode.CANCELLED)
