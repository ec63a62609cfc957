"""Health, models and metrics over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter

from headrace.errors import Fatal
from headrace.models.registry import Models
from headrace.telemetry.health import Health, Phase
from headrace.telemetry.http import HttpServer
from headrace.tuning import TUNING, RuntimeTuning
from tests.support.models import add_version, digits, settings_for

HOST = "127.0.0.1"


@pytest.fixture
def health() -> Health:
    """The health that the server shows."""
    return Health()


@pytest.fixture
async def session(tmp_path: Path, health: Health) -> AsyncIterator[ClientSession]:
    """A client of a server with the models `digits` (versions 1 and 2) and `broken`."""
    for number in (1, 2):
        add_version(tmp_path, "digits", number, digits(), 'versions = "all"')
    add_version(tmp_path, "broken", 1, digits(), "colour = 1")
    models = Models(settings_for(tmp_path))
    models.open()
    metrics = CollectorRegistry()
    Counter("answers", "Answers sent.", registry=metrics).inc(3)
    async with (
        HttpServer((HOST, 0), health, models.catalog, metrics) as server,
        ClientSession(f"http://{HOST}:{server.port}") as client,
    ):
        yield client


async def get(session: ClientSession, path: str) -> tuple[int, Any]:
    """Status and JSON body."""
    async with session.get(path) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("prefix", ["/health", "/v2/health"])
async def test_health_endpoints_answer(session: ClientSession, health: Health, prefix: str) -> None:
    """A starting process is alive and not ready, with what it waits for."""
    health.explain("loading models")
    state = {"state": "starting", "reason": "loading models"}
    assert await get(session, f"{prefix}/live") == (200, {"live": True, **state})
    assert await get(session, f"{prefix}/ready") == (503, {"ready": False, **state})


async def test_ready_process_answers_readiness_with_200(
    session: ClientSession, health: Health
) -> None:
    """200 is what makes a load balancer or Kubernetes send traffic."""
    health.enter(Phase.READY)
    status, body = await get(session, "/health/ready")
    assert (status, body["ready"]) == (200, True)


async def test_stopped_process_is_not_alive(session: ClientSession, health: Health) -> None:
    """It would have to be started anew."""
    health.enter(Phase.STOPPED)
    assert (await get(session, "/health/live"))[0] == 503


async def test_server_metadata_names_server_and_extensions(session: ClientSession) -> None:
    """Name, version and extensions, as the protocol has them."""
    status, body = await get(session, "/v2")
    assert (status, body["name"], body["extensions"]) == (200, "headrace", ["model_repository"])


@pytest.mark.parametrize("path", ["/v2/models/digits", "/v2/models/digits/versions/1"])
async def test_model_metadata_has_inputs_outputs_and_versions(
    session: ClientSession, path: str
) -> None:
    """Inputs and outputs with datatype and shape, and the ready versions."""
    assert await get(session, path) == (
        200,
        {
            "name": "digits",
            "versions": ["1", "2"],
            "platform": "onnxruntime_onnx",
            "inputs": [{"name": "pixels", "datatype": "FP32", "shape": [-1, 64]}],
            "outputs": [{"name": "scores", "datatype": "FP32", "shape": [-1, 10]}],
            "batching": {"max_batch_size": 32},
        },
    )


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2/models/digits/ready", 200),
        ("/v2/models/digits/versions/2/ready", 200),
        ("/v2/models/digits/versions/3/ready", 404),
        ("/v2/models/nope/ready", 404),
        ("/v2/models/broken/ready", 503),
    ],
)
async def test_model_readiness_follows_its_versions(
    session: ClientSession, path: str, status: int
) -> None:
    """Ready, not there, or there and not ready."""
    assert (await get(session, path))[0] == status


async def test_http_error_has_form_of_protocol(session: ClientSession) -> None:
    """`error` is the message."""
    assert await get(session, "/v2/models/nope") == (
        404,
        {"error": 'model_name: expected one of broken, digits, got "nope"'},
    )


async def test_unknown_http_path_has_form_of_protocol(session: ClientSession) -> None:
    """A client parses one kind of error."""
    assert await get(session, "/v3") == (404, {"error": "GET /v3: Not Found"})


async def test_wrong_http_method_names_allowed_ones(session: ClientSession) -> None:
    """The header `Allow` lists the allowed methods, as HTTP demands."""
    async with session.post("/v2") as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET,HEAD")


async def test_repository_index_shows_every_version_with_its_state(session: ClientSession) -> None:
    """The words are those of Triton's model repository extension."""
    async with session.post("/v2/repository/index") as response:
        broken, *versions = await response.json()
    assert (broken["name"], broken["state"]) == ("broken", "UNAVAILABLE")
    assert "colour" in broken["reason"]
    assert [(each["version"], each["state"]) for each in versions] == [
        ("1", "READY"),
        ("2", "READY"),
    ]


