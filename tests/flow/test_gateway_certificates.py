"""Certificates of callers as logins, at both doors."""

from __future__ import annotations

import hashlib
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import grpc
import pytest
from cryptography.x509 import DNSName, UniformResourceIdentifier
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from headrace.errors import ConfigurationError
from headrace.gateway import open_inference_pb2 as messages
from headrace.tools.local_kafka.security import Certificates, make_certificates
from tests.support.callers import Authority, CallerFiles
from tests.support.gateways import Served, gateway_of
from tests.support.models import add_version, identity

SERVICE = "/inference.GRPCInferenceService/"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}
KEYS = f"""
[callers.by-name]
certificate = "CN=orders"

[callers.by-uri]
certificate = "URI:spiffe://example.org/scoring"

[callers.by-host]
certificate = "DNS:batch.example.org"
groups = ["metadata"]

[callers.by-key]
sha256 = "{hashlib.sha256(b"secret").hexdigest()}"
"""


class Files(NamedTuple):
    """The credentials of the doors and their callers."""

    doors: Certificates
    authority: Authority
    keys: Path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model that changes nothing."""
    models = tmp_path / "models"
    models.mkdir()
    add_version(models, "FP32", 1, identity("FP32"), "probe = false")
    return models


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Certificates of the doors, an authority for callers, and a file with three of them."""
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    return Files(make_certificates(tmp_path), Authority(tmp_path), keys)


def settings_of(files: Files) -> dict[str, Any]:
    return {
        "grpc_port": 0,
        "tls_cert_file": str(files.doors.broker),
        "tls_client_ca_file": str(files.authority.file),
        "keys_file": str(files.keys),
    }


async def status_over_http(
    served: Served,
    files: Files,
    caller: CallerFiles,
    path: str = "/v2/models/FP32/infer",
    **headers: str,
) -> int:
    """Send a request, or ask for what is shown at another path; the status of the answer."""
    context = ssl.create_default_context(cafile=str(files.doors.authority))
    context.load_cert_chain(caller.certificate, caller.key)
    method = "POST" if path.endswith("/infer") else "GET"
    async with (
        aiohttp.ClientSession(f"https://{served.url}") as http,
        http.request(
            method, path, json=BODY if method == "POST" else None, ssl=context, headers=headers
        ) as response,
    ):
        return response.status


def channel_of(served: Served, files: Files, caller: CallerFiles) -> grpc.aio.Channel:
    """A connection of a caller with its certificate."""
    credentials = grpc.ssl_channel_credentials(
        files.doors.authority.read_bytes(),
        caller.key.read_bytes(),
        caller.certificate.read_bytes(),
    )
    return grpc.aio.secure_channel(served.grpc, credentials)


async def infer_over_grpc(channel: grpc.aio.Channel, **metadata: str) -> str:
    """Send a request; the status of its answer."""
    contents = messages.InferTensorContents(fp32_contents=[1.0, 2.0])
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "contents": contents}
    request = messages.ModelInferRequest(model_name="FP32", inputs=[tensor])
    begin: Any = channel.unary_unary(f"{SERVICE}ModelInfer")
    call = begin(request.SerializeToString(), metadata=list(metadata.items()))
    return str((await call.code()).name)


async def test_names_in_certificate_decide_who_calls(repository: Path, files: Files) -> None:
    """The common name, or names for URIs and hosts, which come before it; a key goes first."""
    sign = files.authority.sign
    uri = UniformResourceIdentifier("spiffe://example.org/scoring")
    by_name, by_uri = sign("orders"), sign("anything", uri)
    callers = {
        "by name": (by_name, {}),
        "by uri": (by_uri, {}),
        "by key": (by_name, {"x-api-key": "secret"}),
        "wrong key": (by_name, {"x-api-key": "other"}),
        "unknown": (sign("stranger"), {}),
        "without the group": (sign("batch", DNSName("batch.example.org")), {}),
    }
    over_http: dict[str, int] = {}
    over_grpc: dict[str, str] = {}
    async with gateway_of(repository, **settings_of(files)) as served:
        for name, (caller, headers) in callers.items():
            over_http[name] = await status_over_http(served, files, caller, **headers)
            async with channel_of(served, files, caller) as channel:
                over_grpc[name] = await infer_over_grpc(channel, **headers)
        tenants = await served.tenants()
        counted = served.counted("UNAUTHENTICATED"), served.counted("PERMISSION_DENIED")

    assert list(over_http.values()) == [200, 200, 200, 401, 401, 403]
    refused = ["UNAUTHENTICATED", "UNAUTHENTICATED", "PERMISSION_DENIED"]
    assert list(over_grpc.values()) == ["OK", "OK", "OK", *refused]
    assert tenants == {b"by-name", b"by-uri", b"by-key"}
    assert counted == (2, 1)


async def test_methods_of_each_kind_ask_for_certificate(repository: Path, files: Files) -> None:
    """Streams and single calls; health is public."""
    known = files.authority.sign("batch", DNSName("batch.example.org"))
    unknown = files.authority.sign("stranger")
    found = {}
    async with gateway_of(repository, **settings_of(files)) as served:
        http = [await status_over_http(served, files, each, "/v2") for each in (known, unknown)]
        for name, caller in (("known", known), ("unknown", unknown)):
            async with channel_of(served, files, caller) as channel:
                found[name] = await codes_of(channel)

    assert http == [200, 401]
    assert found["known"] == ["OK", "OK", "OK", "PERMISSION_DENIED"]
    assert found["unknown"] == ["OK", "UNAUTHENTICATED", "UNAUTHENTICATED", "UNAUTHENTICATED"]


async def codes_of(channel: grpc.aio.Channel) -> list[str]:
    """The statuses of health, metadata, reflection and a stream of requests."""
    check: Any = health_pb2_grpc.HealthStub(channel).Check
    shown: Any = channel.unary_unary(f"{SERVICE}ServerMetadata")
    listed: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    streamed: Any = channel.stream_stream(f"{SERVICE}ModelStreamInfer")
    streams = [listed(), streamed()]
    for stream in streams:
        # Its refusal may arrive first, which its status says; grpc.aio also fails the call here,
        # and where it consumes an iterator of requests it says INTERNAL or CANCELLED instead.
        with suppress(Exception):
            await stream.done_writing()
    calls = [check(health_pb2.HealthCheckRequest()), shown(b""), *streams]
    return [(await call.code()).name for call in calls]


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ('certificate = "CN=a"', "expected gateway.tls_client_ca_file for a certificate, got none"),
        (f'certificate = "CN=a"\nsha256 = "{"0" * 64}"', "expected either .* got 2 of them"),
        ("", "expected either sha256 or certificate, got 0 of them"),
        ('certificate = "a"', "expected .* with sha256 or certificate"),
    ],
    ids=["no authority", "both", "neither", "no kind of name"],
)
async def test_unusable_entry_is_named_at_start(
    repository: Path, files: Files, entry: str, fault: str
) -> None:
    """Nobody could log in by it, or anybody."""
    files.keys.write_text(f"[callers.a]\n{entry}\n")
    with pytest.raises(ConfigurationError, match=rf"gateway\.keys_file: .*{fault}"):
        async with gateway_of(repository, keys_file=str(files.keys)):
            pass
