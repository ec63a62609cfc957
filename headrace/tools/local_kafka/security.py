"""A listener with TLS and SASL: its certificates and broker settings."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.tools.local_kafka.configuration import HOST, SECURE

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

SCRAM_MECHANISMS = ("SCRAM-SHA-512", "SCRAM-SHA-256")
_SECURITY_PACKAGE = "org.apache.kafka.common.security"
_LIFETIME = datetime.timedelta(days=7)
_CLOCK_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class ScramTls:
    """Configures a SASL_SSL listener, where `users` (name to password) log in.

    They log in by SCRAM-SHA-512, SCRAM-SHA-256 or PLAIN. OAUTHBEARER is enabled too, with Kafka's
    test validator: it accepts any unsigned token (`alg` `none`) that has not expired.
    """

    users: Mapping[str, str]

    def __post_init__(self) -> None:
        for name, password in self.users.items():
            # Both appear unquoted in Kafka's --add-scram and quoted in a JAAS line.
            if not (f"{name}{password}".isascii() and (name + password).isalnum()):
                raise ValueError(
                    f"users: expected names and passwords of ASCII letters and digits, "
                    f"got the user {name!r}"
                )


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: the authority that both sides trust, the broker's key with its chain, and a
    client's certificate and key, for a listener that requires one (`ssl.client.auth=required`).
    """

    authority: Path
    broker: Path
    client: Path
    client_key: Path


def scram_arguments(security: ScramTls) -> list[str]:
    """Return the arguments of `StorageTool format` that create the users before the first start."""
    arguments = []
    for name, password in security.users.items():
        for mechanism in SCRAM_MECHANISMS:
            arguments += ["--add-scram", f"{mechanism}=[name={name},password={password}]"]
    return arguments


def secure_listener(security: ScramTls, certificates: Certificates) -> dict[str, str]:
    """Return the broker's settings for the listener."""
    listener = f"listener.name.{SECURE.lower()}"
    scram = f"{_SECURITY_PACKAGE}.scram.ScramLoginModule required;"
    users = "".join(f' user_{name}="{password}"' for name, password in security.users.items())
    plain = f"{_SECURITY_PACKAGE}.plain.PlainLoginModule required{users};"
    oauth = f"{_SECURITY_PACKAGE}.oauthbearer.OAuthBearerLoginModule required;"
    return {
        "sasl.enabled.mechanisms": ",".join([*SCRAM_MECHANISMS, "PLAIN", "OAUTHBEARER"]),
        f"{listener}.scram-sha-512.sasl.jaas.config": scram,
        f"{listener}.scram-sha-256.sasl.jaas.config": scram,
        f"{listener}.plain.sasl.jaas.config": plain,
        f"{listener}.oauthbearer.sasl.jaas.config": oauth,
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificates.broker),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificates.authority),
    }


def make_certificates(directory: Path) -> Certificates:
    """Make an authority, a broker's certificate for 127.0.0.1 and localhost, and a client's.

    All are valid for a week: enough for tests, not for a deployment.
    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(3)]
    authority = _certificate("Headrace local Kafka", keys[0], None)
    broker = _certificate(HOST, keys[1], (authority, keys[0]))
    client = _certificate("client", keys[2], (authority, keys[0]))
    chain = broker.public_bytes(Encoding.PEM) + authority.public_bytes(Encoding.PEM)
    files = Certificates(
        authority=directory / "ca.pem",
        broker=directory / "broker.pem",
        client=directory / "client.pem",
        client_key=directory / "client.key",
    )
    files.authority.write_bytes(authority.public_bytes(Encoding.PEM))
    files.client.write_bytes(client.public_bytes(Encoding.PEM))
    _write_secret(files.broker, _private_pem(keys[1]) + chain)
    _write_secret(files.client_key, _private_pem(keys[2]))
    return files


def _private_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_secret(file: Path, content: bytes) -> None:
    file.touch(mode=0o600)
    file.write_bytes(content)


def _certificate(
    name: str,
    key: EllipticCurvePrivateKey,
    issuer: tuple[x509.Certificate, EllipticCurvePrivateKey] | None,
) -> x509.Certificate:
    """Return a certificate signed by the issuer; without one, a self-signed authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    issuer_name, issuer_key = (subject, key) if issuer is None else (issuer[0].subject, issuer[1])
    authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(authority_id, critical=False)
    )
    if issuer is not None:
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())
