"""HTTP server of a process: health, models and metrics. It accepts no inference requests.

Paths and bodies of `/v2` are the Open Inference Protocol's
(https://github.com/kserve/open-inference-protocol, REST); `POST /v2/repository/index` is the model
repository extension of Triton Inference Server. `/health/live` and `/health/ready` are for
Kubernetes, `/metrics` is for Prometheus, `/status` is the full state for people and programs
(`docs/health.md`), and `/` is a web page that shows it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from headrace import __version__
from headrace.access.callers import ApiGroup, Callers, Credentials, Denied
from headrace.access.tls import RenewedContext, open_certificates
from headrace.access.watched import Watched
from headrace.config import AccessSettings, TelemetrySettings
from headrace.errors import Code, Rejected, Retriable
from headrace.models.index import (
    ChangeOptions,
    IndexOptions,
    Overtaken,
    RepositoryIndex,
    Unsupported,
)
from headrace.models.metadata import describe_model
from headrace.models.version import ModelVersion
from headrace.protocol.codec.faults import DECODE_ERRORS
from headrace.telemetry.file_refresh import refreshing
from headrace.telemetry.health import Health
from headrace.telemetry.http_listener import (
    AnswerLimits,
    Connections,
    HttpListener,
    credentials_of,
)
from headrace.tuning import TUNING, RuntimeTuning

T = TypeVar("T")

_HTTP_STATUS = {
    Code.INVALID_REQUEST: 400,
    Code.UNKNOWN_MODEL: 404,
    Code.MODEL_NOT_READY: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
_OPEN = TelemetrySettings()
_CHANGES = "/v2/repository/models/{model}"
_WHO = web.RequestKey("who", str)
_CHALLENGE = 'Basic realm="headrace", charset="UTF-8", Bearer'


class ServedModels(Protocol):
    """The models to show; implemented by `headrace.models.catalog.ModelCatalog`."""

    def lookup(self, name: str, version: str | None = None) -> ModelVersion: ...
    def lookup_bound(self, name: str, version: str) -> ModelVersion: ...
    def offered(self) -> list[ModelVersion]: ...
    def status(self) -> list[dict[str, Any]]: ...


class HttpServer:
    """The HTTP server of a process; entering starts it, leaving stops it.

    Args:
        address: host and port; port 0 picks a free one, see `port`.
        health: of this process.
        models: of this process.
        metrics: shown by `/metrics`, in OpenMetrics to clients that accept it.
        status: shown by `/status`.
        tuning: limits of connections and requests.
        access: TLS, and who may see what.
        repository: lists the models, and changes them; by default calls cannot change them.

    Attributes:
        certificates: of the server; None if it speaks without TLS.

    Raises:
        ConfigurationError: the files of certificates or keys cannot be used.
    """

    def __init__(
        self,
        address: tuple[str, int],
        health: Health,
        models: ServedModels,
        metrics: CollectorRegistry,
        status: Callable[[], dict[str, Any]] = dict,
        tuning: RuntimeTuning = TUNING.runtime,
        access: AccessSettings = _OPEN,
        repository: RepositoryIndex | None = None,
    ) -> None:
        self._health = health
        self._models = models
        self._repository = repository or RepositoryIndex(models)
        self._metrics = metrics
        self._status = status
        self._tuning = tuning
        self._connections = Connections(
            tuning.http_max_connections,
            tuning.http_header_timeout_s,
            tuning.http_idle_timeout_s,
            tuning.http_accept_retry_s,
            AnswerLimits(
                tuning.http_untaken_bytes,
                tuning.http_take_timeout_s,
                tuning.http_take_bytes_per_s,
                tuning.http_part_bytes,
            ),
        )
        # Probes have no certificate: health is public, and all else asks for a login.
        self.certificates = certificates = open_certificates(access, ssl.CERT_OPTIONAL)
        self._callers = Callers(access, tuning.http_access, trust_certificates=True)
        self._files: list[Watched[Any]] = [*self._callers.files]
        if certificates is not None:
            self._files.append(certificates)
        self._listener = HttpListener(
            "telemetry.http_port",
            address,
            self._connections,
            None if certificates is None else RenewedContext.of(certificates),
        )
        self._refreshing = AsyncExitStack()

    @property
    def port(self) -> int:
        """The port that it listens on, once started."""
        return self._listener.port

    async def __aenter__(self) -> Self:
        """Start listening.

        Raises:
            Fatal: the address is taken, or is not this machine's.
        """
        runner = web.AppRunner(
            self._make_application(),
            access_log=None,
            shutdown_timeout=self._tuning.http_stop_timeout_s,
        )
        await self._listener.start(runner)
        check_interval_s = self._tuning.http_access.file_check_interval_s
        await self._refreshing.enter_async_context(refreshing(self._files, check_interval_s))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._refreshing.aclose()
        await self._listener.stop()

    def _make_application(self) -> web.Application:
        application = web.Application(
            client_max_size=self._tuning.http_body_bytes,
            middlewares=[
                self._answer_on_connection,
                self._limit_time,
                _format_errors,
                self._admit,
            ],
        )
        router = application.router
        for prefix in ("/health", "/v2/health"):
            router.add_get(f"{prefix}/live", self._show_live)
            router.add_get(f"{prefix}/ready", self._show_ready)
        router.add_get("/v2", self._show_server)
        router.add_post("/v2/repository/index", self._show_index)
        router.add_post(f"{_CHANGES}/load", self._load)
        router.add_post(f"{_CHANGES}/unload", self._unload)
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            router.add_get(path, self._show_model)
            router.add_get(f"{path}/ready", self._show_model_ready)
        router.add_get("/metrics", self._show_metrics)
        router.add_get("/status", self._show_status)
        router.add_get("/", self._show_page)
        return application

    @web.middleware
    async def _answer_on_connection(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        """Suspend the idle timer of the connection until its client has taken the answer."""
        with self._connections.answering(request.transport):
            response = await handler(request)
            await self._connections.send(request, response)
        return response

    @web.middleware
    async def _limit_time(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer within the time limit of a request; a change of models has one of its own."""
        timeout_s = None if _changes_models(request) else self._tuning.http_request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await handler(request)
        except TimeoutError:
            limit_s = self._tuning.http_request_timeout_s
            body = {"error": f"request: expected all of it within {limit_s:g} s, got a part"}
            return web.json_response(body, status=408, headers={"Connection": "close"})

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse callers without the right login before anything of the body is read."""
        callers = self._callers
        given = credentials_of(request, with_certificate=callers.use_certificates)
        if _changes_models(request) and self._repository.can_change:
            # Not with a password: a browser that knows it would send it for any page.
            caller = callers.admit_change(given)
            request[_WHO] = caller.tenant or f"address {given.address}"
        elif not callers.are_all_alike:
            callers.admit(_group_of(request), _with_password_as_key(given))
        return await handler(request)

    async def _show_live(self, request: web.Request) -> web.Response:
        health = self._health
        return self._health_response("live", health.live, health.live_fault() or health.reason)

    async def _show_ready(self, request: web.Request) -> web.Response:
        health = self._health
        return self._health_response("ready", health.ready, health.ready_fault())

    def _health_response(self, name: str, holds: bool, reason: str) -> web.Response:
        body = {name: holds, "state": self._health.phase, "reason": reason}
        return web.json_response(body, status=200 if holds else 503)

    async def _show_server(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"name": "headrace", "version": __version__, "extensions": ["model_repository"]}
        )

    async def _show_index(self, request: web.Request) -> web.Response:
        """Return the versions and their states; `{"ready": true}` selects only the ready ones."""
        query = await _read_json(request, IndexOptions, '{"ready": true or false}')
        return web.json_response(await self._repository.index(ready_only=query.ready))

    async def _load(self, request: web.Request) -> web.Response:
        return await self._change(request, self._repository.load)

    async def _unload(self, request: web.Request) -> web.Response:
        return await self._change(request, self._repository.unload)

    async def _change(
        self, request: web.Request, change: Callable[..., Awaitable[None]]
    ) -> web.Response:
        """Change the models, and answer when all processes have followed."""
        async with asyncio.timeout(self._tuning.http_request_timeout_s):
            given = await _read_json(request, ChangeOptions, '{"parameters": {...}}')
        who = request.get(_WHO, "")
        await change(request.match_info["model"], given.parameters, who)
        return web.json_response({})

    async def _show_model(self, request: web.Request) -> web.Response:
        version = self._find_version(request)
        ready = self._models.offered()
        return web.json_response(describe_model(version, ready))

    async def _show_model_ready(self, request: web.Request) -> web.Response:
        version = self._find_version(request)
        return web.json_response({"name": version.name, "ready": True})

    def _find_version(self, request: web.Request) -> ModelVersion:
        path = request.match_info
        return self._models.lookup(path["model"], path.get("version"))

    async def _show_metrics(self, request: web.Request) -> web.Response:
        try:
            encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        except TypeError:  # it compares a version that is no number with one
            encode, content_type = choose_encoder("")
        return web.Response(body=encode(self._metrics), headers={"Content-Type": content_type})

    async def _show_status(self, request: web.Request) -> web.Response:
        return web.json_response(self._status())

    async def _show_page(self, request: web.Request) -> web.Response:
        page = await asyncio.to_thread(load_page)
        return web.Response(body=page.body, headers=page.headers)


@web.middleware
async def _format_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Format every error as the protocol does, `{"error": message}`."""
    try:
        return await handler(request)
    except Denied as error:
        challenge = {} if error.is_known else {"WWW-Authenticate": _CHALLENGE}
        status = 403 if error.is_known else 401
        response = web.json_response({"error": error.message}, status=status, headers=challenge)
        if request.can_read_body:
            response.force_close()  # the rest of it may never come
        return response
    except Retriable as error:
        return web.json_response({"error": str(error)}, status=503)
    except Rejected as error:
        return web.json_response({"error": error.message}, status=_status_of(error))
    except web.RequestPayloadError as error:
        body = {"error": f"body: expected one that can be read, got {error}"}
        return web.json_response(body, status=400)
    except web.HTTPException as error:
        headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        body = {"error": f"{request.method} {request.path}: {error.reason}"}
        return web.json_response(body, status=error.status, headers=headers)


