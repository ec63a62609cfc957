"""Access to the HTTP server of a process: keys, certificates, and the public paths."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from headrace.config import TelemetrySettings
from headrace.errors import ConfigurationError
from headrace.models.registry import Models
from headrace.telemetry.health import Health
from headrace.telemetry.http import HttpServer
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.status import ProcessState
from headrace.tools.local_kafka.security import Certificates, make_certificates
from headrace.tuning import TUNING, AccessTuning
from tests.support.callers import Authority, CallerFiles
from tests.support.command_line import Call
from tests.support.conditions import eventually
from tests.support.models import settings_for

HOST = "127.0.0.1"
PATHS = {
    "health": "/health/live",
    "metadata": "/v2",
    "repository": "/v2/repository/index",
    "metrics": "/metrics",
    "status": "/status",
    "page": "/",
    "unknown": "/unknown",
}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def keys_of(*groups: str, public: str = '["health"]', key: str = "secret") -> str:
    """A file with one caller, whose key opens these groups."""
    return (
        f'public = {public}\n[callers.someone]\nsha256 = "{digest(key)}"\ngroups = {list(groups)}\n'
    )


class Process:
    """The server of a process, and requests to it."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def answer(
        self, path: str, tls: ssl.SSLContext | None = None, **headers: str
    ) -> tuple[int, Mapping[str, str]]:
        """The status and the headers of what is shown at a path."""
        method = "POST" if path.endswith("/index") else "GET"
        async with (
            aiohttp.ClientSession() as client,
            client.request(
                method, f"{self.url}{path}", ssl=tls if tls else True, headers=headers
            ) as response,
        ):
            return response.status, response.headers

    async def statuses(self, tls: ssl.SSLContext | None = None, **headers: str) -> dict[str, int]:
        """The status of each path."""
        return {name: (await self.answer(path, tls, **headers))[0] for name, path in PATHS.items()}


@asynccontextmanager
async def shown_by(tmp_path: Path, **access: Any) -> AsyncIterator[Process]:
    """The server of a process with these settings."""
    settings = TelemetrySettings(**access)
    models = Models(settings_for(tmp_path))
    quick = replace(TUNING.runtime, http_access=AccessTuning(file_check_interval_s=0.01))
    health, metrics = Health(), Metrics(CollectorRegistry())
    status = ProcessState([], health, metrics, list).status
    async with HttpServer(
        (HOST, 0), health, models.catalog, metrics.registry, status, tuning=quick, access=settings
    ) as server:
        scheme = "https" if settings.tls_cert_file else "http"
        yield Process(f"{scheme}://{HOST}:{server.port}")


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    """A certificate for this machine, and its authority."""
    return make_certificates(tmp_path)


def trusting(files: Certificates, caller: CallerFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files.authority))
    if caller is not None:
        context.load_cert_chain(caller.certificate, caller.key)
    return context


async def test_key_opens_its_groups_and_health_is_public(tmp_path: Path) -> None:
    """Without a key all but health is 401; with one, what it does not open is 403."""
    file = tmp_path / "keys.toml"
    file.write_text(keys_of("metrics"))
    async with shown_by(tmp_path, keys_file=file) as served:
        without = await served.statuses()
        scraper = await served.statuses(Authorization="Bearer secret")
        wrong, headers = await served.answer("/metrics", Authorization="Bearer other")

    assert without == {"health": 200} | dict.fromkeys([*PATHS][1:], 401)
    assert scraper == dict.fromkeys(PATHS, 403) | {"health": 200, "metrics": 200}
    assert (wrong, headers["WWW-Authenticate"].split()[0]) == (401, "Basic")


async def test_password_of_browser_is_key(tmp_path: Path) -> None:
    """Under any user name: a browser sends nothing else for the page and its requests."""
    file = tmp_path / "keys.toml"
    file.write_text(keys_of("status"))
    async with shown_by(tmp_path, keys_file=file) as served:
        known = f"Basic {base64.b64encode(b'anybody:secret').decode()}"
        page, _ = await served.answer("/", Authorization=known)
        status, _ = await served.answer("/status", Authorization=known)
        other, _ = await served.answer("/", Authorization="Basic c2VjcmV0OnNlY3JldG8=")
        broken, _ = await served.answer("/", Authorization="Basic !")

    assert (page, status, other, broken) == (200, 200, 401, 401)


async def test_health_is_public_only_if_file_says_so(tmp_path: Path) -> None:
    """Probes can be made to send a key."""
    file = tmp_path / "keys.toml"
    file.write_text(keys_of("health", public="[]"))
    async with shown_by(tmp_path, keys_file=file) as served:
        without, _ = await served.answer("/health/ready")
        with_key, _ = await served.answer("/health/live", Authorization="bearer secret")

    assert (without, with_key) == (401, 200)


