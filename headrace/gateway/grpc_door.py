"""The door for gRPC: `inference.GRPCInferenceService` of the Open Inference Protocol and Triton.

`GrpcDoor._take` is a request's whole way through the door, alone (`ModelInfer`) or in a stream
(`ModelStreamInfer`). The methods beside it answer from the models and the health of this process.
Sources: https://github.com/kserve/open-inference-protocol (gRPC), Triton's extensions of it
(https://github.com/triton-inference-server/server/tree/main/docs/protocol), and gRPC's own
protocols for health (https://github.com/grpc/grpc/blob/master/doc/health-checking.md) and
reflection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from inspect import isasyncgen
from typing import Any, NamedTuple, NoReturn, Self, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc
import structlog
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from headrace import __version__
from headrace.access.callers import ApiGroup, Caller, Credentials, Denied
from headrace.access.tls import Certificates
from headrace.config import GatewaySettings
from headrace.errors import Code, Fatal, Rejected
from headrace.gateway import open_inference_pb2 as messages
from headrace.gateway.call_groups import CallGroups
from headrace.gateway.gateway import (
    CONFLICT,
    PERMISSION_DENIED,
    UNAUTHENTICATED,
    UNAVAILABLE,
    UNSUPPORTED,
    ErrorAnswer,
    Gateway,
    Unavailable,
    answer_of_error,
    read_priority,
)
from headrace.gateway.grpc_codec import decode_call, encode_answer, is_decoded_by_element
from headrace.gateway.shared_memory import NO_CUDA, OFF
from headrace.models.metadata import describe_config, describe_model
from headrace.protocol.headers import HeaderName
from headrace.telemetry.logs import Event
from headrace.telemetry.span_attributes import Attributes
from headrace.tuning import GatewayTuning

log = structlog.get_logger(__name__)

DOOR = "grpc"
SERVICE = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"]
DETAILS = "grpc-status-details-bin"
PUSHBACK = "grpc-retry-pushback-ms"
FINAL = "triton_final_response"
WANTS_FINAL = "triton_enable_empty_final_response"

_STATUS = {
    Code.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Code.INVALID_TENSOR: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    Code.MODEL_NOT_READY: grpc.StatusCode.UNAVAILABLE,
    Code.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Code.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.CANCELLED: grpc.StatusCode.CANCELLED,
    Code.MODEL_FAILED: grpc.StatusCode.INTERNAL,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
    UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    CONFLICT: grpc.StatusCode.ABORTED,
    UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
}
_UNSUPPORTED = {
    "SystemSharedMemoryStatus": OFF,
    "SystemSharedMemoryRegister": OFF,
    "SystemSharedMemoryUnregister": OFF,
    "CudaSharedMemoryStatus": NO_CUDA,
    "CudaSharedMemoryRegister": NO_CUDA,
    "CudaSharedMemoryUnregister": NO_CUDA,
    "TraceSetting": "traces are set in [telemetry] of the settings",
    "LogSettings": "logs are set in [telemetry] of the settings",
}
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

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

_Method: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
M = TypeVar("M", bound=Message)


class Refusal(NamedTuple):
    """Status with which a call ends that gets no answer."""

    status: grpc.StatusCode
    message: str
    metadata: tuple[tuple[str, str | bytes], ...]


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
        self._server: grpc.aio.Server | None = None
        self._stopping = asyncio.Event()
        self._closing = asyncio.Event()  # GOAWAY was sent

    @property
    def port(self) -> int:
        """The port that it listens on, once started."""
        return self._port

    async def __aenter__(self) -> Self:
        settings = self._gateway.settings
        host = settings.grpc_host
        server = grpc.aio.server(
            interceptors=(
                []
                if self._gateway.callers.are_all_alike
                else [_Admission(self._gateway, self._tuning)]
            ),
            options=_options(settings, self._tuning),
            maximum_concurrent_rpcs=settings.max_in_flight + self._tuning.spare_calls,
        )
        health = _HealthService(self._is_serving, self._stopping, self._tuning.health_interval_s)
        server.add_generic_rpc_handlers((self._methods(), health.methods()))
        _add_reflection(server)
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
        log.info(Event.GATEWAY_LISTENING, host=host, grpc_port=self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        if self._server is not None:
            await self._server.stop(self._tuning.stop_timeout_s)
            self._server = None

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

    def _is_serving(self, service: str) -> bool | None:
        """Return whether a service is ready; None if there is no such service."""
        return self._gateway.health.ready if service in ("", SERVICE.full_name) else None

    def _methods(self) -> grpc.GenericRpcHandler:
        """Return the service's methods, which take bytes and return bytes.

        A message that cannot be parsed is the caller's fault; gRPC would call it an internal error.
        """
        shown: dict[str, Callable[[Any], Message]] = {
            "ServerLive": self._show_live,
            "ServerReady": self._show_ready,
            "ServerMetadata": self._show_server,
            "ModelReady": self._show_model_ready,
            "ModelMetadata": self._show_model,
            "ModelConfig": self._show_config,
            "ModelStatistics": self._show_statistics,
        }
        if self._gateway.has_shared_memory:
            shown["SystemSharedMemoryStatus"] = self._show_regions
            shown["SystemSharedMemoryRegister"] = self._register
            shown["SystemSharedMemoryUnregister"] = self._unregister
        methods: dict[str, Any] = {
            "ModelInfer": grpc.unary_unary_rpc_method_handler(self._infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._infer_stream),
            "RepositoryIndex": grpc.unary_unary_rpc_method_handler(self._show_index),
            "RepositoryModelLoad": grpc.unary_unary_rpc_method_handler(self._load),
            "RepositoryModelUnload": grpc.unary_unary_rpc_method_handler(self._unload),
        }
        for name, show in shown.items():
            kind = getattr(messages, f"{name}Request")
            answer = partial(self._show, kind, show)
            methods[name] = grpc.unary_unary_rpc_method_handler(answer)
        for name, reason in _UNSUPPORTED.items():
            if name in methods:
                continue
            refuse = partial(_refuse_method, f"{name} is not supported: {reason}")
            methods[name] = grpc.unary_unary_rpc_method_handler(refuse)
        return grpc.method_handlers_generic_handler(SERVICE.full_name, methods)

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
        when its caller ends it, or when the door stops listening.
        """
        permits = asyncio.Semaphore(self._tuning.requests_per_stream)
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()

        async def read() -> None:
            await permits.acquire()
            async for message in requests:
                answer = self._take_from_stream(message, context)
                answers.put_nowait(tasks.create_task(answer, name="grpc-stream-request"))
                await permits.acquire()

        async def read_until_stop() -> None:
            stopping = asyncio.create_task(self._stopping.wait(), name="grpc-stream-stop")
            reading = asyncio.create_task(read(), name="grpc-stream-read")
            try:
                await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
                reading.cancel()
            answers.put_nowait(None)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read_until_stop(), name="grpc-stream")
            while (answer := await answers.get()) is not None:
                await context.write(await answer)
                permits.release()
        if self._stopping.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the gateway stops; open a new stream")

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
        given = (_text(found.get(name)) for name in (HeaderName.TRACEPARENT, HeaderName.TRACESTATE))
        span = gateway.spans.begin(*given)
        try:
            if self._stopping.is_set():
                await self._refuse_in_drain()
            caller = self._caller_of(found, context)
            with gateway.under_way.counting(caller) as counted:
                counted.add(len(message))
                request = _parse(messages.ModelInferRequest, message)
                regions = gateway.access(counted)
                by_element = is_decoded_by_element(request)
                call = await conversions.run(
                    partial(decode_call, request, regions),
                    takes_long=conversions.parsing_takes_long(message, by_element=by_element),
                )
                call.parameters.pop(WANTS_FINAL, None)  # each answer is the final one
                await self._groups.join()  # before the time left is read
                given_s = [call.timeout_us / 1e6] if call.timeout_us else []
                if (left_s := context.time_remaining()) is not None:
                    given_s.append(max(left_s, self._tuning.least_timeout_s))
                priority = _text(found.get(HeaderName.PRIORITY))
                urgency = gateway.urgency(given_s, read_priority(HeaderName.PRIORITY, priority))
                model, version = request.model_name, request.model_version or None
                headers = gateway.record_headers(span, caller, found.get)
                answer = await gateway.infer(model, version, call, urgency, headers)
                span.answered(answer)
                encoded = await conversions.run(
                    partial(encode_answer, answer, call, regions),
                    takes_long=conversions.encoding_takes_long(answer, call),
                )
            status = grpc.StatusCode.OK
        except Exception as error:  # noqa: BLE001 - the caller gets it as an answer, and it is logged
            described = answer_of_error(error)
            refusal = _refusal(described, self._tuning)
            status = refusal.status
            at_fault = status in _SERVERS_FAULTS
            span.failed(described.code, described.message, is_callers_fault=not at_fault)
            return refusal
        else:
            return encoded
        finally:
            gateway.metrics.ended_at_door(DOOR, status.name, time.monotonic() - began_s)
            span.end(partial(self._describe_call, method, status))

    def _caller_of(self, metadata: Mapping[str, str | bytes], context: Context) -> Caller | None:
        """Return who sends a request; None if all callers are alike. Raises `Denied`."""
        callers = self._gateway.callers
        if callers.are_all_alike:
            return None
        return callers.admit(ApiGroup.INFERENCE, self._credentials_of(metadata, context))

    def _credentials_of(self, metadata: Mapping[str, str | bytes], context: Context) -> Credentials:
        given = _given(metadata)._replace(address=_address_of(context.peer()))
        if self._gateway.callers.use_certificates:
            given = given._replace(certificate=_names_in(context.auth_context()))
        return given

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

    # --- health and metadata ------------------------------------------------------------------

    async def _show(
        self, kind: type[Message], show: Callable[[Any], Message], message: bytes, context: Context
    ) -> bytes:
        """Answer a method that only shows something."""
        try:
            answer = show(_parse(kind, message))
        except Rejected as error:
            await context.abort(*_refusal(answer_of_error(error), self._tuning))
        return answer.SerializeToString()

    def _show_live(self, request: messages.ServerLiveRequest) -> Message:
        return messages.ServerLiveResponse(live=self._gateway.health.live)

    def _show_ready(self, request: messages.ServerReadyRequest) -> Message:
        return messages.ServerReadyResponse(ready=self._gateway.health.ready)

    def _show_server(self, request: messages.ServerMetadataRequest) -> Message:
        return messages.ServerMetadataResponse(
            name="headrace", version=__version__, extensions=self._gateway.extensions
        )

    def _show_model_ready(self, request: messages.ModelReadyRequest) -> Message:
        """A model that is not known is not ready, and no error: so does Triton."""
        try:
            self._gateway.models.lookup(request.name, request.version or None)
        except Rejected:
            return messages.ModelReadyResponse(ready=False)
        return messages.ModelReadyResponse(ready=True)

    def _show_model(self, request: messages.ModelMetadataRequest) -> Message:
        models = self._gateway.models
        version = models.lookup(request.name, request.version or None)
        described: dict[str, Any] = {**describe_model(version, models.servable())}
        del described["batching"]
        return messages.ModelMetadataResponse(**described)

    def _show_config(self, request: messages.ModelConfigRequest) -> Message:
        version = self._gateway.models.lookup(request.name, request.version or None)
        config = messages.ModelConfig(**describe_config(version))
        return messages.ModelConfigResponse(config=config)

    def _show_statistics(self, request: messages.ModelStatisticsRequest) -> Message:
        found = self._gateway.statistics.describe(request.name, request.version)
        return messages.ModelStatisticsResponse(
            model_stats=[messages.ModelStatistics(**each) for each in found]
        )

    # --- the repository of models -------------------------------------------------------------

    async def _show_index(self, message: bytes, context: Context) -> bytes:
        index = messages.RepositoryIndexResponse()
        try:
            request = _parse(messages.RepositoryIndexRequest, message)
            for entry in await self._gateway.repository.index(ready_only=request.ready):
                index.models.add(**entry)
        except Rejected as error:
            await context.abort(*_refusal(answer_of_error(error), self._tuning))
        return index.SerializeToString()

    async def _load(self, message: bytes, context: Context) -> bytes:
        """Answer `RepositoryModelLoad`."""
        await self._change(messages.RepositoryModelLoadRequest, message, context)
        return messages.RepositoryModelLoadResponse().SerializeToString()

    async def _unload(self, message: bytes, context: Context) -> bytes:
        """Answer `RepositoryModelUnload`."""
        await self._change(messages.RepositoryModelUnloadRequest, message, context)
        return messages.RepositoryModelUnloadResponse().SerializeToString()

    async def _change(
        self,
        kind: type[messages.RepositoryModelLoadRequest | messages.RepositoryModelUnloadRequest],
        message: bytes,
        context: Context,
    ) -> None:
        """Change the models, and return when all processes have followed."""
        gateway = self._gateway
        repository = gateway.repository
        try:
            who = self._changer(context) if repository.can_change else ""
            with gateway.under_way.counting() as counted:
                counted.add(len(message))
                request = _parse(kind, message)
                if request.repository_name:
                    expected = "none, since models.repository has all"
                    got = repr(request.repository_name[:80])
                    raise Rejected.mismatch(
                        Code.INVALID_REQUEST, "repository_name", expected=expected, got=got
                    )
                loads = kind is messages.RepositoryModelLoadRequest
                change = repository.load if loads else repository.unload
                given = {name: _choice_of(each) for name, each in request.parameters.items()}
                await change(request.model_name, given, who, context.time_remaining())
        except Exception as error:  # noqa: BLE001 - the caller gets it as an answer, and it is logged
            await context.abort(*_refusal(answer_of_error(error), self._tuning))

    def _changer(self, context: Context) -> str:
        """Return who changes the models. Raises `Denied`."""
        callers = self._gateway.callers
        given = self._credentials_of(dict(context.invocation_metadata() or ()), context)
        return callers.admit_change(given).tenant or f"address {given.address}"

    # --- shared memory ------------------------------------------------------------------------

    def _show_regions(self, request: messages.SystemSharedMemoryStatusRequest) -> Message:
        status = messages.SystemSharedMemoryStatusResponse()
        for each in self._gateway.regions.describe(request.name):
            kind = messages.SystemSharedMemoryStatusResponse.RegionStatus
            status.regions[each["name"]].CopyFrom(kind(**each))
        return status

    def _register(self, request: messages.SystemSharedMemoryRegisterRequest) -> Message:
        self._gateway.regions.register(request.name, request.key, request.offset, request.byte_size)
        return messages.SystemSharedMemoryRegisterResponse()

    def _unregister(self, request: messages.SystemSharedMemoryUnregisterRequest) -> Message:
        self._gateway.regions.unregister(request.name)
        return messages.SystemSharedMemoryUnregisterResponse()


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
        given = _given(dict(handler_call_details.invocation_metadata or ()))
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
            refusal = _refusal(answer_of_error(error), self._tuning)
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
            names = _names_in(context.auth_context())
            refusal = self._refusal_of(group, given._replace(certificate=names))
            if refusal is not None:
                await context.abort(*refusal)

        async def answer(message: Any, context: Context) -> Any:
            await admit(context)
            return await method.unary_unary(message, context)

        async def answer_stream(sent: Any, context: Context) -> None:
            await admit(context)
            begin = method.stream_stream if method.request_streaming else method.unary_stream
            answers = begin(sent, context)
            if not isasyncgen(answers):
                await answers
                return
            async for each in answers:
                await context.write(each)

        codecs = (method.request_deserializer, method.response_serializer)
        if not method.response_streaming:
            return grpc.unary_unary_rpc_method_handler(answer, *codecs)
        if method.request_streaming:
            return grpc.stream_stream_rpc_method_handler(answer_stream, *codecs)
        return grpc.unary_stream_rpc_method_handler(answer_stream, *codecs)


