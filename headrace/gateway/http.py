"""The door for HTTP: the Open Inference Protocol, REST, with Triton's extensions for clients.

`InferencePaths._take` is a request's whole way through the door, and `_take_predict` that of one in
the older protocol. `ManagementPaths` answers from the models and the health of this process.
Protocol:
https://github.com/kserve/open-inference-protocol (REST); extensions: binary tensor data and model
configuration, https://github.com/triton-inference-server/server/tree/main/docs/protocol.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Self, TypeVar

import msgspec
import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from headrace import __version__
from headrace.access.callers import ApiGroup, Caller, Denied, join_values
from headrace.access.tls import RenewedContext
from headrace.errors import Code, Rejected
from headrace.gateway.bodies import (
    AllStatistics,
    ErrorBody,
    ErrorDetailsBody,
    Live,
    ModelNames,
    ModelReady,
    ModelStatus,
    Ready,
    RegisterRequest,
    ServerMetadata,
    VersionStatus,
    VersionStatusText,
)
from headrace.gateway.codec import InferCall, decode_call, decode_raw, encode_answer, find_places
from headrace.gateway.gateway import (
    CONFLICT,
    MAX_TIMEOUT_MS,
    PERMISSION_DENIED,
    UNAUTHENTICATED,
    UNAVAILABLE,
    UNSUPPORTED,
    CountedRequest,
    ErrorAnswer,
    Gateway,
    Urgency,
    answer_of_error,
    read_number,
    read_priority,
)
from headrace.gateway.predict import decode_predict, encode_predictions
from headrace.gateway.shared_memory import NO_CUDA, OFF
from headrace.gateway.spans import ServerSpan
from headrace.models.index import ChangeOptions, IndexOptions
from headrace.models.metadata import describe_config, describe_model
from headrace.models.version import ModelVersion
from headrace.protocol.codec import faults
from headrace.protocol.codec.faults import DECODE_ERRORS
from headrace.protocol.compression import (
    CODINGS,
    choose_coding,
    compress,
    decompress,
    read_coding,
    too_large,
)
from headrace.protocol.headers import JSON, MSGPACK, OCTETS, HeaderName
from headrace.protocol.messages import Envelope
from headrace.protocol.negotiation import (
    choose_content_type,
    media_type,
    read_accept,
    require_content_type,
)
from headrace.telemetry.http_listener import HttpListener, credentials_of
from headrace.telemetry.logs import Event
from headrace.telemetry.span_attributes import Attributes

log = structlog.get_logger(__name__)

T = TypeVar("T")

DOOR = "http"
JSON_BYTES = "Inference-Header-Content-Length"
TIMEOUT_MS = "X-Timeout-Ms"
PRIORITY = "X-Priority"
CALLER_GONE = 499
TRACEPARENT, TRACESTATE = HeaderName.TRACEPARENT, HeaderName.TRACESTATE

_STATUS = {
    Code.INVALID_REQUEST: 400,
    Code.INVALID_TENSOR: 400,
    Code.UNKNOWN_MODEL: 404,
    Code.MODEL_NOT_READY: 503,
    Code.TOO_LARGE: 413,
    Code.DEADLINE_EXCEEDED: 504,
    Code.OVERLOADED: 429,
    Code.CANCELLED: CALLER_GONE,
    Code.MODEL_FAILED: 500,
    Code.INTERNAL: 500,
    UNAVAILABLE: 503,
    UNAUTHENTICATED: 401,
    PERMISSION_DENIED: 403,
    CONFLICT: 409,
    UNSUPPORTED: 501,
}
_DENIED = frozenset({401, 403})
_RETRY_AFTER = frozenset({429, 503})
ALL_BINARY = InferCall(None, {}, None, {}, 0, {}, binary_by_default=True)
_MODEL_PATHS = ("{model}", "{model}/versions/{version}")
_RECORD_TYPES = {JSON: "", OCTETS: MSGPACK}
"""Content types for the record of an answer by the protocol's, whose JSON can hold any answer."""

_JSON_TYPES = frozenset({"", JSON, OCTETS, "application/x-www-form-urlencoded"})
"""Content types of a body that begins with JSON: clients call any body octets, and `curl -d` calls
it a form. Every other type is a payload for the model's transform.
"""


