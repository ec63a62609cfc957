"""TLS at the doors, with certificates that change while the gateway runs."""

from __future__ import annotations

import ssl
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from headrace.config import GatewaySettings
from headrace.errors import ConfigurationError
from headrace.gateway.watched import Watched, read_file


class Identity(NamedTuple):
    """What the doors show of themselves, and whom they believe.

    Attributes:
        certificate: the chain, in PEM.
        key: in PEM.
        client_ca: certificates that sign those of callers, in PEM; None if callers need none.
        context: of all that, for a server.
    """

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext


Certificates: TypeAlias = Watched[Identity]


def open_certificates(settings: GatewaySettings, check_interval_s: float) -> Certificates | None:
    """Return the certificates of the doors; None if they speak without TLS.

    Raises:
        ConfigurationError: the files cannot be used; or a key or a CA has no certificate beside it.
    """
    certificate, ca = settings.tls_cert_file, settings.tls_client_ca_file
    if certificate is not None:
        key = settings.tls_key_file or certificate
        files = [certificate, key, *([] if ca is None else [ca])]
        return Watched(files, partial(_load, certificate, key, ca), check_interval_s)
    for name in ("tls_key_file", "tls_client_ca_file"):
        if getattr(settings, name) is not None:
            raise ConfigurationError(f"gateway.{name}: needs gateway.tls_cert_file beside it")
    return None


def _load(certificate: Path, key: Path, client_ca: Path | None) -> Identity:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    identity = Identity(
        read_file("tls_cert_file", certificate),
        read_file("tls_key_file", key),
        None if client_ca is None else read_file("tls_client_ca_file", client_ca),
        context,
    )
    try:
        # Without a password, OpenSSL would ask for one at the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigurationError(
            f"gateway.tls_cert_file, tls_key_file: {certificate}, {key}: expected a certificate "
            f"and its key in PEM, without a password: {error}"
        ) from error
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigurationError(
                f"gateway.tls_client_ca_file: {client_ca}: expected certificates in PEM: {error}"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return identity


class RenewedContext(ssl.SSLContext):
    """A context that begins each connection with the current certificates.

    A server keeps the context that it was started with. OpenSSL can replace the certificate of a
    context, but not forget a CA.
    """

    certificates: Certificates

    @classmethod
    def of(cls, certificates: Certificates) -> RenewedContext:
        """Return a context for a server."""
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context.certificates = certificates
        return context

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """Begin a connection; the event loop calls this."""
        return self.certificates.current().context.wrap_bio(*args, **options)