async def _refuse_caller(refusal: Refusal, _requests: Any, context: Context) -> None:
    await context.abort(*refusal)


def _group_of(method: str) -> ApiGroup:
    """Return the group of a method by its full name."""
    _, service, name = method.rsplit("/", 2) if method.count("/") == 2 else ("", "", "")
    if service == health_pb2.DESCRIPTOR.services_by_name["Health"].full_name:
        return ApiGroup.HEALTH
    if name in ("ServerLive", "ServerReady", "ModelReady"):
        return ApiGroup.HEALTH
    if name in ("ModelInfer", "ModelStreamInfer") or "SharedMemory" in name:
        return ApiGroup.INFERENCE
    is_setting = name in ("TraceSetting", "LogSettings")
    return ApiGroup.REPOSITORY if is_setting or name.startswith("Repository") else ApiGroup.METADATA


def _given(metadata: Mapping[str, str | bytes]) -> Credentials:
    """Return what a caller sends to be known."""
    return Credentials(
        _text(metadata.get("authorization")) or "", _text(metadata.get("x-api-key")) or ""
    )


def _names_in(auth_context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """Return the names in the certificate of a caller, as gRPC describes it."""
    kinds = (("URI:", "peer_uri"), ("DNS:", "peer_dns"), ("CN=", "x509_common_name"))
    return tuple(
        f"{prefix}{name.decode(errors='replace')}"
        for prefix, property_ in kinds
        for name in auth_context.get(property_, ())
    )


def _address_of(peer: str) -> str:
    """Return the address in a name such as `ipv4:192.0.2.1:50432` or `ipv6:%5B::1%5D:50432`
    (https://github.com/grpc/grpc/blob/master/doc/naming.md).
    """
    _, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]")


