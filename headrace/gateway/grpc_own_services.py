"""gRPC's own services: health and reflection.

Sources: https://github.com/grpc/grpc/blob/master/doc/health-checking.md and
https://github.com/grpc/grpc/blob/master/doc/server-reflection.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from headrace.errors import Rejected
from headrace.gateway.gateway import answer_of_error
from headrace.gateway.grpc_calls import (
    Context,
    begin_answers,
    end_quiet,
    parse_message,
    refusal_of_error,
    write_answer,
)
from headrace.gateway.quiet_calls import EndedQuiet, QuietCall, QuietCalls
from headrace.tuning import GatewayTuning

HEALTH: Final[str] = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
REFLECTION: Final[str] = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class GrpcHealth:
    """`grpc.health.v1.Health` of the whole server ("") and of the inference service.

    Args:
        service: full name of the inference service.
        is_ready: returns whether it is ready.
        stopping: ends the watches.
        tuning: has their limit, and the time between two looks at what is watched.
    """

    def __init__(
        self,
        service: str,
        is_ready: Callable[[], bool],
        stopping: asyncio.Event,
        tuning: GatewayTuning,
    ) -> None:
        self._service = service
        self._is_ready = is_ready
        self._stopping = stopping
        self._watches = QuietCalls("Watch", tuning.max_watches, None)
        self._tuning = tuning

    def methods(self) -> dict[str, Any]:
        """Return the methods by name, which take bytes and return bytes."""
        return {
            "Check": grpc.unary_unary_rpc_method_handler(self._check),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }

    async def _check(self, message: bytes, context: Context) -> bytes:
        """Return whether a service is ready."""
        service = await self._parse(message, context)
        status = self._status(service)
        if status == _SERVICE_UNKNOWN:
            expected = f'service: expected {self._service} or ""'
            await context.abort(grpc.StatusCode.NOT_FOUND, f'{expected}, got "{service[:80]}"')
        return _health_of(status)

    async def _watch(self, message: bytes, context: Context) -> None:
        """Send whether a service is ready, now and at each change, until the door stops."""
        service = await self._parse(message, context)
        try:
            async with self._watches.opened():
                await begin_answers(context)
                await self._send_changes(service, context)
        except EndedQuiet as error:
            await end_quiet(context, error, self._tuning.stop_timeout_s)

    async def _parse(self, message: bytes, context: Context) -> str:
        """Return the name of the service in a message; end the call if it cannot be read."""
        try:
            return str(parse_message(health_pb2.HealthCheckRequest, message).service)
        except Rejected as error:
            await context.abort(*refusal_of_error(answer_of_error(error), self._tuning))

    async def _send_changes(self, service: str, context: Context) -> None:
        sent: int | None = None
        while True:
            status = self._status(service)
            if status != sent:
                await write_answer(context, _health_of(status))
                sent = status
            if self._stopping.is_set():
                return
            try:
                async with asyncio.timeout(self._tuning.health_interval_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in ("", self._service):
            return _SERVICE_UNKNOWN
        return _SERVING if self._is_ready() else _NOT_SERVING


def _health_of(status: health_pb2.HealthCheckResponse.ServingStatus) -> bytes:
    content: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
    return content


class GrpcReflection:
    """`grpc.reflection.v1alpha.ServerReflection`, for tools such as grpcurl.

    Args:
        inference: the inference service.
        stopping: ends the calls.
        idle_timeout_s: time after which a call ends in which nothing is asked.
        tuning: has the limit of such calls.
    """

    def __init__(
        self,
        inference: ServiceDescriptor,
        stopping: asyncio.Event,
        idle_timeout_s: float,
        tuning: GatewayTuning,
    ) -> None:
        self._servicer = _servicer(inference)
        self._stopping = stopping
        self._quiet = QuietCalls("ServerReflectionInfo", tuning.max_quiet_streams, idle_timeout_s)
        self._tuning = tuning

    def methods(self) -> dict[str, Any]:
        """Return the methods by name, which take bytes and return bytes."""
        return {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(self._reflect)}

    async def _reflect(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Answer each request of a `ServerReflectionInfo`."""

        async def parsed() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
            async for message in requests:
                yield parse_message(reflection_pb2.ServerReflectionRequest, message)

        try:
            async with self._quiet.opened() as call:
                await begin_answers(context)
                ending = asyncio.create_task(self._end_at_stop(call), name="grpc-reflection-stop")
                try:
                    async for answer in self._servicer.ServerReflectionInfo(parsed(), context):
                        await write_answer(context, answer.SerializeToString())
                        call.rest()
                finally:
                    ending.cancel()
        except EndedQuiet as error:
            await end_quiet(context, error, self._tuning.stop_timeout_s)
        except Rejected as error:
            await context.abort(*refusal_of_error(answer_of_error(error), self._tuning))

    async def _end_at_stop(self, call: QuietCall) -> None:
        """End a call when the door stops listening."""
        await self._stopping.wait()
        call.end("the gateway stops")


def _servicer(inference: ServiceDescriptor) -> Any:
    """Return what describes the services and their messages."""
    pool = inference.file.pool
    others = (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
    for each in others:
        pool.AddSerializedFile(each.serialized_pb)
    names = [inference.full_name]
    names += [service.full_name for each in others for service in each.services_by_name.values()]
    return reflection.aio.ReflectionServicer(names, pool=_SymbolPool(pool))


class _SymbolPool:
    """A pool of descriptors in which methods are symbols as well, as reflection.proto has them.

    protobuf's own does not find them, and tools that ask for a method, such as ghz, would fail.
    """

    def __init__(self, pool: DescriptorPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """Return the file of a message, a service or a method. Raises `KeyError`."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            found = self._pool.FindServiceByName(service)
            if method not in found.methods_by_name:
                raise
            return found.file
