"""TLS of a server, with certificates that change while it runs."""

from __future__ import annotations

import math
import os
import ssl
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from headrace.access.watched import Watched, read_file
from headrace.config import AccessSettings
from headrace.errors import ConfigurationError


class Identity(NamedTuple):
    """Certificate and key of a server, and the authorities that it trusts.

    Attributes:
        certificate: the chain, in PEM.
        key: in PEM.
        client_ca: certificates that sign those of callers, in PEM; None if callers need none.
        context: of all that, for a server.
        expires_at_s: when the first certificate of the chain expires, in epoch seconds; NaN if
            that cannot be read.
    """

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext
    expires_at_s: float


Certificates: TypeAlias = Watched[Identity]


def open_certificates(
    settings: AccessSettings, verify_callers: ssl.VerifyMode = ssl.CERT_REQUIRED
) -> Certificates | None:
    """Return the certificates of a server; None if it speaks without TLS.

    Args:
        settings: the files.
        verify_callers: whether callers need a certificate, if there is a CA for those.

    Raises:
        ConfigurationError: the files cannot be used; or a key or a CA has no certificate beside it.
    """
    certificate, ca = settings.tls_cert_file, settings.tls_client_ca_file
    if certificate is not None:
        key = settings.tls_key_file or certificate
        files = [certificate, key, *([] if ca is None else [ca])]
        return Watched(
            files, partial(_load, settings.section, certificate, key, ca, verify_callers)
        )
    for name in ("tls_key_file", "tls_client_ca_file"):
        if getattr(settings, name) is not None:
            raise ConfigurationError(
                f"{settings.section}.{name}: needs {settings.section}.tls_cert_file beside it"
            )
    return None


def _load(
    section: str, certificate: Path, key: Path, client_ca: Path | None, verify: ssl.VerifyMode
) -> Identity:
    """Return the identity in some files.

    Each is read once: the context and the identity must not differ because a file changed in
    between.

    Raises:
        ConfigurationError: the files cannot be used.
    """
    chain = read_file(f"{section}.tls_cert_file", certificate)
    secret = chain if key == certificate else read_file(f"{section}.tls_key_file", key)
    authorities = (
        None if client_ca is None else read_file(f"{section}.tls_client_ca_file", client_ca)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        with _as_file(chain) as chain_copy, _as_file(secret) as secret_copy:
            # Without a password, OpenSSL would ask for one at the terminal.
            context.load_cert_chain(chain_copy, secret_copy, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigurationError(
            f"{section}.tls_cert_file, tls_key_file: {certificate}, {key}: expected a certificate "
            f"and its key in PEM, without a password: {error}"
        ) from error
    if authorities is not None:
        try:
            # Outside its blocks, which are ASCII, PEM may have comments in any encoding.
            context.load_verify_locations(cadata=authorities.decode("ascii", "ignore"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigurationError(
                f"{section}.tls_client_ca_file: {client_ca}: expected certificates in PEM: {error}"
            ) from error
        context.verify_mode = verify
    return Identity(chain, secret, authorities, context, first_expiry_s(chain))


def first_expiry_s(chain: bytes) -> float:
    """Return when the first of the certificates in PEM expires; see `Identity`."""
    # Only servers with TLS need it.
    from cryptography.x509 import InvalidVersion, load_pem_x509_certificates

    try:
        found = load_pem_x509_certificates(chain)
    except (ValueError, InvalidVersion):  # OpenSSL has read it, and may forgive more than this
        return math.nan
    return min(each.not_valid_after_utc for each in found).timestamp()


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Yield the path of a private copy, because `load_cert_chain` takes no bytes.

    On Linux it is in memory alone, so that no key reaches a disk, and a read-only file system
    suffices.
    """
    if sys.platform == "linux":
        with os.fdopen(os.memfd_create("headrace-tls"), "wb", buffering=0) as file:
            file.write(content)
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile(buffering=0) as copy:
            copy.write(content)
            yield copy.name


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
