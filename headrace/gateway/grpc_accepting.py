"""Accept several gRPC calls at a time; every use of a private name of grpc.aio is here.

grpc.aio accepts one call after the other: a task requests the next call from gRPC's core, a loop
waits for that task, begins the call, and starts the next such task. That takes three turns of the
event loop for each call, however many wait in the core. `CallAcceptors` has several requests
outstanding, each in a task of its own that begins the call itself (decision 29).

It also bounds what grpc.aio waits for without an end: a caller that does not send its message, or
does not take its answer. `make_server` returns a server that leaves such calls to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server as aio_server

from headrace.errors import describe_error
from headrace.primitives.waiting_for_callers import WaitingForCallers
from headrace.tuning import GatewayTuning

PRIVATE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "_handle_rpc": (
        "method_name",
        "method_resolver",
        "interceptors",
        "rpc_state",
        "loop",
        "concurrency_exceeded",
    ),
    "_schedule_rpc_coro": ("rpc_coro", "rpc_state", "loop", "method_name"),
}
"""Functions of `grpc._cython.cygrpc` with their parameters, as grpcio 1.85 has them."""


SERVER_PARAMETERS: Final = (
    "self",
    "thread_pool",
    "generic_handlers",
    "interceptors",
    "options",
    "maximum_concurrent_rpcs",
    "compression",
)
"""Those of `grpc.aio._server.Server`, which passes all but the last to `AioServer`."""

OVER_LIMIT: Final = "Concurrent RPC limit exceeded!"
"""As grpc.aio says it."""

WITHOUT_MESSAGE: Final = "expected exactly one request message, got none"
"""grpc.aio ends such a call without a status, and grpc's other server of Python with this one."""


def can_accept_several() -> bool:
    """Return whether the installed release of grpcio has the private names with their parameters.

    With another release the calls are accepted one after the other.
    """
    if not hasattr(cygrpc.AioServer, "_request_registered_call"):
        return False
    if not hasattr(cygrpc, "_ServicerContext"):
        return False
    functions = [
        (getattr(cygrpc, name, None), parameters) for name, parameters in PRIVATE_NAMES.items()
    ]
    functions.append((aio_server.Server.__init__, SERVER_PARAMETERS))
    for function, parameters in functions:
        code = getattr(function, "__code__", None)
        if code is None or code.co_varnames[: code.co_argcount] != parameters:
            return False
    return True


class _AcceptingServer(cygrpc.AioServer):  # type: ignore[misc]
    """Its own loop takes no call of a registered method: those are for `CallAcceptors`."""

    async def _request_registered_call(self, _method: bytes) -> None:
        await asyncio.Event().wait()  # until the loop of the server ends, which cancels this


class _Server(aio_server.Server):
    def __init__(
        self,
        interceptors: Collection[grpc.aio.ServerInterceptor],
        options: Collection[tuple[str, int]],
        max_calls: int,
    ) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _AcceptingServer(
            self._loop, None, (), tuple(interceptors), tuple(options), max_calls
        )


def make_server(
    interceptors: Collection[grpc.aio.ServerInterceptor],
    options: Collection[tuple[str, int]],
    max_calls: int,
) -> grpc.aio.Server:
    """Return a server that leaves the methods of `CallAcceptors` to them.

    Args:
        interceptors: see `grpc.aio.server`.
        options: channel arguments.
        max_calls: calls of all other methods that may be under way.
    """
    server: Any = _Server(interceptors, options, max_calls)
    made: grpc.aio.Server = server
    return made