async def test_certificate_opens_what_is_not_public(tmp_path: Path, files: Certificates) -> None:
    """Probes have none, and are answered; a certificate of another authority is refused."""
    authority = Authority(tmp_path)
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other").sign("operator")
    access = {"tls_cert_file": files.broker, "tls_client_ca_file": authority.file}
    async with shown_by(tmp_path, **access) as served:
        probe = await served.statuses(trusting(files))
        operator = await served.statuses(trusting(files, authority.sign("operator")))
        with pytest.raises(aiohttp.ClientError):
            await served.answer("/health/live", trusting(files, stranger))

    assert probe == {"health": 200} | dict.fromkeys([*PATHS][1:], 401)
    assert operator == dict.fromkeys(PATHS, 200) | {"unknown": 404}


async def test_file_of_keys_names_certificates(tmp_path: Path, files: Certificates) -> None:
    """A certificate that the file does not name gives access only to what is public."""
    authority, file = Authority(tmp_path), tmp_path / "keys.toml"
    file.write_text('[callers.prometheus]\ncertificate = "CN=prometheus"\ngroups = ["metrics"]\n')
    access = {
        "tls_cert_file": files.broker,
        "tls_client_ca_file": authority.file,
        "keys_file": file,
    }
    async with shown_by(tmp_path, **access) as served:
        named = trusting(files, authority.sign("prometheus"))
        unnamed = trusting(files, authority.sign("stranger"))
        found = [
            (await served.answer(path, tls))[0]
            for tls in (named, unnamed)
            for path in ("/metrics", "/status", "/health/live")
        ]

    assert found == [200, 403, 200, 401, 401, 200]


async def test_changed_keys_hold_without_restart(tmp_path: Path) -> None:
    """The file is looked at while the server runs."""
    file = tmp_path / "keys.toml"
    file.write_text(keys_of("metrics"))
    async with shown_by(tmp_path, keys_file=file) as served:
        assert (await served.answer("/metrics", Authorization="Bearer secret"))[0] == 200
        file.write_text(keys_of("metrics", key="next"))

        async def is_refused() -> bool:
            return (await served.answer("/metrics", Authorization="Bearer secret"))[0] == 401

        await eventually(is_refused)
        assert (await served.answer("/metrics", Authorization="Bearer next"))[0] == 200


async def test_top_shows_its_key_and_certificate(
    tmp_path: Path, files: Certificates, call: Call
) -> None:
    """With its files it is let in; without the key it says what gives one."""
    authority, keys, key = Authority(tmp_path), tmp_path / "keys.toml", tmp_path / "key"
    await asyncio.to_thread(keys.write_text, keys_of("status"))
    await asyncio.to_thread(key.write_text, "secret\n")
    operator = authority.sign("operator")
    both = tmp_path / "operator-both.pem"
    await asyncio.to_thread(
        both.write_bytes, operator.certificate.read_bytes() + operator.key.read_bytes()
    )
    access = {
        "tls_cert_file": files.broker,
        "tls_client_ca_file": authority.file,
        "keys_file": keys,
    }
    async with shown_by(tmp_path, **access) as served:
        options = ["top", "--once", "--interval", "0.1", "--url", served.url]
        options += ["--ca-file", str(files.authority), "--cert-file", str(both)]
        refused = await asyncio.to_thread(call, *options)
        ended = await asyncio.to_thread(call, *options, "--key-file", str(key))

    assert refused.exit_code == 1
    assert "answered 401 Unauthorized; see --key-file" in refused.stdout
    assert (ended.exit_code, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("access", "fault"),
    [
        (
            {"tls_key_file": "a.pem"},
            r"telemetry\.tls_key_file: needs telemetry\.tls_cert_file beside it",
        ),
        ({"tls_cert_file": "a.pem"}, r"telemetry\.tls_cert_file: .*expected a file that can be"),
        ({"keys_file": "a.toml"}, r"telemetry\.keys_file: .*expected a file that can be read"),
        (
            {"jwt": {"jwks_file": "a.json", "issuer": "a", "audience": "b"}},
            r"telemetry\.jwt\.jwks_file: .*expected a file that can be read",
        ),
    ],
    ids=["key alone", "no certificate", "no keys", "no key set"],
)
async def test_unusable_files_are_named_at_start(
    tmp_path: Path, access: dict[str, Any], fault: str
) -> None:
    """With the section that they are set in."""
    with pytest.raises(ConfigurationError, match=fault):
        async with shown_by(tmp_path, **access):
            pass
