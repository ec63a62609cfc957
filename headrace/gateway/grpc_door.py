"""The door for gRPC: `inference.GRPCInferenceService` of the Open Inference Protocol and Triton.

`GrpcDoor._take` is a request's whole way through the door, alone (`ModelInfer`) or in a stream
(`ModelStreamInfer`). `GrpcModels` has the other methods of the service.
Sources: https://github.com/kserve/open-inference-protocol (gRPC), Triton's extensions of it
(https://github.com/triton-inference-server/server/tree/main/docs/protocol), and gRPC's own
protocols for health (https://github.com/grpc/grpc/blob/master/doc/health-checking.md) and
reflection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Self, TypeAlias

import grpc
import structlog
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from headrace.access.callers import ApiGroup, Caller, Credentials, Denied
from headrace.access.tls import Certificates
from headrace.config import GatewaySettings
from headrace.errors import Fatal, Rejected
from headrace.gateway import open_inference_pb2 as messages
from headrace.gateway.call_groups import CallGroups
from headrace.gateway.gateway import (
    Gateway,
    Unavailable,
    answer_of_error,
    read_priority,
)
from headrace.gateway.grpc_accepting import CallAcceptors, can_accept_several, make_server
from headrace.gateway.grpc_calls import (
    Context,
    Refusal,
    credentials_in,
    credentials_of,
    names_in,
    parse_message,
    refusal_of_error,
    text_of,
)
from headrace.gateway.grpc_codec import (
    decode_call,
    encode_answer,
    find_places,
    has_texts_in_regions,
    is_decoded_by_element,
)
from headrace.gateway.grpc_models import GrpcModels
from headrace.gateway.quiet_calls import EndedQuiet, QuietCall, QuietCalls, Room
from headrace.protocol.headers import HeaderName
from headrace.telemetry.logs import Event
from headrace.telemetry.span_attributes import Attributes
from headrace.tuning import GatewayTuning

log = structlog.get_logger(__name__)

DOOR = "grpc"
SERVICE = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"]
FINAL = "triton_final_response"
WANTS_FINAL = "triton_enable_empty_final_response"

_SERVERS_FAULTS = frozenset(
    {
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNKNOWN,
    }
)
"""Statuses that make the span of a call an error, by OpenTelemetry's conventions for gRPC."""

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

