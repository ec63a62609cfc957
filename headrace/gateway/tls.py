"""TLS at the doors, with certificates that change while the gateway runs."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from headrace.config import GatewaySettings
from headrace.errors import ConfigurationError
from headrace.telemetry.logs import Event

log = structlog.get_logger(__name__)


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


class Certificates:
    """The certificate, the key and the CA of the doors, read anew when their files change.

    Each new connection asks for them; the files are looked at once in an interval. While they
    cannot be used, such as between the writing of the certificate and that of its key, the former
    ones are kept. The threads of gRPC ask too.

    Args:
        settings: `gateway.tls_*`, with a certificate.
        check_interval_s: between two looks at the files.
        now_s: monotonic clock.

    Raises:
        ConfigurationError: the files cannot be used.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        check_interval_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        assert settings.tls_cert_file is not None
        self._cert_file: Path = settings.tls_cert_file
        self._key_file: Path = settings.tls_key_file or settings.tls_cert_file
        self._ca_file = settings.tls_client_ca_file
        self._check_interval_s = check_interval_s
        self._now_s = now_s
        self._lock = threading.Lock()
        self._looked_s = now_s()
        self._seen = self._look()
        self._identity = self._load()

    def current(self) -> Identity:
        """Return the identity to use for a new connection."""
        with self._lock:
            now_s = self._now_s()
            if now_s - self._looked_s >= self._check_interval_s:
                self._looked_s = now_s
                self._reload()
            return self._identity

    def _reload(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._identity = self._load()
        except ConfigurationError as error:
            log.error(Event.CERTIFICATES_REJECTED, reason=str(error))
        else:
            log.info(Event.CERTIFICATES_RELOADED, file=str(self._cert_file))

    def _look(self) -> list[tuple[int, int, int] | None]:
        """Return what shows a change of the files: a file that is replaced has another inode."""
        found: list[tuple[int, int, int] | None] = []
        for file in (self._cert_file, self._key_file, self._ca_file):
            try:
                stat = None if file is None else file.stat()
            except OSError:
                stat = None
            found.append(None if stat is None else (stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return found

    def _load(self) -> Identity:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        certificate = _read("tls_cert_file", self._cert_file)
        key = _read("tls_key_file", self._key_file)
        client_ca = None
        try:
            # Without a password, OpenSSL would ask for one at the terminal.
            context.load_cert_chain(self._cert_file, self._key_file, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ConfigurationError(
                f"gateway.tls_cert_file, tls_key_file: {self._cert_file}, {self._key_file}: "
                f"expected a certificate and its key in PEM, without a password: {error}"
            ) from error
        if self._ca_file is not None:
            client_ca = _read("tls_client_ca_file", self._ca_file)
            try:
                context.load_verify_locations(self._ca_file)
            except (ssl.SSLError, OSError) as error:
                raise ConfigurationError(
                    f"gateway.tls_client_ca_file: {self._ca_file}: expected certificates in PEM: "
                    f"{error}"
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return Identity(certificate, key, client_ca, context)


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


def open_certificates(settings: GatewaySettings, check_interval_s: float) -> Certificates | None:
    """Return the certificates of the doors; None if they speak without TLS.

    Raises:
        ConfigurationError: the files cannot be used; or a key or a CA has no certificate beside it.
    """
    if settings.tls_cert_file is not None:
        return Certificates(settings, check_interval_s)
    for name in ("tls_key_file", "tls_client_ca_file"):
        if getattr(settings, name) is not None:
            raise ConfigurationError(f"gateway.{name}: needs gateway.tls_cert_file beside it")
    return None


def _read(setting: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"gateway.{setting}: {file}: expected a file that can be read: {error.strerror}"
        ) from error
