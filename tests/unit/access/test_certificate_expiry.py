"""When the certificates of a server expire, as its metrics show it."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from prometheus_client import CollectorRegistry

from headrace.access.tls import first_expiry_s, open_certificates
from headrace.config import GatewaySettings, TelemetrySettings
from headrace.errors import ConfigurationError
from headrace.gateway import open_gateway
from headrace.runtime.process import run
from headrace.telemetry.logs import LogRateLimiter
from headrace.telemetry.metrics import Metrics
from headrace.tools.local_kafka.security import make_certificates
from headrace.topics import STAGES
from tests.support.conditions import DEADLINE_S
from tests.support.models import settings_for

METRIC = "headrace_certificate_expiry_timestamp_seconds"
KEYS: dict[str, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey] = {
    "elliptic": ec.generate_private_key(ec.SECP256R1()),
    "RSA": rsa.generate_private_key(65537, 2048),
    "Edwards": ed25519.Ed25519PrivateKey.generate(),
}


def certificate(end: datetime, key: str = "elliptic", name: str = "server") -> bytes:
    """A certificate in PEM that is valid until then."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    signer = KEYS[key]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(signer.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(1970, 1, 2, tzinfo=UTC))
        .not_valid_after(end)
    )
    algorithm = None if key == "Edwards" else hashes.SHA256()
    return builder.sign(signer, algorithm).public_bytes(Encoding.PEM)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("year", [1999, 2049, 2050, 9999])
def test_certificate_expires_when_its_issuer_says(year: int, key: str) -> None:
    """Years from 2050 on have another form; sizes of keys and names change where the time is."""
    end = datetime(year, 12, 31, 23, 59, 58, tzinfo=UTC)

    assert first_expiry_s(certificate(end, key, name="n" * 64)) == end.timestamp()


def test_chain_expires_with_first_of_its_certificates() -> None:
    """Callers refuse the server from then on; the key may be in the file as well."""
    early, late = (datetime(year, 1, 1, tzinfo=UTC) for year in (2030, 2040))
    key = b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"

    assert first_expiry_s(key + certificate(late) + certificate(early)) == early.timestamp()


@pytest.mark.parametrize("content", [b"", b"AAAA", b"MAMwAQAw"])
def test_time_that_cannot_be_read_is_not_a_number(content: bytes) -> None:
    """OpenSSL may accept a certificate that this does not understand: it is used all the same."""
    pem = b"-----BEGIN CERTIFICATE-----\n" + content + b"\n-----END CERTIFICATE-----\n"

    assert math.isnan(first_expiry_s(pem))


@pytest.mark.parametrize("version", [1, 3])
def test_time_in_certificate_of_another_version_is_not_a_number(version: int) -> None:
    """OpenSSL takes any version, so that a process must start with them."""
    usual = certificate(datetime(2030, 1, 1, tzinfo=UTC)).decode()
    content = ssl.PEM_cert_to_DER_cert(usual)
    changed = content.replace(b"\xa0\x03\x02\x01\x02", bytes([0xA0, 3, 2, 1, version]), 1)

    assert math.isnan(first_expiry_s(ssl.DER_cert_to_PEM_cert(changed).encode()))


def test_renewed_certificate_is_shown_once_it_is_in_use(tmp_path: Path) -> None:
    """Not when it is on the disk: the process may not have taken it."""
    file = make_certificates(tmp_path).broker
    certificates = open_certificates(GatewaySettings(tls_cert_file=file))
    assert certificates is not None
    metrics = Metrics(CollectorRegistry())
    metrics.show_expiry("gateway", certificates)

    def shown() -> float | None:
        return metrics.registry.get_sample_value(METRIC, {"server": "gateway"})

    before = shown()
    file.write_bytes(certificate(datetime(2030, 1, 1, tzinfo=UTC)) + file.read_bytes())
    with pytest.raises(ConfigurationError):
        certificates.refresh()

    assert (before, shown()) == (first_expiry_s(certificates.current().certificate), before)


async def test_process_shows_expiry_for_each_server_with_tls(tmp_path: Path) -> None:
    """A gateway and the HTTP server of its process may have files of their own."""
    file = make_certificates(tmp_path).broker
    sections = {
        "telemetry": TelemetrySettings(http_port=0, tls_cert_file=file),
        "gateway": GatewaySettings(http_port=0, grpc_port="off", tls_cert_file=file),
    }
    settings = settings_for(tmp_path).model_copy(update=sections)
    port = asyncio.get_running_loop().create_future()

    def announce(page: int, doors: Mapping[str, int]) -> None:
        port.set_result(page)

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(
            run(settings, STAGES, LogRateLimiter(), announce, open_doors=open_gateway)
        )
        url = f"https://127.0.0.1:{await port}/metrics"
        async with aiohttp.ClientSession() as client, client.get(url, ssl=False) as response:
            scraped = await response.text()
        os.kill(os.getpid(), signal.SIGTERM)

    expiry = first_expiry_s(await asyncio.to_thread(file.read_bytes))
    shown = {line for line in scraped.splitlines() if line.startswith(METRIC)}
    assert {line.rsplit(" ", 1)[0] for line in shown} == {
        f'{METRIC}{{server="{server}"}}' for server in sections
    }
    assert {float(line.rsplit(" ", 1)[1]) for line in shown} == {expiry}
