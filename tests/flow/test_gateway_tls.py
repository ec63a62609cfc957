"""TLS at both doors: Triton's clients, who is refused, and certificates that change."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
from msgspec import structs

from headrace.errors import ConfigurationError
from headrace.telemetry.logs import Event
from headrace.tools.local_kafka.security import Certificates, make_certificates
from headrace.topics import STAGES
from headrace.tuning import TUNING, AccessTuning
from tests.support.callers import Authority
from tests.support.conditions import DEADLINE_S
from tests.support.gateways import add_identities, files_noticed, gateway_of, values_of
from tests.support.processes import Process
from tests.support.spans import tracing_settings, tracing_spans

QUICK = structs.replace(TUNING.gateway, access=AccessTuning(file_check_interval_s=0.01))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model for each datatype, which changes nothing."""
    models = tmp_path / "models"
    models.mkdir()
    add_identities(models)
    return models


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    """An authority, a certificate for this machine, and a caller's."""
    return make_certificates(tmp_path)


def doors_of(files: Certificates, *, mutual: bool = False) -> dict[str, Any]:
    """Settings with both doors open, whose certificate and key are in one file."""
    settings = {"grpc_port": 0, "tls_cert_file": str(files.broker)}
    return settings | ({"tls_client_ca_file": str(files.authority)} if mutual else {})


def trusting(files: Certificates, *, as_client: bool = False) -> ssl.SSLContext:
    """A caller's context, with its own certificate or without one."""
    context = ssl.create_default_context(cafile=str(files.authority))
    if as_client:
        context.load_cert_chain(files.client, files.client_key)
    return context


def replace_client(files: Certificates, certificate: Path, key: Path) -> Certificates:
    """The same files, with another caller's."""
    return replace(files, client=certificate, client_key=key)


def call_of(module: Any) -> dict[str, Any]:
    """The arguments of `infer`, which are the same for both clients."""
    values = values_of("FP32")
    tensor = module.InferInput("x", list(values.shape), "FP32")
    tensor.set_data_from_numpy(values)
    return {"model_name": "FP32", "inputs": [tensor]}


async def ask_over_http(url: str, context: ssl.SSLContext) -> None:
    """Send a request with Triton's client, and check its answer."""
    async with triton_http.InferenceServerClient(url, ssl=True, ssl_context=context) as client:
        found = await client.infer(**call_of(triton_http))
    np.testing.assert_array_equal(found.as_numpy("y"), values_of("FP32"))


async def ask_over_grpc(address: str, files: Certificates, *, as_client: bool = False) -> None:
    """Send a request with Triton's client, and check its answer."""
    own = (
        {"private_key": str(files.client_key), "certificate_chain": str(files.client)}
        if as_client
        else {}
    )
    async with triton_grpc.InferenceServerClient(
        address, ssl=True, root_certificates=str(files.authority), **own
    ) as client:
        found = await client.infer(**call_of(triton_grpc), client_timeout=20)
    np.testing.assert_array_equal(found.as_numpy("y"), values_of("FP32"))


async def test_clients_are_answered_over_tls(repository: Path, files: Certificates) -> None:
    """Both of Triton's, which trust the authority."""
    async with gateway_of(repository, **doors_of(files)) as served:
        await ask_over_http(served.url, trusting(files))
        await ask_over_grpc(served.grpc, files)


async def test_doors_with_tls_do_not_speak_without_it(
    repository: Path, files: Certificates
) -> None:
    """A caller that sends plain text learns nothing."""
    async with gateway_of(repository, **doors_of(files)) as served:
        with pytest.raises(aiohttp.ClientError):
            await served.get("/v2/health/live")
        async with triton_grpc.InferenceServerClient(served.grpc) as client:
            with pytest.raises(Exception, match="UNAVAILABLE"):
                await client.is_server_live(client_timeout=20)


@pytest.mark.timeout(90)
async def test_log_of_gateway_stays_json_through_handshakes_that_fail(
    repository: Path, files: Certificates
) -> None:
    """The core of gRPC would write a line of its own for each, past the log and its rate limit."""
    variables = {
        "HEADRACE_MODELS__REPOSITORY": str(repository),
        "HEADRACE_GATEWAY__TLS_CERT_FILE": str(files.broker),
        "HEADRACE_GATEWAY__HTTP_PORT": "off",
        "HEADRACE_GATEWAY__GRPC_PORT": "0",
    }
    async with Process(",".join(STAGES), variables, ["--gateway"]) as process:
        [port] = process.logged(Event.GATEWAY_LISTENING, "grpc_port")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        await process.terminate()
        lines = process.output.splitlines()

    assert [line for line in lines if not line.startswith("{")] == []


async def test_old_version_of_tls_is_refused(repository: Path, files: Certificates) -> None:
    """The least is 1.2."""
    old = trusting(files)
    with pytest.deprecated_call():
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    async with gateway_of(repository, **doors_of(files)) as served:
        with pytest.raises(aiohttp.ClientError):
            await ask_over_http(served.url, old)


async def test_caller_with_certificate_is_answered(repository: Path, files: Certificates) -> None:
    """It is signed by the authority that the doors believe."""
    async with gateway_of(repository, **doors_of(files, mutual=True)) as served:
        await ask_over_http(served.url, trusting(files, as_client=True))
        await ask_over_grpc(served.grpc, files, as_client=True)