_Method: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class GrpcDoor:
    """A gRPC server in front of a gateway; entering starts it, leaving stops it.

    Args:
        gateway: an open one.
        port: to listen on; 0 picks a free one.
    """

    def __init__(self, gateway: Gateway, port: int) -> None:
        self._gateway = gateway
        self._tuning = gateway.tuning
        self._port = port
        self._groups = CallGroups(gateway.tuning)
        limit, idle_timeout_s = self._tuning.max_quiet_streams, gateway.settings.idle_timeout_s
        max_unread_bytes = gateway.settings.max_in_flight_bytes // 2  # the rest is for others
        self._quiet_streams = QuietCalls(
            "ModelStreamInfer", limit, idle_timeout_s, max_unread_bytes
        )
        self._quiet_reflections = QuietCalls("ServerReflectionInfo", limit, idle_timeout_s)
        self._watches = QuietCalls("Watch", self._tuning.max_watches, None)
        self._server: grpc.aio.Server | None = None
        self._acceptors: list[CallAcceptors] = []
        self._stopping = asyncio.Event()
        self._closing = asyncio.Event()  # GOAWAY was sent

    @property
    def port(self) -> int:
        """The port that it listens on, once started."""
        return self._port

    async def __aenter__(self) -> Self:
        settings = self._gateway.settings
        host = settings.grpc_host
        tuning = self._tuning
        max_calls = settings.max_in_flight + tuning.spare_calls
        max_quiet = 2 * tuning.max_quiet_streams + tuning.max_watches
        are_alike = self._gateway.callers.are_all_alike
        interceptors = [] if are_alike else [_Admission(self._gateway, self._tuning)]
        options = _options(settings, tuning)
        health = _HealthService(self._is_serving, self._stopping, self._watches, tuning)
        reflect: _Method = grpc.stream_stream_rpc_method_handler(
            partial(self._reflect, _reflection())
        )
        services: dict[str, dict[str, _Method]] = {
            SERVICE.full_name: self._methods(),
            _HEALTH: health.methods(),
            _REFLECTION: {"ServerReflectionInfo": reflect},
        }
        if tuning.accepted_at_once and can_accept_several():
            server = make_server(interceptors, options, tuning.spare_calls)
            # Each method has a count of its own, so that none takes the place of another.
            limits = {
                "ModelInfer": max_calls,
                "ModelStreamInfer": max_calls + tuning.max_quiet_streams,
                "ServerReflectionInfo": 2 * tuning.max_quiet_streams,
                "Watch": 2 * tuning.max_watches,
            }
            self._acceptors = [
                CallAcceptors(
                    server,
                    service,
                    method,
                    handler,
                    interceptors,
                    max_calls=limits.get(method, tuning.spare_calls),
                    max_untaken_bytes=settings.max_in_flight_bytes,
                    message_timeout_s=settings.body_timeout_s,
                    tuning=tuning,
                )
                for service, methods in services.items()
                for method, handler in methods.items()
            ]
        else:
            server = grpc.aio.server(
                interceptors=interceptors,
                options=options,
                maximum_concurrent_rpcs=max_calls + max_quiet,
            )
            server.add_generic_rpc_handlers(
                [
                    grpc.method_handlers_generic_handler(service, methods)
                    for service, methods in services.items()
                ]
            )
        try:
            address = f"[{host}]:{self._port}" if ":" in host else f"{host or '[::]'}:{self._port}"
            certificates = self._gateway.certificates
            self._port = (
                server.add_insecure_port(address)
                if certificates is None
                else server.add_secure_port(address, _credentials(certificates))
            )
        except RuntimeError as error:
            raise Fatal(
                f"gateway.grpc_port: cannot listen on {host}:{self._port}: {error}"
            ) from error
        await server.start()
        self._server = server
        for each in self._acceptors:
            each.start(self._tuning.accepted_at_once)
        if self._acceptors:
            self._gateway.health.watch_live(self._fault)
        log.info(Event.GATEWAY_LISTENING, host=host, grpc_port=self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        if self._server is not None:
            await self._server.stop(self._tuning.stop_timeout_s)
            self._server = None
        for each in self._acceptors:
            await each.join(self._tuning.stop_timeout_s)

    async def stop_listening(self) -> None:
        """Refuse further calls as retriable, and close the connections once none is under way.

        Streams end after their answers. GOAWAY comes last, because gRPC cancels, without a reason,
        each call that arrives after it was sent and before its caller has read it.
        """
        self._stopping.set()
        await self._gateway.under_way.wait_for_silence(self._tuning.drain_silence_s)
        if self._server is not None:
            # `stop` sends GOAWAY before it waits for anything, and so before this runs.
            asyncio.get_running_loop().call_soon(self._closing.set)
            await self._server.stop(self._tuning.stop_timeout_s)

    async def _refuse_in_drain(self) -> NoReturn:
        """Raise `Unavailable` once GOAWAY was sent, or a second later than now.

        A caller that tries again at once has then read GOAWAY and opens a connection, to another
        gateway. If it were refused at once it would send call after call here, one of which would
        meet GOAWAY and be cancelled.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._tuning.drain_refusal_s):
                await self._closing.wait()
        raise Unavailable("the gateway stops; expected this call at another one")

    def _fault(self) -> str:
        """Return why calls are no longer accepted; empty if they are, or in a stop."""
        if self._stopping.is_set():
            return ""
        return next(filter(None, (each.fault() for each in self._acceptors)), "")

    def _is_serving(self, service: str) -> bool | None:
        """Return whether a service is ready; None if there is no such service."""
        return self._gateway.health.ready if service in ("", SERVICE.full_name) else None

    def _methods(self) -> dict[str, Any]:
        """Return the service's methods, which take bytes and return bytes: see `parse_message`."""
        return {
            "ModelInfer": grpc.unary_unary_rpc_method_handler(self._infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._infer_stream),
            **GrpcModels(self._gateway).methods(),
        }

    # --- reflection ---------------------------------------------------------------------------

    async def _reflect(
        self, reflecting: Any, requests: AsyncIterator[bytes], context: Context
    ) -> None:
        """Answer each request of a `ServerReflectionInfo`."""

        async def parsed() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
            async for message in requests:
                yield parse_message(reflection_pb2.ServerReflectionRequest, message)

        try:
            async with self._quiet_reflections.opened() as call:
                ending = asyncio.create_task(self._end_at_stop(call), name="grpc-reflection-stop")
                try:
                    async for answer in reflecting.ServerReflectionInfo(parsed(), context):
                        await _write(context, answer.SerializeToString())
                        call.rest()
                finally:
                    ending.cancel()
        except EndedQuiet as error:
            await _end_quiet(context, error, self._tuning.stop_timeout_s)
        except Rejected as error:
            await context.abort(*refusal_of_error(answer_of_error(error), self._tuning))

    async def _end_at_stop(self, call: QuietCall) -> None:
        """End a call when the door stops listening."""
        await self._stopping.wait()
        call.end("the gateway stops")

    # --- inference ----------------------------------------------------------------------------

    async def _infer(self, message: bytes, context: Context) -> bytes:
        """Answer `ModelInfer`."""
        answer = await self._take(message, context, "ModelInfer")
        if isinstance(answer, Refusal):
            await context.abort(*answer)
        return answer.SerializeToString()

    async def _infer_stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Answer each request of a `ModelStreamInfer`, in the order of the requests.

        So many are under way at once. An error is the answer to its request alone; the stream ends
        when its caller ends it, when it is quiet for too long, or when the door stops listening.
        """
        try:
            async with self._quiet_streams.opened() as call:
                await self._answer_each(requests, context, call)
        except EndedQuiet as error:
            await _end_quiet(context, error, self._tuning.stop_timeout_s)
        if self._stopping.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the gateway stops; open a new stream")

    async def _answer_each(
        self, requests: AsyncIterator[bytes], context: Context, call: QuietCall
    ) -> None:
        """Answer the requests of a stream until it ends, or the door stops listening."""
        permits = asyncio.Semaphore(self._tuning.requests_per_stream)
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()
        room = Room(self._tuning.unread_bytes_per_stream)

        async def take(message: bytes) -> bytes:
            call.begin()
            try:
                answer = await self._take_from_stream(message, context)
            finally:
                call.done()
            held.add(len(answer))
            room.take(len(answer) - len(message))
            call.hold(len(answer))
            return answer

        async def read() -> None:
            await permits.acquire()
            async for message in requests:
                room.take(len(message))
                answers.put_nowait(tasks.create_task(take(message), name="grpc-stream-request"))
                await permits.acquire()
                await room.wait()

        async def read_until_stop() -> None:
            stopping = asyncio.create_task(self._stopping.wait(), name="grpc-stream-stop")
            reading = asyncio.create_task(read(), name="grpc-stream-read")
            try:
                await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
                reading.cancel()
            answers.put_nowait(None)

        with self._gateway.under_way.holding() as held:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(read_until_stop(), name="grpc-stream")
                while (answer := await answers.get()) is not None:
                    content = await answer
                    await _write(context, content)  # until its caller reads, see `QuietCalls`
                    held.remove(len(content))
                    room.take(-len(content))
                    call.read(len(content))
                    call.rest()
                    permits.release()

    async def _take_from_stream(self, message: bytes, context: Context) -> bytes:
        answer = await self._take(message, context, "ModelStreamInfer")
        if isinstance(answer, Refusal):
            return messages.ModelStreamInferResponse(
                error_message=answer.message,
                infer_response=messages.ModelInferResponse(id=_id_of(message)),
            ).SerializeToString()
        answer.parameters[FINAL].bool_param = True
        return messages.ModelStreamInferResponse(infer_response=answer).SerializeToString()

    async def _take(
        self, message: bytes, context: Context, method: str
    ) -> messages.ModelInferResponse | Refusal:
        """Parse a request, send it to the log, wait for its answer, and encode that.

        gRPC cancels this when the caller cancels, when its deadline passes, and when it is gone;
        that cancels the request.
        """
        gateway, conversions = self._gateway, self._gateway.conversions
        began_s = time.monotonic()
        status = grpc.StatusCode.CANCELLED
        found = dict(context.invocation_metadata() or ())
        given = (
            text_of(found.get(name)) for name in (HeaderName.TRACEPARENT, HeaderName.TRACESTATE)
        )
        span = gateway.spans.begin(*given)
        try:
            if self._stopping.is_set():
                await self._refuse_in_drain()
            caller = self._caller_of(context)
            with gateway.under_way.counting(caller) as counted:
                counted.add(len(message))
                request = parse_message(messages.ModelInferRequest, message)
                regions = gateway.access(counted)
                by_element = is_decoded_by_element(request)
                call = await conversions.decode(
                    partial(decode_call, request),
                    partial(find_places, request),
                    regions,
                    takes_long=conversions.parsing_takes_long(
                        message,
                        by_element=by_element,
                        texts_in_regions=has_texts_in_regions(request),
                    ),
                )
                call.parameters.pop(WANTS_FINAL, None)  # each answer is the final one
                await self._groups.join()  # before the time left is read
                given_s = [call.timeout_us / 1e6] if call.timeout_us else []
                if (left_s := context.time_remaining()) is not None:
                    given_s.append(max(left_s, self._tuning.least_timeout_s))
                priority = text_of(found.get(HeaderName.PRIORITY))
                urgency = gateway.urgency(given_s, read_priority(HeaderName.PRIORITY, priority))
                model, version = request.model_name, request.model_version or None
                headers = gateway.record_headers(span, caller, found.get)
                answer = await gateway.infer(model, version, call, urgency, headers)
                span.answered(answer)
                encoded = await conversions.encode(
                    partial(encode_answer, answer, call),
                    regions,
                    takes_long=conversions.encoding_takes_long(answer, call),
                )
            status = grpc.StatusCode.OK
        except Exception as error:  # noqa: BLE001 - the caller gets it as an answer, and it is logged
            described = answer_of_error(error)
            refusal = refusal_of_error(described, self._tuning)
            status = refusal.status
            at_fault = status in _SERVERS_FAULTS
            span.failed(described.code, described.message, is_callers_fault=not at_fault)
            return refusal
        else:
            return encoded
        finally:
            gateway.metrics.ended_at_door(DOOR, status.name, time.monotonic() - began_s)
            span.end(partial(self._describe_call, method, status))

    def _caller_of(self, context: Context) -> Caller | None:
        """Return who sends a request; None if all callers are alike. Raises `Denied`."""
        callers = self._gateway.callers
        if callers.are_all_alike:
            return None
        given = credentials_of(context, use_certificates=callers.use_certificates)
        return callers.admit(ApiGroup.INFERENCE, given)

    def _describe_call(self, method: str, status: grpc.StatusCode) -> tuple[str, Attributes]:
        """Return the name and the attributes of the span of a call."""
        name = f"{SERVICE.full_name}/{method}"
        return name, {
            "rpc.system.name": "grpc",
            "rpc.method": name,
            "rpc.response.status_code": status.name,
            "server.address": self._gateway.settings.grpc_host,
            "server.port": self._port,
        }


class _Admission(grpc.aio.ServerInterceptor):
    """Refuses callers without the right login before a message is read.

    A certificate is known only where a method begins, which for one message is after that was read.
    Then another certificate of the same authority can cost a message, and nothing else.
    """

    def __init__(self, gateway: Gateway, tuning: GatewayTuning) -> None:
        self._gateway = gateway
        self._tuning = tuning

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Method | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Method | None:
        """Return the method, or one that refuses the call."""
        group = _group_of(handler_call_details.method)
        given = credentials_in(dict(handler_call_details.invocation_metadata or ()))
        if self._gateway.callers.use_certificates:
            method = await continuation(handler_call_details)
            return None if method is None else self._admitting(group, given, method)
        refusal = self._refusal_of(group, given)
        if refusal is not None:
            # The kind of a stream, because that begins before the first message.
            return grpc.stream_stream_rpc_method_handler(partial(_refuse_caller, refusal))
        return await continuation(handler_call_details)

    def _refusal_of(self, group: ApiGroup, given: Credentials) -> Refusal | None:
        try:
            self._gateway.callers.admit(group, given)
        except Denied as error:
            refusal = refusal_of_error(answer_of_error(error), self._tuning)
            if group is ApiGroup.INFERENCE:
                self._gateway.metrics.ended_at_door(DOOR, refusal.status.name, 0.0)
            return refusal
        return None

    def _admitting(self, group: ApiGroup, given: Credentials, method: Any) -> _Method:
        """Return the method, which first looks at the certificate of its caller.

        Args:
            group: of the method.
            given: in the call's metadata.
            method: a `_Method` of coroutines; the stubs of gRPC know only plain functions in it.
        """

        async def admit(context: Context) -> None:
            names = names_in(context.auth_context())
            refusal = self._refusal_of(group, given._replace(certificate=names))
            if refusal is not None:
                await context.abort(*refusal)

        async def answer(message: Any, context: Context) -> Any:
            await admit(context)
            return await method.unary_unary(message, context)

        async def answer_stream(sent: Any, context: Context) -> None:
            await admit(context)
            begin = method.stream_stream if method.request_streaming else method.unary_stream
            await begin(sent, context)

        if not method.response_streaming:
            return grpc.unary_unary_rpc_method_handler(answer)
        if method.request_streaming:
            return grpc.stream_stream_rpc_method_handler(answer_stream)
        return grpc.unary_stream_rpc_method_handler(answer_stream)


async def _write(context: Context, answer: Any) -> None:
    """Write an answer of a stream; cancel the call if its caller is gone.

    gRPC cancels it as well, but maybe later, and logs any other error as one of the server.
    """
    try:
        await context.write(answer)
    except grpc.aio.BaseError:
        raise asyncio.CancelledError from None


async def _end_quiet(context: Context, error: EndedQuiet, timeout_s: float) -> NoReturn:
    """End a call with the reason why it has to end.

    gRPC sends it after the answers that the caller has not read, and so not at once.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{error}; begin a new call")
    except grpc.aio.AbortError:
        raise
    except (TimeoutError, grpc.aio.BaseError):  # its caller does not read, or has gone
        raise asyncio.CancelledError from None


async def _refuse_caller(refusal: Refusal, _requests: Any, context: Context) -> None:
    await context.abort(*refusal)


def _group_of(method: str) -> ApiGroup:
    """Return the group of a method by its full name."""
    _, service, name = method.rsplit("/", 2) if method.count("/") == 2 else ("", "", "")
    if service == _HEALTH:
        return ApiGroup.HEALTH
    if name in ("ServerLive", "ServerReady", "ModelReady"):
        return ApiGroup.HEALTH
    if name in ("ModelInfer", "ModelStreamInfer") or "SharedMemory" in name:
        return ApiGroup.INFERENCE
    is_setting = name in ("TraceSetting", "LogSettings")
    return ApiGroup.REPOSITORY if is_setting or name.startswith("Repository") else ApiGroup.METADATA


class _HealthService:
    """`grpc.health.v1.Health` of the whole server ("") and of the inference service.

    Args:
        is_serving: whether a service is ready; None if there is no such service.
        stopping: ends the watches.
        watches: bounds them.
        tuning: has the time between two looks at what is watched.
    """

    def __init__(
        self,
        is_serving: Callable[[str], bool | None],
        stopping: asyncio.Event,
        watches: QuietCalls,
        tuning: GatewayTuning,
    ) -> None:
        self._is_serving = is_serving
        self._stopping = stopping
        self._watches = watches
        self._tuning = tuning

    def methods(self) -> dict[str, Any]:
        """Return the service's methods."""
        return {
            "Check": grpc.unary_unary_rpc_method_handler(self._check),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }

    async def _check(self, message: bytes, context: Context) -> bytes:
        """Return whether a service is ready."""
        service = await self._parse(message, context)
        status = self._status(service)
        if status == _SERVICE_UNKNOWN:
            expected = f'service: expected {SERVICE.full_name} or ""'
            await context.abort(grpc.StatusCode.NOT_FOUND, f'{expected}, got "{service[:80]}"')
        return _health_of(status)

    async def _watch(self, message: bytes, context: Context) -> None:
        """Send whether a service is ready, now and at each change, until the door stops."""
        service = await self._parse(message, context)
        try:
            async with self._watches.opened():
                await self._send_changes(service, context)
        except EndedQuiet as error:
            await _end_quiet(context, error, self._tuning.stop_timeout_s)

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
                await _write(context, _health_of(status))
                sent = status
            if self._stopping.is_set():
                return
            try:
                async with asyncio.timeout(self._tuning.health_interval_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        serving = self._is_serving(service)
        if serving is None:
            return _SERVICE_UNKNOWN
        return _SERVING if serving else _NOT_SERVING


def _health_of(status: health_pb2.HealthCheckResponse.ServingStatus) -> bytes:
    content: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
    return content


def _reflection() -> reflection.ReflectionServicer:
    """Return what tells tools such as grpcurl of the services and their messages."""
    pool = messages.DESCRIPTOR.pool
    others = (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
    for each in others:
        pool.AddSerializedFile(each.serialized_pb)
    names = [SERVICE.full_name]
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


def _credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return credentials that begin each connection with the current certificates."""
    return grpc.dynamic_ssl_server_credentials(
        _configuration(certificates),
        partial(_configuration, certificates),
        require_client_authentication=certificates.current().client_ca is not None,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    identity = certificates.current()
    return grpc.ssl_server_certificate_configuration(
        [(identity.key, identity.certificate)], identity.client_ca
    )


def _options(settings: GatewaySettings, tuning: GatewayTuning) -> list[tuple[str, int]]:
    """Return the channel arguments (https://grpc.github.io/grpc/core/group__grpc__arg__keys.html).

    Without `grpc.so_reuseport` a port that is taken is an error.
    """
    return [
        ("grpc.so_reuseport", int(settings.reuse_port)),
        ("grpc.max_receive_message_length", settings.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", tuning.max_streams),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.max_connection_idle_ms", int(settings.idle_timeout_s * 1000)),
        ("grpc.server_handshake_timeout_ms", int(settings.header_timeout_s * 1000)),
        ("grpc.http2.min_ping_interval_without_data_ms", int(tuning.ping_interval_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


# --- messages and metadata ----------------------------------------------------------------------


def _id_of(message: bytes) -> str:
    try:
        return parse_message(messages.ModelInferRequest, message).id
    except Rejected:
        return ""
