"""TLS and SASL: a client's options from the settings, and why a connection failed."""

from __future__ import annotations

import asyncio
import ssl
from functools import partial
from pathlib import Path
from typing import Any

import aiokafka.errors as kafka_errors
from aiokafka.abc import AbstractTokenProvider

from headrace.config import KafkaSettings
from headrace.errors import ConfigurationError, HeadraceError
from headrace.log.errors import LogAuthenticationFailed, LogUnavailable
from headrace.log.kafka.errors import error_text
from headrace.primitives.worker_thread import run_on_daemon_thread


class TokenFile(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka publishes no types
    """A bearer token that another program keeps fresh in a file; read for every connection.

    While a read gets no answer, as on a mount that hangs, later connections wait for the same one:
    else each attempt to connect would leave a thread behind.
    """

    def __init__(self, path: Path) -> None:
        self._read = partial(path.read_text, encoding="utf-8")
        self._reading: asyncio.Future[str] | None = None

    async def token(self) -> str:
        """Return the token. Raises `OSError`, which aiokafka takes for a failed connection."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(run_on_daemon_thread(self._read), name="read-token")
        return (await asyncio.shield(self._reading)).strip()


def security_options(settings: KafkaSettings) -> dict[str, Any]:
    """Return the options for TLS and SASL, by aiokafka's names."""
    protocol = settings.security_protocol
    options: dict[str, Any] = {"security_protocol": protocol}
    if protocol in ("SSL", "SASL_SSL"):
        options["ssl_context"] = _tls_context(settings)
    if protocol.startswith("SASL"):
        options["sasl_mechanism"] = settings.sasl_mechanism
        if settings.sasl_mechanism == "OAUTHBEARER":
            assert settings.oauth_token_file is not None  # KafkaSettings checks it
            _check_readable("oauth_token_file", settings.oauth_token_file)
            options["sasl_oauth_token_provider"] = TokenFile(settings.oauth_token_file)
        else:
            options["sasl_plain_username"] = settings.sasl_username
            options["sasl_plain_password"] = settings.sasl_password.get_secret_value()
    return options


def _tls_context(settings: KafkaSettings) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if settings.ssl_ca_file is not None:
        _check_readable("ssl_ca_file", settings.ssl_ca_file)
        # Trust only this authority, without the machine's own ones.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cafile=settings.ssl_ca_file)
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"kafka.ssl_ca_file: {settings.ssl_ca_file}: expected certificates in PEM: "
                f"{error.reason or error}"
            ) from error
    context.check_hostname = settings.ssl_check_hostname
    if settings.ssl_cert_file is not None:
        _load_own_certificate(context, settings, settings.ssl_cert_file)
    elif settings.ssl_key_file is not None:
        raise ConfigurationError("kafka.ssl_key_file: needs kafka.ssl_cert_file beside it")
    return context


def _load_own_certificate(
    context: ssl.SSLContext, settings: KafkaSettings, cert_file: Path
) -> None:
    _check_readable("ssl_cert_file", cert_file)
    if settings.ssl_key_file is not None:
        _check_readable("ssl_key_file", settings.ssl_key_file)
    try:
        # With any password, even an empty one, OpenSSL does not prompt for one on a terminal.
        context.load_cert_chain(
            cert_file, settings.ssl_key_file, settings.ssl_key_password.get_secret_value()
        )
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"kafka.ssl_cert_file, ssl_key_file, ssl_key_password: {cert_file}: "
            f"{error.reason or 'the key cannot be read with this password'}"
        ) from error


def _check_readable(setting: str, path: Path) -> None:
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigurationError(f"kafka.{setting}: {path}: {error.strerror}") from error


def no_brokers_error(settings: KafkaSettings, where: str) -> HeadraceError:
    """Return the error for a server whose answer names no broker, not even itself."""
    by_token = settings.sasl_mechanism == "OAUTHBEARER"
    if by_token and settings.security_protocol.startswith("SASL"):
        # A broker refuses a bearer token in a challenge (RFC 7628, 3.2.3) that aiokafka does not
        # read: the refusal then arrives instead of the first response.
        return LogAuthenticationFailed(f"{where}: {_credentials(settings)} refused")
    return LogUnavailable(f"{where}: it is starting, and knows of no broker yet")


def connection_error(
    settings: KafkaSettings, where: str, error: Exception, timeout_s: float
) -> HeadraceError:
    """Return an error of the right kind, with one line on why a connection failed.

    Args:
        settings: the settings with which it was attempted.
        where: the server's address.
        error: the error of the socket, of TLS, or of aiokafka.
        timeout_s: how long each answer was waited for.
    """
    tls = _find_tls_error(error)
    if tls is not None:
        return LogAuthenticationFailed(f"{where}: {_explain_tls(tls)}")
    if isinstance(error, kafka_errors.SaslAuthenticationFailed):
        return LogAuthenticationFailed(f"{where}: {_credentials(settings)} refused")
    if isinstance(
        error,
        kafka_errors.UnsupportedSaslMechanismError | kafka_errors.IllegalSaslStateError,
    ):
        return LogAuthenticationFailed(
            f"{where}: this listener takes no SASL mechanism "
            f"{settings.sasl_mechanism} (kafka.sasl_mechanism)"
        )
    if isinstance(error, OSError) and error.filename:
        return ConfigurationError(f"kafka.oauth_token_file: {error.filename}: {error.strerror}")
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    hint = ""
    if isinstance(error, TimeoutError) and not error.strerror:
        reason = f"expected an answer within {timeout_s:g} s, got none"
    elif isinstance(error, kafka_errors.KafkaConnectionError):
        reason = "expected an answer, but the connection was closed"
    elif isinstance(error, kafka_errors.KafkaError):
        reason = error_text(error)
    if isinstance(error, ConnectionResetError | kafka_errors.KafkaConnectionError):
        # A listener of another protocol disconnects without a message.
        hint = f"; is this a listener for {settings.security_protocol} (kafka.security_protocol)?"
    return LogUnavailable(f"{where}: {reason}{hint}")


def _credentials(settings: KafkaSettings) -> str:
    if settings.sasl_mechanism == "OAUTHBEARER":
        return f"the token in {settings.oauth_token_file}"
    return f"user {settings.sasl_username!r} or its password ({settings.sasl_mechanism})"


def _find_tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """Return the TLS error in a chain of causes; with TLS 1.3 it may arrive with the first
    response.
    """
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return error
        error = error.__cause__
    return None


def _explain_tls(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the broker's certificate is not trusted: {error.verify_message} "
            "(kafka.ssl_ca_file, kafka.ssl_check_hostname)"
        )
    if error.reason == "WRONG_VERSION_NUMBER":
        return "this listener does not speak TLS (kafka.security_protocol)"
    return f"the TLS handshake failed: {error.reason or error} (kafka.ssl_cert_file)"