class RefusedAtDoor(Rejected):
    """The request is refused with a status of its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(Code.INVALID_REQUEST, message)
        self.status = status


class UnreadableBody(RefusedAtDoor):
    """The body has a coding that the door does not know, or never came in whole."""


class HttpDoor:
    """An HTTP server in front of a gateway; entering starts it, leaving stops it.

    Args:
        gateway: an open one.
        port: to listen on; 0 picks a free one.
    """

    def __init__(self, gateway: Gateway, port: int) -> None:
        self._gateway = gateway
        self._tuning = gateway.tuning
        self._connections = gateway.connections
        address = (gateway.settings.http_host, port)
        certificates = gateway.certificates
        self._listener = HttpListener(
            "gateway.http_port",
            address,
            self._connections,
            None if certificates is None else RenewedContext.of(certificates),
            reuse_port=gateway.settings.reuse_port,
        )
        bodies = HttpBodies(gateway)
        self._inference = InferencePaths(gateway, bodies, self._listener)
        self._management = ManagementPaths(gateway, bodies)

    @property
    def port(self) -> int:
        """The port that it listens on, once started."""
        return self._listener.port

    @property
    def untaken_bytes(self) -> int:
        """Size of the answers whose callers have not taken them."""
        return self._connections.untaken_bytes

    async def __aenter__(self) -> Self:
        settings = self._gateway.settings
        runner = web.AppRunner(
            self._make_application(),
            access_log=None,
            shutdown_timeout=self._tuning.stop_timeout_s,
            handler_cancellation=True,
            lingering_time=min(self._tuning.unread_body_timeout_s, settings.body_timeout_s),
            auto_decompress=False,
        )
        await self._listener.start(runner)
        log.info(Event.GATEWAY_LISTENING, host=settings.http_host, http_port=self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listener.stop()

    async def stop_listening(self) -> None:
        """Take no further connections; each of those that are open ends after its next answer."""
        self._listener.stop_listening()

    def routes(self) -> list[web.RouteDef]:
        """Return the methods and paths that the door answers; `headrace.gateway.openapi` describes
        them.
        """
        # Those of inference are tried first: most requests are for them.
        return [*self._inference.routes(), *self._management.routes()]

    def _make_application(self) -> web.Application:
        application = web.Application(
            middlewares=[self._answer_on_connection, self._format_errors, self._admit]
        )
        application.add_routes(self.routes())
        return application

    @web.middleware
    async def _answer_on_connection(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        """Suspend the idle timer of the connection until its caller has taken the answer; end it
        after that in a drain.
        """
        with self._connections.answering(request.transport):
            response = await handler(request)
            if self._gateway.draining.is_set():
                response.force_close()
            await self._connections.send(request, response)
        return response

    @web.middleware
    async def _format_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer every error as the protocol does, `{"error": message}`."""
        try:
            return await handler(request)
        except web.HTTPException as error:
            headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
            text = f"{request.method} {request.path}: {error.reason}"
            return _json_response(ErrorBody(error=text), error.status, headers)
        except Exception as error:  # noqa: BLE001 - the caller gets it as an answer, and it is logged
            return _error_response(error, answer_of_error(error), self._tuning.retry_after_s)

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse callers without the right login before anything of the body is read."""
        callers = self._gateway.callers
        if _changes_models(request) and self._gateway.repository.can_change:
            given = credentials_of(request, with_certificate=callers.use_certificates)
            request[_CALLER] = callers.admit_change(given)
        elif not callers.are_all_alike:
            group = _group_of(request)
            try:
                given = credentials_of(request, with_certificate=callers.use_certificates)
                request[_CALLER] = callers.admit(group, given)
            except Denied as error:
                if group is ApiGroup.INFERENCE:
                    status = _STATUS[answer_of_error(error).code]
                    self._gateway.metrics.ended_at_door(DOOR, str(status), 0.0)
                raise
        return await handler(request)


class HttpBodies:
    """Reads the bodies of requests, within their limits.

    Args:
        gateway: has the limits, and the threads that decompress.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def size_of(self, request: web.Request) -> int:
        """Return the size of a body as the head of its request names it; 0 if it does not.

        Raises:
            Rejected: `TOO_LARGE`: it is over `max_body_bytes`.
        """
        size_bytes, limit = request.content_length or 0, self._gateway.settings.max_body_bytes
        if size_bytes > limit:
            raise too_large("body", limit, str(size_bytes))
        return size_bytes

    async def read(self, request: web.Request, counted: CountedRequest) -> bytes:
        """Return the body of a request, decompressed. `max_body_bytes` bounds both forms of it."""
        settings = self._gateway.settings
        limit, timeout_s = settings.max_body_bytes, settings.body_timeout_s
        self.size_of(request)
        coding = _coding_of(request)
        parts: list[bytes] = []
        sent = 0

        def take(chunk: bytes) -> None:
            nonlocal sent
            sent += len(chunk)
            if sent > limit:
                raise too_large("body", limit, "more")
            counted.add(len(chunk))
            parts.append(chunk)

        try:
            if request.content.is_eof():  # a small body comes with its head: nothing to wait for
                take(request.content.read_nowait())
            else:
                async with asyncio.timeout(timeout_s):
                    async for chunk in request.content.iter_any():
                        take(chunk)
        except TimeoutError:
            expected = f"all of it within {timeout_s:g} s"
            raise UnreadableBody(408, f"body: expected {expected}, got {sent} bytes") from None
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise UnreadableBody(400, f"body: expected one that can be read: {error}") from error
        counted.came_s = time.monotonic()
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        if not coding:
            return body
        conversions = self._gateway.conversions
        with _damage_as_unreadable():
            plain = await conversions.run(
                partial(decompress, body, coding, limit, "body"),
                takes_long=conversions.inflating_takes_long(body, coding),
            )
        counted.add(max(0, len(plain) - len(body)))
        return plain

    async def read_json(
        self, request: web.Request, counted: CountedRequest, kind: type[T], default: bytes = b""
    ) -> T:
        """Return the value of a JSON body, or of the default if the body is empty.

        Raises:
            Rejected: it is no such value.
        """
        body = await self.read(request, counted)
        try:
            return msgspec.json.decode(body or default, type=kind)
        except DECODE_ERRORS as error:
            raise faults.refusal(error, body, faults.JSON) from error