class CallAcceptors:
    """Accepts the calls of one method.

    Those that wait for their callers do not count: calls whose message has not come, and calls
    whose handler has ended. Such a call is cancelled when its time is over, or when there are too
    many of them and it has waited longest.

    Args:
        server: the server, before it starts; the method is registered with it.
        service, method: names of the service and of its method.
        handler: handler of the method.
        interceptors: interceptors of the server.
        max_calls: calls that may be handled at once; further ones are refused as grpc.aio refuses
            them.
        max_untaken_bytes: of what is kept for the answers that wait for their callers.
        message_timeout_s: time for the message of a call.
        tuning: has the limit of calls that wait, and the time for the end of a call.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        service: str,
        method: str,
        handler: Any,
        interceptors: Collection[grpc.aio.ServerInterceptor],
        max_calls: int,
        max_untaken_bytes: int,
        message_timeout_s: float,
        tuning: GatewayTuning,
    ) -> None:
        server.add_registered_method_handlers(service, {method: handler})
        self.handler = handler
        self.message_timeout_s = message_timeout_s
        self.tuning = tuning
        self._server = server._server  # type: ignore[attr-defined]
        self._method = f"/{service}/{method}"
        self._interceptors = tuple(interceptors)
        self._max_calls = max_calls
        self._acceptors: list[asyncio.Task[None]] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._handled = 0
        self._waiting: WaitingForCallers[_Call] = WaitingForCallers(
            max_untaken_bytes, tuning.max_waiting_calls
        )

    @property
    def untaken_bytes(self) -> int:
        """Size of what is kept for the calls that wait for their callers: see `_Call.end`."""
        return self._waiting.size_bytes

    def start(self, count: int) -> None:
        """Accept `count` calls at a time, from now until the server stops."""
        self._acceptors = [
            asyncio.create_task(self._accept(), name=f"grpc-accept-{number}")
            for number in range(count)
        ]

    def fault(self) -> str:
        """Return why calls are no longer accepted as they should be; empty while they are.

        gRPC's core fails the same way each time, so that an acceptor is not started again.
        """
        ended = next((task for task in self._acceptors if task.done()), None)
        if ended is None:
            return ""
        error = None if ended.cancelled() else ended.exception()
        reason = "the server has ended" if error is None else describe_error(error)
        return f"gRPC calls are no longer accepted: {reason}"

    async def join(self, timeout_s: float) -> None:
        """Wait until all calls have ended, once the server has stopped; then cancel the others."""
        if waiting := [*self._acceptors, *self._calls]:
            _, left = await asyncio.wait(waiting, timeout=timeout_s)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=timeout_s)

    def begin_handling(self) -> bool:
        """Count a call as handled; False if there are too many."""
        if self._handled >= self._max_calls:
            return False
        self._handled += 1
        return True

    def end_handling(self) -> None:
        """Count a call no longer as handled."""
        self._handled -= 1

    def add_waiting(self, call: _Call) -> None:
        """Count a call that waits for its caller, and drop those that have waited longest."""
        for longest in self._waiting.add(call, call.untaken_bytes):
            longest.drop()

    def remove_waiting(self, call: _Call) -> None:
        """Count a call no longer as one that waits for its caller."""
        self._waiting.remove(call)

    async def _accept(self) -> None:
        method = self._method.encode()
        while self._server.is_running():
            try:
                state = await cygrpc.AioServer._request_registered_call(self._server, method)
            except cygrpc._RequestCallError:
                continue
            task = _Call(self).start(self._method, self._interceptors, state)
            del state  # a call that is dropped ends with its last reference
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)


class _Call:
    """A call: waits for its message, is handled, and waits until its caller has taken its end."""

    def __init__(self, acceptors: CallAcceptors) -> None:
        self.untaken_bytes = 0
        self._acceptors = acceptors
        self._outer: asyncio.Task[None] | None = None
        self._inner: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_begun = self._is_handled = self._has_ended = self._is_dropped = False

    def start(
        self, method: str, interceptors: tuple[grpc.aio.ServerInterceptor, ...], state: Any
    ) -> asyncio.Task[None]:
        """Begin the call; the task ends when its caller has taken its end, or has gone."""
        loop = asyncio.get_running_loop()
        methods = SimpleNamespace(resolve_handler=self._counted)
        handling = cygrpc._handle_rpc(method, methods, interceptors, state, loop, False)
        running = self._run(handling, cygrpc._ServicerContext(state, None, None, loop))
        outer: asyncio.Task[None] = loop.create_task(
            cygrpc._schedule_rpc_coro(running, state, loop, method), name="grpc-call"
        )
        outer.add_done_callback(self._done)
        self._outer = outer
        self._wait(self._acceptors.message_timeout_s)
        return outer

    def _counted(self, _details: object) -> Any:
        """Return the handler of the method, which counts the call."""
        handler = self._acceptors.handler
        if not handler.response_streaming:
            return grpc.unary_unary_rpc_method_handler(self._answer)
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(self._answer_stream)
        return grpc.unary_stream_rpc_method_handler(self._answer_stream)

    def end(self, answer_bytes: int = 0, message_bytes: int = 0) -> None:
        """Begin the time in which the caller has to take the end of the call.

        Until then grpc.aio keeps the message and the answer, and its core another copy of that.
        """
        if self._has_ended:
            return
        self._has_ended = True
        self._stop_waiting()
        if self._is_handled:
            self._is_handled = False
            self._acceptors.end_handling()
        if self._outer is None or not self._outer.done():
            self.untaken_bytes = message_bytes + 2 * answer_bytes
            tuning = self._acceptors.tuning
            self._wait(tuning.end_timeout_s + answer_bytes / tuning.end_bytes_per_s)

    def drop(self) -> None:
        """Cancel the call: gRPC's core then frees it, and resets it at its caller."""
        self._stop_waiting()
        self._is_dropped = True
        if self._inner is not None and self._outer is not None:
            self._inner.cancel()
            self._outer.cancel()

    async def _run(self, handling: Any, context: Any) -> None:
        self._inner = asyncio.current_task()
        if self._is_dropped:
            self.drop()
        try:
            await handling
            if not self._has_begun:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, WITHOUT_MESSAGE)
        except grpc.aio.InternalError:  # its end could not be sent: the caller has gone meanwhile
            raise asyncio.CancelledError from None
        finally:
            self.end()

    async def _answer(self, message: bytes, context: Any) -> Any:
        content = b""
        await self._begin(context)
        try:
            content = await self._acceptors.handler.unary_unary(message, _Context(context, self))
        finally:
            self.end(len(content), len(message))
        return content

    async def _answer_stream(self, sent: Any, context: Any) -> None:
        await self._begin(context)
        handler = self._acceptors.handler
        begin = handler.stream_stream if handler.request_streaming else handler.unary_stream
        try:
            await begin(sent, _Context(context, self))
        finally:
            self.end()

    async def _begin(self, context: Any) -> None:
        """Begin to handle the call, or refuse it."""
        self._has_begun = True
        self._stop_waiting()
        self._is_handled = self._acceptors.begin_handling()
        if not self._is_handled:
            self.end()
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, OVER_LIMIT)

    def _wait(self, timeout_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.drop)
        self._acceptors.add_waiting(self)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._acceptors.remove_waiting(self)

    def _done(self, _task: asyncio.Task[None]) -> None:
        self._stop_waiting()


class _Context:
    """The context of a call, whose end begins where it is aborted: that waits for the caller."""

    def __init__(self, context: Any, call: _Call) -> None:
        self._context = context
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def abort(self, *arguments: Any) -> NoReturn:
        """Abort the call, see `grpc.aio.ServicerContext.abort`."""
        self._call.end()
        await self._context.abort(*arguments)
        raise AssertionError("a call that was aborted went on")