class _HealthService:
    """`grpc.health.v1.Health` of the whole server ("") and of the inference service.

    Args:
        is_serving: whether a service is ready; None if there is no such service.
        stopping: ends the watches.
        interval_s: time between two looks at what is watched.
    """

    def __init__(
        self,
        is_serving: Callable[[str], bool | None],
        stopping: asyncio.Event,
        interval_s: float,
    ) -> None:
        self._is_serving = is_serving
        self._stopping = stopping
        self._interval_s = interval_s

    def methods(self) -> grpc.GenericRpcHandler:
        """Return the service's methods."""
        kinds = {
            "request_deserializer": health_pb2.HealthCheckRequest.FromString,
            "response_serializer": health_pb2.HealthCheckResponse.SerializeToString,
        }
        return grpc.method_handlers_generic_handler(
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check, **kinds),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **kinds),
            },
        )

    async def _check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Return whether a service is ready."""
        status = self._status(request.service)
        if status == _SERVICE_UNKNOWN:
            message = f'service: expected {SERVICE.full_name} or "", got "{request.service[:80]}"'
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        return health_pb2.HealthCheckResponse(status=status)

    async def _watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Send whether a service is ready, now and at each change, until the door stops."""
        sent: int | None = None
        while True:
            status = self._status(request.service)
            if status != sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                sent = status
            if self._stopping.is_set():
                return
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        serving = self._is_serving(service)
        if serving is None:
            return _SERVICE_UNKNOWN
        return _SERVING if serving else _NOT_SERVING