class InferencePaths:
    """Paths that send a request to the log, and answer what comes back.

    Args:
        gateway: an open one.
        bodies: reads the bodies.
        listener: has the port, for spans.
    """

    def __init__(self, gateway: Gateway, bodies: HttpBodies, listener: HttpListener) -> None:
        self._gateway = gateway
        self._tuning = gateway.tuning
        self._bodies = bodies
        self._listener = listener

    def routes(self) -> list[web.RouteDef]:
        """Return the methods and paths, those of one version and those of the default."""
        base_path = self._gateway.settings.base_path
        return [
            route
            for model in _MODEL_PATHS
            for route in (
                web.post(f"{base_path}/v2/models/{model}/infer", self._infer),
                web.post(f"{base_path}/v1/models/{model}:predict", self._predict),
            )
        ]

    async def _infer(self, request: web.Request) -> web.Response:
        return await self._answer(request, self._take)

    async def _predict(self, request: web.Request) -> web.Response:
        return await self._answer(request, self._take_predict)

    async def _answer(
        self,
        request: web.Request,
        take: Callable[[web.Request, ServerSpan], Awaitable[web.Response]],
    ) -> web.Response:
        """Take a request, and count it with the status that its caller gets."""
        began_s = time.monotonic()
        status = CALLER_GONE
        given = (_header(request, name) for name in (TRACEPARENT, TRACESTATE))
        span = self._gateway.spans.begin(*given)
        try:
            response = await take(request, span)
            status = response.status
        except Exception as error:  # noqa: BLE001 - the caller gets it as an answer, and it is logged
            answer = answer_of_error(error)
            response = _error_response(error, answer, self._tuning.retry_after_s)
            status = response.status
            span.failed(answer.code, answer.message, is_callers_fault=status < 500)
        finally:
            self._gateway.metrics.ended_at_door(DOOR, str(status), time.monotonic() - began_s)
            span.end(partial(self._describe_call, request, status))
        return response

    def _describe_call(self, request: web.Request, status: int) -> tuple[str, Attributes]:
        """Return the name and the attributes of the span of a call."""
        resource = request.match_info.route.resource
        route = "" if resource is None else resource.canonical
        attributes: Attributes = {
            "http.request.method": request.method,
            "http.response.status_code": status,
            "http.route": route,
            "network.protocol.version": f"{request.version.major}.{request.version.minor}",
            "server.address": self._gateway.settings.http_host,
            "server.port": self._listener.port,
            "url.path": request.path,
            "url.scheme": request.scheme,
        }
        if request.remote:
            attributes["client.address"] = request.remote
        if agent := request.headers.get("User-Agent"):
            attributes["user_agent.original"] = agent
        return f"{request.method} {route}", attributes

    async def _take(self, request: web.Request, span: ServerSpan) -> web.Response:
        """Read a request, send it to the log, wait for its answer, and encode that.

        aiohttp cancels this when the caller hangs up; that cancels the request.
        """
        gateway, conversions = self._gateway, self._gateway.conversions
        model, version = request.match_info["model"], request.match_info.get("version")
        size_bytes = self._bodies.size_of(request)
        with gateway.under_way.counting(request.get(_CALLER), size_bytes) as counted:
            body = await self._bodies.read(request, counted)
            content_type = _content_type(request)
            regions = gateway.access(counted)
            json_bytes = read_number(JSON_BYTES, _header(request, JSON_BYTES), 0, len(body))
            accept = _accepted(request)
            call: InferCall | None = None
            is_whole = False
            if json_bytes is None and media_type(content_type) not in _JSON_TYPES:
                wanted, is_whole = self._choose_answer(request, accept, content_type)
                call = ALL_BINARY if wanted == OCTETS else None
                answer = await gateway.infer_payload(
                    model,
                    version,
                    body,
                    content_type,
                    wanted if is_whole else _RECORD_TYPES[wanted],
                    self._urgency(request, counted),
                    self._record_headers(request, span),
                )
            else:
                if json_bytes == 0:
                    call = decode_raw(body, _find_version(self._gateway, request).signature)
                else:
                    call = await conversions.decode(
                        partial(decode_call, body, json_bytes),
                        partial(find_places, body, json_bytes),
                        regions,
                        takes_long=conversions.decoding_takes_long(body, json_bytes),
                    )
                is_bare = json_bytes == 0  # and has no flags of its own
                offers = (OCTETS, JSON) if is_bare else (JSON, OCTETS)
                wanted = _require_accepted(accept, offers)
                if is_bare or wanted == OCTETS:
                    call = call._replace(binary_by_default=wanted == OCTETS)
                urgency = self._urgency(request, counted, call.timeout_us)
                answer = await gateway.infer(
                    model, version, call, urgency, self._record_headers(request, span)
                )
            span.answered(answer)
            if is_whole and (payload := answer.payload):
                headers = _typed(payload.content_type)
                return await self._compressed(request, payload.content, headers)
            body, json_bytes = await conversions.encode(
                partial(encode_answer, answer, call),
                regions,
                takes_long=conversions.encoding_takes_long(answer, call),
            )
            headers = _typed(JSON)
            if json_bytes is not None:
                headers = {**_typed(OCTETS), JSON_BYTES: str(json_bytes)}
            return await self._compressed(request, body, headers)

    async def _take_predict(self, request: web.Request, span: ServerSpan) -> web.Response:
        """Do the same for a request of TensorFlow Serving's protocol."""
        gateway, conversions = self._gateway, self._gateway.conversions
        model, version = request.match_info["model"], request.match_info.get("version")
        size_bytes = self._bodies.size_of(request)
        with gateway.under_way.counting(request.get(_CALLER), size_bytes) as counted:
            body = await self._bodies.read(request, counted)
            _require_accepted(_accepted(request), (JSON,))
            predict = await conversions.run(
                partial(decode_predict, body, _find_version(self._gateway, request).signature),
                takes_long=conversions.decoding_takes_long(body),
            )
            urgency = self._urgency(request, counted)
            answer = await gateway.infer(
                model, version, predict.call, urgency, self._record_headers(request, span)
            )
            span.answered(answer)
            answered = await conversions.run(
                partial(encode_predictions, answer, predict),
                takes_long=conversions.encoding_takes_long(answer, None),
            )
            return await self._compressed(request, answered, _typed(JSON))

    def _choose_answer(
        self, request: web.Request, accept: str, content_type: str
    ) -> tuple[str, bool]:
        """Return the content type in which a payload is to be answered over HTTP, and whether what
        the model answers is the body. Otherwise the body is the protocol's, in JSON by default or
        in its binary form (`OCTETS`).

        Raises:
            RefusedAtDoor: the caller accepts none of these.
            Rejected: it does not accept JSON, and the model is not known here.
        """
        if not accept:
            return JSON, False
        try:
            version = _find_version(self._gateway, request)
        except Rejected:
            if not choose_content_type(accept, (JSON,)):
                raise
            return JSON, False  # the stages decide whether there is such a model
        envelope = Envelope(content_type=media_type(content_type), model=version.name)
        whole = version.whole_types(envelope)
        wanted = _require_accepted(accept, (JSON, *whole, OCTETS))
        return wanted, wanted in whole

    def _urgency(
        self, request: web.Request, counted: CountedRequest, timeout_us: int = 0
    ) -> Urgency:
        timeout_ms = read_number(TIMEOUT_MS, _header(request, TIMEOUT_MS), 1, MAX_TIMEOUT_MS)
        given_s = (each for each in ((timeout_ms or 0) / 1e3, timeout_us / 1e6) if each)
        passed_s = time.monotonic() - counted.came_s
        priority = read_priority(PRIORITY, _header(request, PRIORITY))
        return self._gateway.urgency(given_s, passed_s, priority)

    async def _compressed(
        self, request: web.Request, body: bytes, headers: dict[str, str]
    ) -> web.Response:
        """Return the response, compressed if it is large and the caller accepts that."""
        if len(body) < self._tuning.compressed_from_bytes:
            return web.Response(body=body, headers=headers)
        coding = choose_coding(_header(request, "Accept-Encoding") or "")
        if not coding:
            return web.Response(body=body, headers=headers)
        conversions = self._gateway.conversions
        compressed = await conversions.run(
            partial(compress, body, coding), takes_long=conversions.deflating_takes_long(body)
        )
        return web.Response(body=compressed, headers={**headers, "Content-Encoding": coding})

    def _record_headers(self, request: web.Request, span: ServerSpan) -> list[tuple[str, bytes]]:
        return self._gateway.record_headers(span, request.get(_CALLER), partial(_header, request))