def _status_of(error: Rejected) -> int:
    match error:
        case Overtaken():
            return 409
        case Unsupported():
            return 501
    return _HTTP_STATUS.get(error.code, 500)


def _group_of(request: web.Request) -> ApiGroup:
    """Return the group of a path; an unknown one belongs to the status."""
    resource = request.match_info.route.resource
    path = "" if resource is None else resource.canonical
    if path.endswith(("/live", "/ready")):
        return ApiGroup.HEALTH
    if path == "/metrics":
        return ApiGroup.METRICS
    if "/repository/" in path:
        return ApiGroup.REPOSITORY
    return ApiGroup.METADATA if path.startswith("/v2") else ApiGroup.STATUS


def _with_password_as_key(given: Credentials) -> Credentials:
    """Return the credentials with the password of `Basic` as their key: browsers ask for one, and
    can send the page's requests no other way (RFC 7617).
    """
    kind, _, encoded = given.authorization.partition(" ")
    if kind.lower() != "basic" or given.key:
        return given
    try:
        _, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except ValueError:
        return given
    return given._replace(key=password)


def _changes_models(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    return resource is not None and resource.canonical.startswith(_CHANGES)


async def _read_json(request: web.Request, kind: type[T], expected: str) -> T:
    """Return the body of a request; none has the defaults. Raises `Rejected`."""
    body = await request.read()
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except DECODE_ERRORS as error:
        raise Rejected(
            Code.INVALID_REQUEST, f"body: expected {expected} in UTF-8: {error}"
        ) from error


# --- the page at / -------------------------------------------------------------------------------


class Page(NamedTuple):
    """`page.html`, which polls `/status` every second and shows the result, and its headers.

    Its content security policy lets the browser run this file's own script and style and request
    this server, and nothing else: markup in a producer's error message cannot load, run or send
    anything.
    """

    body: bytes
    headers: dict[str, str]


@cache
def load_page() -> Page:
    """Read the page and compute the hashes that allow its script and style; blocks the first
    time.
    """
    text = (files("headrace.telemetry") / "page.html").read_text(encoding="utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash_element(text, 'script')}",
            f"style-src {_hash_element(text, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return Page(
        text.encode(),
        {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )


def _hash_element(text: str, element: str) -> str:
    """Return the hash source of the only such element:
    https://www.w3.org/TR/CSP3/#grammardef-hash-source.
    """
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", text, flags=re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