async def test_repository_index_lists_only_ready_versions_on_request(
    session: ClientSession,
) -> None:
    """`{"ready": true}` leaves out the others."""
    async with session.post("/v2/repository/index", json={"ready": True}) as response:
        assert [each["name"] for each in await response.json()] == ["digits", "digits"]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"ready": 1}',
        b"\xff",
        '{"ready": true}'.encode("utf-16"),
        b'{"ready": ' * 5_000,
        b'{"other": ' + b"[" * 5_000,
    ],
    ids=["malformed", "array", "number", "no UTF-8", "UTF-16", "deep", "deep elsewhere"],
)
async def test_repository_index_refuses_unknown_body(session: ClientSession, body: bytes) -> None:
    """The message says what was expected."""
    async with session.post("/v2/repository/index", data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"].startswith("body: expected ")


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "deflate"},
        {"Content-Type": "application/json; charset=no-such"},
    ],
    ids=["gzip", "deflate", "charset"],
)
async def test_body_of_wrong_encoding_is_client_error(
    session: ClientSession, headers: dict[str, str]
) -> None:
    """An unreadable body is the client's error; a charset changes nothing, as JSON is UTF-8."""
    body = b'{"ready": true}'
    async with session.post("/v2/repository/index", data=body, headers=headers) as response:
        assert response.status == (400 if "Content-Encoding" in headers else 200)
        assert await response.json()


@pytest.mark.parametrize("host", ["rebound.example", "rebound.example:80", "10.0.0.1", "[::1", ""])
async def test_foreign_host_header_is_refused_on_loopback(
    session: ClientSession, host: str
) -> None:
    """A page of another site cannot read it by a name that was made to lead here."""
    async with session.get("/status", headers={"Host": host}) as response:
        assert response.status == 421
        assert "header Host" in (await response.json())["error"]


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "[::1]:80", "LOCALHOST"])
async def test_loopback_host_header_is_accepted(session: ClientSession, host: str) -> None:
    """Under any of its names."""
    async with session.get("/health/live", headers={"Host": host}) as response:
        assert response.status == 200


async def test_metrics_endpoint_answers(session: ClientSession) -> None:
    """In Prometheus' text format."""
    async with session.get("/metrics") as response:
        assert response.content_type == "text/plain"
        assert "answers_total 3.0" in await response.text()


@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
async def test_metrics_for_unreadable_version_are_in_default_format(
    session: ClientSession, kind: str
) -> None:
    """A scraper that asks for a version that is none gets the metrics all the same."""
    async with session.get("/metrics", headers={"Accept": f"{kind};version=x.y.z"}) as response:
        assert response.status == 200
        assert response.content_type == "text/plain"
        assert "answers_total 3.0" in await response.text()


async def test_taken_http_port_is_refused(tmp_path: Path, health: Health) -> None:
    """The message names the setting and the address, and says what to set instead."""
    models, metrics = Models(settings_for(tmp_path)), CollectorRegistry()
    async with HttpServer((HOST, 0), health, models.catalog, metrics) as first:
        second = HttpServer((HOST, first.port), health, models.catalog, metrics)
        refusal = rf"telemetry\.http_port: cannot listen on {HOST}:\d+: .*; set another port, or 0"
        with pytest.raises(Fatal, match=refusal):
            await second.__aenter__()