class ManagementPaths:
    """Paths about the server and its models: health, metadata, repository and shared memory.

    Args:
        gateway: an open one.
        bodies: reads the bodies.
    """

    def __init__(self, gateway: Gateway, bodies: HttpBodies) -> None:
        self._gateway = gateway
        self._bodies = bodies

    def routes(self) -> list[web.RouteDef]:
        """Return the methods and paths; those of repository and shared memory are Triton's."""
        base_path = self._gateway.settings.base_path
        root, older = f"{base_path}/v2", f"{base_path}/v1/models"
        routes = [
            web.get(root, self._show_server),
            web.get(f"{root}/health/live", self._show_live),
            web.get(f"{root}/health/ready", self._show_ready),
            web.get(f"{root}/models", self._show_models),
            # before the model of that name
            web.get(f"{root}/models/stats", self._show_statistics),
            web.post(f"{root}/repository/index", self._show_index),
            web.get(older, self._show_models),
        ]
        allowed = self._gateway.has_shared_memory
        for kind, has in (("system", allowed), ("cuda", False)):
            path = f"{root}/{kind}sharedmemory"
            refuse = partial(self._refuse_shared_memory, OFF if kind == "system" else NO_CUDA)
            for place in (path, f"{path}/region/{{region}}"):
                routes.append(web.get(f"{place}/status", self._show_regions if has else refuse))
                routes.append(web.post(f"{place}/unregister", self._unregister if has else refuse))
            register = f"{path}/region/{{region}}/register"
            routes.append(web.post(register, self._register if has else refuse))
        for action, change in (("load", self._load), ("unload", self._unload)):
            path = f"{root}/repository/models/{{model}}/{action}"
            routes.append(web.post(path, change))
        for model in _MODEL_PATHS:
            path = f"{root}/models/{model}"
            routes += [
                web.get(path, self._show_model),
                web.get(f"{path}/ready", self._show_model_ready),
                web.get(f"{path}/config", self._show_config),
                web.get(f"{path}/stats", self._show_statistics),
                web.get(f"{older}/{model}", self._show_model_status),
            ]
        return routes

    async def _show_live(self, request: web.Request) -> web.Response:
        live = self._gateway.health.live
        return _json_response(Live(live=live), 200 if live else 503)

    async def _show_ready(self, request: web.Request) -> web.Response:
        ready = self._gateway.health.ready
        return _json_response(Ready(ready=ready), 200 if ready else 503)

    async def _show_server(self, request: web.Request) -> web.Response:
        extensions = ["binary_tensor_data", *self._gateway.extensions]
        return _json_response(
            ServerMetadata(name="headrace", version=__version__, extensions=extensions)
        )

    async def _show_models(self, request: web.Request) -> web.Response:
        names = {version.name for version in self._gateway.models.offered()}
        return _json_response(ModelNames(models=sorted(names)))

    async def _show_model(self, request: web.Request) -> web.Response:
        ready = self._gateway.models.offered()
        return _json_response(describe_model(_find_version(self._gateway, request), ready))

    async def _show_model_ready(self, request: web.Request) -> web.Response:
        return _json_response(
            ModelReady(name=_find_version(self._gateway, request).name, ready=True)
        )

    async def _show_model_status(self, request: web.Request) -> web.Response:
        """Describe a model as KServe (`name`, `ready`) and TensorFlow Serving do."""
        version = _find_version(self._gateway, request)
        fine = VersionStatusText(error_code="OK", error_message="")
        status = VersionStatus(version=version.version, state="AVAILABLE", status=fine)
        return _json_response(
            ModelStatus(name=version.name, ready=True, model_version_status=[status])
        )

    async def _show_config(self, request: web.Request) -> web.Response:
        return _json_response(describe_config(_find_version(self._gateway, request)))

    async def _show_statistics(self, request: web.Request) -> web.Response:
        path = request.match_info
        found = self._gateway.statistics.describe(path.get("model", ""), path.get("version", ""))
        return _json_response(AllStatistics(model_stats=found))

    async def _show_index(self, request: web.Request) -> web.Response:
        with self._gateway.under_way.counting() as counted:
            options = await self._bodies.read_json(request, counted, IndexOptions, b"{}")
            entries = await self._gateway.repository.index(ready_only=options.ready)
        return _json_response(entries)

    async def _load(self, request: web.Request) -> web.Response:
        return await self._change(request, self._gateway.repository.load)

    async def _unload(self, request: web.Request) -> web.Response:
        return await self._change(request, self._gateway.repository.unload)

    async def _change(
        self, request: web.Request, change: Callable[..., Awaitable[None]]
    ) -> web.Response:
        """Change the models, and answer when all processes have followed."""
        with self._gateway.under_way.counting() as counted:
            given = await self._bodies.read_json(request, counted, ChangeOptions, b"{}")
            caller = request.get(_CALLER)
            who = (caller and caller.tenant) or f"address {request.remote}"
            await change(request.match_info["model"], given.parameters, who)
        return _json_response({})

    async def _show_regions(self, request: web.Request) -> web.Response:
        return _json_response(self._gateway.regions.describe(request.match_info.get("region", "")))

    async def _register(self, request: web.Request) -> web.Response:
        with self._gateway.under_way.counting() as counted:
            given = await self._bodies.read_json(request, counted, RegisterRequest)
            name = request.match_info["region"]
            self._gateway.regions.register(name, given.key, given.offset, given.byte_size)
        return _json_response({})

    async def _unregister(self, request: web.Request) -> web.Response:
        self._gateway.regions.unregister(request.match_info.get("region", ""))
        return _json_response({})

    async def _refuse_shared_memory(self, reason: str, request: web.Request) -> web.Response:
        error = f"{request.path} is not supported: {reason}"
        return _json_response(ErrorBody(error=error), 501)