def _add_reflection(server: grpc.aio.Server) -> None:
    """Let tools such as grpcurl ask for the services and their messages."""
    pool = messages.DESCRIPTOR.pool
    others = (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
    for each in others:
        pool.AddSerializedFile(each.serialized_pb)
    names = [SERVICE.full_name]
    names += [service.full_name for each in others for service in each.services_by_name.values()]
    reflection.enable_server_reflection(names, server, pool=_SymbolPool(pool))


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


def _parse(kind: type[M], message: bytes) -> M:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        name = kind.DESCRIPTOR.full_name
        raise Rejected.mismatch(
            Code.INVALID_REQUEST, "message", expected=name, got="other bytes"
        ) from error


def _choice_of(parameter: messages.ModelRepositoryParameter) -> object:
    """Return the value of a parameter; None if it has none."""
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


def _id_of(message: bytes) -> str:
    try:
        return _parse(messages.ModelInferRequest, message).id
    except Rejected:
        return ""


def _text(value: str | bytes | None) -> str | None:
    """Return the value of a header; only those whose names end with `-bin` are bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


# --- errors -------------------------------------------------------------------------------------


async def _refuse_method(message: str, request: bytes, context: Context) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)


def _refusal(answer: ErrorAnswer, tuning: GatewayTuning) -> Refusal:
    """Return how an error ends a call: its status, and whether and when to try again.

    `grpc-retry-pushback-ms` steers the retries of gRPC's clients (gRFC A6): a time, or -1 against
    them. The details are `google.rpc.Status` with `ErrorInfo` and `RetryInfo`.
    """
    status = _STATUS.get(answer.code)
    if status is None:
        known = grpc.StatusCode
        status = known.UNAVAILABLE if answer.retriable else known.INTERNAL
    message = answer.message[: tuning.error_characters]
    wait_ms = -1
    if answer.retriable:
        wait_ms = answer.retry_after_ms or tuning.retry_after_s * 1000
    details = _details(answer, status, message, wait_ms)
    return Refusal(status, message, ((PUSHBACK, str(wait_ms)), (DETAILS, details)))


def _details(answer: ErrorAnswer, status: grpc.StatusCode, message: str, wait_ms: int) -> bytes:
    details = Status(code=status.value[0], message=message)
    retriable = "true" if answer.retriable else "false"
    reason = ErrorInfo(reason=answer.code, domain="headrace", metadata={"retriable": retriable})
    details.details.add().Pack(reason)
    if wait_ms >= 0:
        delay = Duration(seconds=wait_ms // 1000, nanos=wait_ms % 1000 * 1_000_000)
        details.details.add().Pack(RetryInfo(retry_delay=delay))
    content: bytes = details.SerializeToString()
    return content