LIMITS = replace(
    TUNING.runtime, http_max_connections=3, http_header_timeout_s=0.05, http_request_timeout_s=0.05
)
HALF_A_HEAD = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n"


@asynccontextmanager
async def limited(tmp_path: Path, health: Health, tuning: RuntimeTuning) -> AsyncIterator[int]:
    """A server with these limits; its port."""
    models = Models(settings_for(tmp_path))
    async with HttpServer(
        (HOST, 0), health, models.catalog, CollectorRegistry(), tuning=tuning
    ) as server:
        yield server.port


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        (b"http://rebound.example/health/live", b"localhost", b"421"),
        (b"HTTP://localhost/health/live", b"rebound.example", b"200"),
    ],
)
async def test_host_of_absolute_target_counts_instead_of_header(
    tmp_path: Path, health: Health, target: bytes, host: bytes, status: bytes
) -> None:
    """RFC 9112, section 3.2.2."""
    async with limited(tmp_path, health, TUNING.runtime) as port, AsyncExitStack() as stack:
        reader, writer = await asyncio.open_connection(HOST, port)
        stack.callback(writer.close)
        writer.write(b"GET " + target + b" HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        assert (await reader.readline()).split()[1] == status


async def test_connection_with_incomplete_head_is_closed(tmp_path: Path, health: Health) -> None:
    """After the time that it has for it."""
    async with limited(tmp_path, health, LIMITS) as port:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(HALF_A_HEAD)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


async def test_request_with_incomplete_body_is_refused(tmp_path: Path, health: Health) -> None:
    """The client is told why, and the connection is of no more use."""
    limits = replace(
        LIMITS, http_header_timeout_s=3600.0
    )  # a slow machine may take as long for both
    async with limited(tmp_path, health, limits) as port, AsyncExitStack() as stack:
        reader, writer = await asyncio.open_connection(HOST, port)
        stack.callback(writer.close)
        head = b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        writer.write(head + b"{")
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")


async def test_half_open_connections_do_not_keep_health_checks_out(
    tmp_path: Path, health: Health
) -> None:
    """The one that has waited longest gives way, so that a new one always has a place."""
    limits = replace(LIMITS, http_header_timeout_s=3600.0, http_request_timeout_s=3600.0)
    async with limited(tmp_path, health, limits) as port, AsyncExitStack() as stack:
        half_open = []
        for _ in range(limits.http_max_connections * 3):
            reader, writer = await asyncio.open_connection(HOST, port)
            stack.callback(writer.close)
            writer.write(HALF_A_HEAD)
            half_open.append(reader)
        async with ClientSession(f"http://{HOST}:{port}") as client:
            assert (await get(client, "/health/live"))[0] == 200
        for reader in half_open[: -limits.http_max_connections]:
            with suppress(ConnectionResetError):
                assert await reader.read() == b""


async def test_metrics_that_clients_do_not_take_give_way_to_newest(
    tmp_path: Path, health: Health
) -> None:
    """A further connection whose client reads takes all of them."""
    metrics = CollectorRegistry()
    meaning = "x" * 16 * 1024 * 1024  # more than the kernel buffers
    Counter("answers", meaning, registry=metrics)
    models = Models(settings_for(tmp_path))
    tuning = replace(TUNING.runtime, http_untaken_bytes=len(meaning))
    async with (
        HttpServer((HOST, 0), health, models.catalog, metrics, tuning=tuning) as server,
        AsyncExitStack() as stack,
    ):
        untaken = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection(HOST, server.port)
            stack.callback(writer.close)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            untaken.append(reader)
        first, second = untaken
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await first.readexactly(len(meaning))
        assert meaning.encode() in await second.readexactly(len(meaning) + 60)
