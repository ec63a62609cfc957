"""Accept several gRPC calls at a time; every use of a private name of grpc.aio is here.

grpc.aio accepts one call after the other: a task requests the next call from gRPC's core, a loop
waits for that task, begins the call, and starts the next such task. That takes three turns of the
event loop for each call, however many wait in the core. `CallAcceptors` has several requests
outstanding, each in a task of its own that begins the call itself (decision 29).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any, Final

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from headrace.errors import describe_error

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


def can_accept_several() -> bool:
    """Return whether the installed release of grpcio has the private names with their parameters.

    With another release the calls are accepted one after the other.
    """
    if not hasattr(cygrpc.AioServer, "_request_registered_call"):
        return False
    for name, parameters in PRIVATE_NAMES.items():
        code = getattr(getattr(cygrpc, name, None), "__code__", None)
        if code is None or code.co_varnames[: code.co_argcount] != parameters:
            return False
    return True


class CallAcceptors:
    """Accepts the calls of one method, beside the loop of its server.

    Args:
        server: the server, before it starts; the method is registered with it.
        service, method: names of the service and of its method.
        handler: handler of the method.
        interceptors: interceptors of the server.
        max_calls: calls that may be under way; further ones are refused as grpc.aio refuses them.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        service: str,
        method: str,
        handler: Any,
        interceptors: Collection[grpc.aio.ServerInterceptor],
        max_calls: int,
    ) -> None:
        server.add_registered_method_handlers(service, {method: handler})
        self._server = server._server  # type: ignore[attr-defined]
        self._method = f"/{service}/{method}"
        self._resolver = SimpleNamespace(resolve_handler=lambda _details: handler)
        self._interceptors = tuple(interceptors)
        self._max_calls = max_calls
        self._acceptors: list[asyncio.Task[None]] = []
        self._calls: set[asyncio.Task[None]] = set()

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

    async def _accept(self) -> None:
        loop, method = asyncio.get_running_loop(), self._method
        while self._server.is_running():
            try:
                state = await self._server._request_registered_call(method.encode())
            except cygrpc._RequestCallError:
                continue
            is_over_limit = len(self._calls) >= self._max_calls
            handling = cygrpc._handle_rpc(
                method, self._resolver, self._interceptors, state, loop, is_over_limit
            )
            call = loop.create_task(
                cygrpc._schedule_rpc_coro(handling, state, loop, method),
                name="grpc-call",
            )
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
