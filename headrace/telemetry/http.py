"""HTTP server of a process: health, models and metrics. It accepts no inference requests.

Paths and bodies of `/v2` are the Open Inference Protocol's
(https://github.com/kserve/open-inference-protocol, REST); `POST /v2/repository/index` is the model
repository extension of Triton Inference Server. `/health/live` and `/health/ready` are for
Kubernetes, `/metrics` is for Prometheus, `/status` is the full state for people and programs
(`docs/health.md`), and `/` is a web page that shows it.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from headrace import __version__
from headrace.errors import Code, Fatal, Rejected
from headrace.models.signature import TensorSpec
from headrace.models.version import ModelVersion, State
from headrace.protocol.codec.faults import DECODE_ERRORS
from headrace.telemetry.health import Health
from headrace.telemetry.http_connections import Connections
from headrace.telemetry.page import load_page
from headrace.tuning import TUNING, RuntimeTuning

_PLATFORMS = {"onnx": "onnxruntime_onnx", "python": "headrace_python"}
_HTTP_STATUS = {
    Code.INVALID_REQUEST: 400,
    Code.UNKNOWN_MODEL: 404,
    Code.MODEL_NOT_READY: 503,
}
_INDEX_STATES = {
    State.LOADING: "LOADING",
    State.READY: "READY",
    State.FAILED: "UNAVAILABLE",
    State.UNLOADING: "UNLOADING",
}


class Catalogue(Protocol):
    """The models to show; implemented by `headrace.models.registry.Models`."""

    def lookup(self, name: str, version: str | None = None) -> ModelVersion: ...
    def versions(self, state: State | None = None) -> list[ModelVersion]: ...
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

    On a loopback address, requests are answered only if their `Host` is a loopback address as well:
    another site's page, whose name was made to resolve to this machine, must not read local data.
    """

    def __init__(
        self,
        address: tuple[str, int],
        health: Health,
        models: Catalogue,
        metrics: CollectorRegistry,
        status: Callable[[], dict[str, Any]] = dict,
        tuning: RuntimeTuning = TUNING.runtime,
    ) -> None:
        self._host, self._port = address
        self._health = health
        self._models = models
        self._metrics = metrics
        self._status = status
        self._tuning = tuning
        self._connections = Connections(tuning)
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port that it listens on, once started."""
        return self._port

    async def __aenter__(self) -> Self:
        """Start listening.

        Raises:
            Fatal: the address is taken, or is not this machine's.
        """
        runner = web.AppRunner(
            self._application(),
            access_log=None,
            shutdown_timeout=self._tuning.http_stop_timeout_s,
        )
        await runner.setup()
        make = runner.server
        assert make is not None
        try:
            listening = await asyncio.get_running_loop().create_server(
                self._connections.bounded(make), self._host, self._port
            )
        except OSError as error:
            await runner.cleanup()
            raise Fatal(
                f"telemetry.http_port: cannot listen on {self._host}:{self._port}: {error.strerror}"
            ) from error
        self._port = listening.sockets[0].getsockname()[1]
        self._runner, self._listening = runner, listening
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _application(self) -> web.Application:
        application = web.Application(
            client_max_size=self._tuning.http_body_bytes,
            middlewares=[self._bounded, _errors_as_json],
        )
        if _is_loopback(self._host):
            application.middlewares.append(_refuse_other_hosts)
        router = application.router
        for prefix in ("/health", "/v2/health"):
            router.add_get(f"{prefix}/live", self._live)
            router.add_get(f"{prefix}/ready", self._ready)
        router.add_get("/v2", self._server)
        router.add_post("/v2/repository/index", self._index)
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            router.add_get(path, self._model)
            router.add_get(f"{path}/ready", self._model_ready)
        router.add_get("/metrics", self._show_metrics)
        router.add_get("/status", self._show_status)
        router.add_get("/", self._show_page)
        return application

    @web.middleware
    async def _bounded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer within the time limit of a request."""
        timeout_s = self._tuning.http_request_timeout_s
        with self._connections.answering(request.transport):
            try:
                async with asyncio.timeout(timeout_s):
                    return await handler(request)
            except TimeoutError:
                body = {"error": f"request: expected all of it within {timeout_s:g} s, got a part"}
                return web.json_response(body, status=408, headers={"Connection": "close"})

    async def _live(self, request: web.Request) -> web.Response:
        health = self._health
        return self._condition("live", health.live, health.live_fault() or health.reason)

    async def _ready(self, request: web.Request) -> web.Response:
        health = self._health
        return self._condition("ready", health.ready, health.ready_fault())

    def _condition(self, name: str, holds: bool, reason: str) -> web.Response:
        body = {name: holds, "state": self._health.phase, "reason": reason}
        return web.json_response(body, status=200 if holds else 503)

    async def _server(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"name": "headrace", "version": __version__, "extensions": ["model_repository"]}
        )

    async def _index(self, request: web.Request) -> web.Response:
        """Return the versions and their states; `{"ready": true}` selects only the ready ones."""
        only_ready = await _wants_only_ready(request)
        entries = [
            {
                "name": entry["name"],
                "version": entry["version"],
                "state": _INDEX_STATES[State(entry["state"])],
                "reason": entry["reason"],
            }
            for entry in self._models.status()
            if not only_ready or entry["state"] == State.READY
        ]
        return web.json_response(entries)

    async def _model(self, request: web.Request) -> web.Response:
        version = self._lookup(request)
        ready = [
            each.version for each in self._models.versions(State.READY) if each.name == version.name
        ]
        return web.json_response(
            {
                "name": version.name,
                "versions": ready,
                "platform": _PLATFORMS[version.config.backend],
                "inputs": [_described(spec) for spec in version.signature.inputs],
                "outputs": [_described(spec) for spec in version.signature.outputs],
                "batching": _batching(version),
            }
        )

    async def _model_ready(self, request: web.Request) -> web.Response:
        version = self._lookup(request)
        return web.json_response({"name": version.name, "ready": True})

    def _lookup(self, request: web.Request) -> ModelVersion:
        path = request.match_info
        return self._models.lookup(path["model"], path.get("version"))

    async def _show_metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._metrics), headers={"Content-Type": content_type})

    async def _show_status(self, request: web.Request) -> web.Response:
        return web.json_response(self._status())

    async def _show_page(self, request: web.Request) -> web.Response:
        page = await asyncio.to_thread(load_page)
        return web.Response(body=page.body, headers=page.headers)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Format every error as the protocol does, `{"error": message}`."""
    try:
        return await handler(request)
    except Rejected as error:
        status = _HTTP_STATUS.get(error.code, 500)
        return web.json_response({"error": error.message}, status=status)
    except web.RequestPayloadError as error:
        body = {"error": f"body: expected one that can be read, got {error}"}
        return web.json_response(body, status=400)
    except web.HTTPException as error:
        headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        body = {"error": f"{request.method} {request.path}: {error.reason}"}
        return web.json_response(body, status=error.status, headers=headers)


@web.middleware
async def _refuse_other_hosts(request: web.Request, handler: Handler) -> web.StreamResponse:
    host = request.headers.get("Host")
    if host is None or _is_loopback(_name_of(host)):
        return await handler(request)
    error = f"header Host: expected a loopback name or address, got {host!r}"
    return web.json_response({"error": error}, status=421)


def _name_of(host: str) -> str:
    """Return the name or address in a `Host` header, without the port; empty if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class _IndexQuery(msgspec.Struct):
    ready: bool = False


async def _wants_only_ready(request: web.Request) -> bool:
    body = await request.read()
    if not body:
        return False
    try:
        return msgspec.json.decode(body, type=_IndexQuery).ready
    except DECODE_ERRORS as error:
        raise Rejected(
            Code.INVALID_REQUEST,
            f'body: expected {{"ready": true or false}} in UTF-8: {error}',
        ) from error


def _batching(version: ModelVersion) -> dict[str, Any]:
    """Return batch limits and batch-safety results, which the protocol does not have."""
    found = version.verdict.entry() if version.verdict else {}
    return {"max_batch_size": version.max_batch_size, **found}


def _described(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