async def test_caller_without_certificate_is_refused(repository: Path, files: Certificates) -> None:
    """The handshake fails, and no request is read."""
    async with gateway_of(repository, **doors_of(files, mutual=True)) as served:
        with pytest.raises(aiohttp.ClientError):
            await ask_over_http(served.url, trusting(files))
        with pytest.raises(Exception, match="UNAVAILABLE"):
            await ask_over_grpc(served.grpc, files)
        assert served.counted(200) == 0


async def test_caller_with_certificate_of_another_authority_is_refused(
    repository: Path, files: Certificates, tmp_path: Path
) -> None:
    """Anybody can sign a certificate."""
    (tmp_path / "others").mkdir()
    others = make_certificates(tmp_path / "others")
    stranger = trusting(files)
    stranger.load_cert_chain(others.client, others.client_key)
    async with gateway_of(repository, **doors_of(files, mutual=True)) as served:
        with pytest.raises(aiohttp.ClientError):
            await ask_over_http(served.url, stranger)
        with pytest.raises(Exception, match="UNAVAILABLE"):
            await ask_over_grpc(
                served.grpc, replace_client(files, others.client, others.client_key), as_client=True
            )
        assert served.counted(200) == 0


async def test_caller_with_expired_certificate_is_refused(
    repository: Path, files: Certificates, tmp_path: Path
) -> None:
    """At both doors, which answer another caller of the same authority."""
    authority = Authority(tmp_path)
    settings = doors_of(files) | {"tls_client_ca_file": str(authority.file)}
    valid, expired = authority.sign("valid"), authority.sign("expired", valid_days=-1)
    async with gateway_of(repository, **settings) as served:
        await ask_over_http(served.url, trusting(replace_client(files, *valid), as_client=True))
        former = replace_client(files, *expired)
        with pytest.raises(aiohttp.ClientError):
            await ask_over_http(served.url, trusting(former, as_client=True))
        with pytest.raises(Exception, match="UNAVAILABLE"):
            await ask_over_grpc(served.grpc, former, as_client=True)
        assert served.counted(200) == 1


async def test_handshake_that_stalls_is_ended(repository: Path, files: Certificates) -> None:
    """A connection that sends nothing is closed when the time for a head is over."""
    async with gateway_of(repository, header_timeout_s=0.05, **doors_of(files)) as served:
        reader, writer = await asyncio.open_connection(*served.url.rsplit(":", 1))
        async with asyncio.timeout(DEADLINE_S):
            with suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


async def test_server_span_of_call_over_tls_has_scheme_https(
    repository: Path, files: Certificates
) -> None:
    """The scheme is that of the connection."""
    telemetry = {"sample_ratio": 1.0}
    with tracing_spans(tracing_settings(1.0)) as (tracing, spans):
        async with gateway_of(
            repository, tracing=tracing, telemetry=telemetry, **doors_of(files)
        ) as served:
            await ask_over_http(served.url, trusting(files))

    assert (spans.one("server").attributes or {})["url.scheme"] == "https"


async def test_changed_certificates_are_used_for_new_connections(
    repository: Path, files: Certificates, tmp_path: Path
) -> None:
    """At both doors, without a restart; those that trust the former authority are refused."""
    (tmp_path / "next").mkdir()
    following = make_certificates(tmp_path / "next")
    async with gateway_of(repository, tuning=QUICK, **doors_of(files)) as served:
        await ask_over_http(served.url, trusting(files))
        await ask_over_grpc(served.grpc, files)

        async with files_noticed(Event.ACCESS_FILES_RELOADED):
            following.broker.replace(files.broker)

        await ask_over_http(served.url, trusting(following))
        await ask_over_grpc(served.grpc, following)
        with pytest.raises(aiohttp.ClientError):
            await ask_over_http(served.url, trusting(files))


async def test_unusable_new_certificate_leaves_former_one_in_use(
    repository: Path, files: Certificates
) -> None:
    """Two files cannot be replaced at once: for a while only one of them is new."""
    async with gateway_of(repository, tuning=QUICK, **doors_of(files)) as served:
        async with files_noticed(Event.ACCESS_FILES_REJECTED):
            files.broker.write_text("half of it")

        await ask_over_http(served.url, trusting(files))
        await ask_over_grpc(served.grpc, files)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda files: {"tls_cert_file": files.authority}, "certificate and its key in PEM"),
        (lambda files: {"tls_cert_file": "/nowhere"}, "tls_cert_file: /nowhere: expected a file"),
        (
            lambda files: {"tls_cert_file": files.broker, "tls_client_ca_file": files.client_key},
            "tls_client_ca_file: .*: expected certificates in PEM",
        ),
        (lambda files: {"tls_key_file": files.client_key}, "needs gateway.tls_cert_file"),
        (lambda files: {"tls_client_ca_file": files.authority}, "needs gateway.tls_cert_file"),
    ],
)
async def test_unusable_files_are_named_at_start(
    repository: Path,
    files: Certificates,
    settings: Callable[[Certificates], dict[str, Any]],
    message: str,
) -> None:
    """The gateway does not start without the protection that it was told to have."""
    chosen: dict[str, Any] = {name: str(value) for name, value in settings(files).items()}
    with pytest.raises(ConfigurationError, match=message):
        async with gateway_of(repository, **chosen):
            pass
