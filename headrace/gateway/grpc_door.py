"""The door for gRPC: a server for inference, models, health and reflection, and who may call it.

`GrpcInference` answers requests, `GrpcModels` has the other methods of the inference service, and
`grpc_own_services.py` those that every server of gRPC is expected to have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Self, TypeAlias

import grpc
import structlog

from headrace.access.callers import ApiGroup, Credentials, Denied
from headrace.access.tls import Certificates
from headrace.config import GatewaySettings
from headrace.errors import Fatal
from headrace.gateway.gateway import Gateway, answer_of_error
from headrace.gateway.grpc_accepting import CallAcceptors, can_accept_several, make_server
from headrace.gateway.grpc_calls import (
    Context,
    Drain,
    Refusal,
    credentials_in,
    names_in,
    refusal_of_error,
)
from headrace.gateway.grpc_inference import DOOR, SERVICE, GrpcInference
from headrace.gateway.grpc_models import GrpcModels
from headrace.gateway.grpc_own_services import HEALTH, REFLECTION, GrpcHealth, GrpcReflection
from headrace.telemetry.logs import Event
from headrace.tuning import GatewayTuning

log = structlog.get_logger(__name__)

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
        self._server: grpc.aio.Server | None = None
        self._acceptors: list[CallAcceptors] = []
        self._drain = Drain(gateway.tuning.drain_refusal_s)

    @property
    def port(self) -> int:
        """The port that it listens on, once started."""
        return self._port

    @property
    def untaken_bytes(self) -> int:
        """Size of what is kept for calls whose callers have not taken their ends."""
        return sum(each.untaken_bytes for each in self._acceptors)

    async def __aenter__(self) -> Self:
        host = self._gateway.settings.grpc_host
        server = self._make_server()
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
        self._drain.begun.set()
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
        self._drain.begun.set()
        await self._gateway.under_way.wait_for_silence(self._tuning.drain_silence_s)
        if self._server is not None:
            # `stop` sends GOAWAY before it waits for anything, and so before this runs.
            asyncio.get_running_loop().call_soon(self._drain.goaway_sent.set)
            await self._server.stop(self._tuning.stop_timeout_s)

    def _make_server(self) -> grpc.aio.Server:
        """Return a server of all methods, which listens nowhere yet."""
        settings, tuning = self._gateway.settings, self._tuning
        max_calls = settings.max_in_flight + tuning.spare_calls
        are_alike = self._gateway.callers.are_all_alike
        interceptors = [] if are_alike else [_Admission(self._gateway, tuning)]
        options = _options(settings, tuning)
        services = self._services()
        if not (tuning.accepted_at_once and can_accept_several()):
            max_quiet = 2 * tuning.max_quiet_streams + tuning.max_watches
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
            return server
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
        return server

    def _services(self) -> dict[str, dict[str, _Method]]:
        """Return the methods of each service, which take bytes and return bytes."""
        gateway, tuning, stopping = self._gateway, self._tuning, self._drain.begun
        inference = GrpcInference(gateway, self._drain, lambda: self._port)
        health = GrpcHealth(SERVICE.full_name, lambda: gateway.health.ready, stopping, tuning)
        idle_timeout_s = gateway.settings.idle_timeout_s
        reflection = GrpcReflection(SERVICE, stopping, idle_timeout_s, tuning)
        return {
            SERVICE.full_name: inference.methods() | GrpcModels(gateway).methods(),
            HEALTH: health.methods(),
            REFLECTION: reflection.methods(),
        }

    def _fault(self) -> str:
        """Return why calls are no longer accepted; empty if they are, or in a stop."""
        if self._drain.begun.is_set():
            return ""
        return next(filter(None, (each.fault() for each in self._acceptors)), "")


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
        given = credentials_in(handler_call_details.invocation_metadata)
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


async def _refuse_caller(refusal: Refusal, _requests: Any, context: Context) -> None:
    await context.abort(*refusal)


def _group_of(method: str) -> ApiGroup:
    """Return the group of a method by its full name."""
    _, service, name = method.rsplit("/", 2) if method.count("/") == 2 else ("", "", "")
    if service == HEALTH:
        return ApiGroup.HEALTH
    if name in ("ServerLive", "ServerReady", "ModelReady"):
        return ApiGroup.HEALTH
    if name in ("ModelInfer", "ModelStreamInfer") or "SharedMemory" in name:
        return ApiGroup.INFERENCE
    is_setting = name in ("TraceSetting", "LogSettings")
    return ApiGroup.REPOSITORY if is_setting or name.startswith("Repository") else ApiGroup.METADATA


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