# --- callers ------------------------------------------------------------------------------------

_CALLER = web.RequestKey("caller", Caller)


def _group_of(request: web.Request) -> ApiGroup:
    """Return the group of a route; an unknown path belongs to the metadata."""
    resource = request.match_info.route.resource
    path = "" if resource is None else resource.canonical
    if request.method == "POST" and path.endswith(("/infer", ":predict")):
        return ApiGroup.INFERENCE
    if path.endswith(("/live", "/ready")):
        return ApiGroup.HEALTH
    if "/repository/" in path:
        return ApiGroup.REPOSITORY
    return ApiGroup.INFERENCE if "sharedmemory/" in path else ApiGroup.METADATA


def _changes_models(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    path = "" if resource is None else resource.canonical
    return "/repository/models/" in path


def _find_version(gateway: Gateway, request: web.Request) -> ModelVersion:
    path = request.match_info
    return gateway.models.lookup(path["model"], path.get("version"))


# --- headers and codings ------------------------------------------------------------------------


def _header(request: web.Request, name: str) -> str | None:
    """Return the value of a header, see `join_values`; None if it is absent."""
    values = request.headers.getall(name, ())
    return join_values(values) if values else None


def _content_type(request: web.Request) -> str:
    content_type = request.headers.get("Content-Type", "")
    if not content_type.isascii():
        raise Rejected.mismatch(
            Code.INVALID_REQUEST, "header Content-Type", expected="ASCII", got=repr(content_type)
        )
    return content_type


def _coding_of(request: web.Request) -> str:
    """Return the coding of a body, empty for none. Raises `UnreadableBody`."""
    given = ", ".join(request.headers.getall("Content-Encoding", ()))  # twice the same is two
    coding = read_coding(given)
    if coding is None:
        expected = f"one of {', '.join(CODINGS)}, or none"
        raise UnreadableBody(
            415, f"header Content-Encoding: expected {expected}, got {given[:40]!r}"
        )
    return coding


@contextmanager
def _damage_as_unreadable() -> Iterator[None]:
    """Turn the refusal of a damaged body into `UnreadableBody`."""
    try:
        yield
    except Rejected as error:
        if error.code != Code.INVALID_REQUEST or isinstance(error, UnreadableBody):
            raise
        raise UnreadableBody(400, error.message) from error


# --- answers ------------------------------------------------------------------------------------


def _accepted(request: web.Request) -> str:
    """Return the header Accept; empty if it is absent, or accepts all alike."""
    return read_accept(_header(request, "Accept") or "")


def _require_accepted(accept: str, offers: tuple[str, ...]) -> str:
    """Return the content type that the caller prefers. Raises `RefusedAtDoor`."""
    try:
        return require_content_type(accept, offers)
    except Rejected as error:
        raise RefusedAtDoor(406, error.message) from error


def _typed(content_type: str) -> dict[str, str]:
    return {"Content-Type": content_type}


def _error_response(error: Exception, answer: ErrorAnswer, retry_after_s: int) -> web.Response:
    status = _STATUS.get(answer.code) or (503 if answer.retriable else 500)
    if isinstance(error, RefusedAtDoor):
        status = error.status
    headers: dict[str, str] = {}
    if status in _RETRY_AFTER:
        wait_ms = answer.retry_after_ms or 0
        headers["Retry-After"] = str(max(-(-wait_ms // 1000), retry_after_s))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    response = _json_response(_error_body(answer), status, headers)
    if status in _DENIED or isinstance(error, UnreadableBody):
        response.force_close()  # the rest of the body may never come
    return response


def _error_body(answer: ErrorAnswer) -> ErrorBody:
    details = ErrorDetailsBody(code=answer.code, retriable=answer.retriable)
    if answer.retry_after_ms is not None:
        details["retry_after_ms"] = answer.retry_after_ms
    return ErrorBody(error=answer.message, error_details=details)


def _json_response(
    body: Mapping[str, object] | Sequence[Mapping[str, object]],
    status: int = 200,
    headers: dict[str, str] | None = None,
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        headers={"Content-Type": JSON, **(headers or {})},
    )
