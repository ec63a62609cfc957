"""Connect to the brokers: addresses, TLS, SASL, back-off, and explanations of failures."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import aiokafka.errors as kafka_errors
from aiokafka.abc import AbstractTokenProvider
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection, collect_hosts
from aiokafka.errors import KafkaError
from aiokafka.protocol.metadata import MetadataRequest

from headrace.config import KafkaSettings
from headrace.errors import ConfigurationError, HeadraceError
from headrace.log.errors import LogAuthenticationFailed, LogUnavailable
from headrace.log.kafka._aiokafka import (
    DirectConnection,
    add_connection,
    close_client,
    close_connection,
    connecting_lock,
    log_connecting_failed,
    new_connection,
    open_connection,
    replace_connecting,
    start_metadata_refresh,
)
from headrace.log.kafka.errors import answered
from headrace.log.kafka.record_batches import DEFAULT_DECOMPRESSED_BYTES
from headrace.primitives.backoff import Backoff
from headrace.tuning import TUNING, KafkaTuning

Address: TypeAlias = tuple[str, int]


class ReconnectTimes:
    """Keeps the time at which each unreachable address may be tried again.

    aiokafka has no back-off: each of a process's clients retries whenever one of its tasks needs
    the broker, hundreds of times a second in all while a broker is down, which costs a tenth of a
    core and meets the returning broker with a storm. One object is shared by all clients of a
    process, so that each failed attempt counts for all.

    Args:
        backoff: the pauses.
        random_share: returns random numbers from 0 to 1.
    """

    def __init__(self, backoff: Backoff, random_share: Callable[[], float] = random.random) -> None:
        self._backoff = backoff
        self._random_share = random_share
        self._failures: dict[Address, int] = {}
        self._until_s: dict[Address, float] = {}

    def remaining_s(self, address: Address, now_s: float) -> float:
        """Return the seconds until the address may be tried; 0 if it may be tried now."""
        return max(0.0, self._until_s.get(address, now_s) - now_s)

    def failed(self, address: Address, now_s: float) -> None:
        """Record a failure to connect. Of concurrent attempts only one counts."""
        if self.remaining_s(address, now_s):
            return
        failures = self._failures.get(address, 0)
        self._failures[address] = failures + 1
        pause_s = self._backoff.pause_s(failures, self._random_share())
        self._until_s[address] = now_s + pause_s

    def succeeded(self, address: Address) -> None:
        """Reset the back-off: the address answers."""
        self._failures.pop(address, None)
        self._until_s.pop(address, None)


class Connection:
    """The options shared by all clients of one log. Its `repr` shows no secret.

    Args:
        settings: how to reach the brokers.
        decompressed_bytes: the limit on the decompressed records of one batch.
        tuning: times and sizes of all clients.

    Raises:
        ConfigurationError: a file that the settings name cannot be read or used.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        decompressed_bytes: int = DEFAULT_DECOMPRESSED_BYTES,
        tuning: KafkaTuning = TUNING.kafka,
    ) -> None:
        self.settings = settings
        self.decompressed_bytes = decompressed_bytes
        self.tuning = tuning
        self._security = _security_options(settings)
        self._reconnect = ReconnectTimes(tuning.reconnect)

    def __repr__(self) -> str:
        return f"Connection({self.settings.security_protocol}, {self.settings.bootstrap_servers!r})"

    @property
    def request_timeout_s(self) -> float:
        """The time limit of one response."""
        return self.settings.request_timeout_ms / 1000

    @property
    def codec(self) -> int:
        """The number of the compression in a batch's attributes, as in Kafka's format."""
        return ("none", "gzip", "snappy", "lz4", "zstd").index(self.settings.compression)

    def client_options(self, request_timeout_ms: int | None = None) -> dict[str, Any]:
        """Return the arguments that aiokafka's client, consumer and producer have in common."""
        return {
            **self._security,
            "client_id": self.settings.client_id,
            "bootstrap_servers": self.settings.bootstrap_servers,
            "request_timeout_ms": request_timeout_ms or self.settings.request_timeout_ms,
            "retry_backoff_ms": int(self.tuning.request_retry_s * 1000),
            "metadata_max_age_ms": int(self.tuning.metadata_max_age_s * 1000),
            "connections_max_idle_ms": self._max_idle_ms,
        }

    async def open_client(self) -> AIOKafkaClient:
        """Return a connected client for requests to brokers.

        Raises:
            LogUnavailable: no broker answers.
            LogAuthenticationFailed: a broker refuses us, or we its certificate.
        """
        client = AIOKafkaClient(**self.client_options())
        self.take_over_connecting(client)
        try:
            async with answered("connect", self.request_timeout_s):
                await client.bootstrap()
        except BaseException:
            await self.close_client(client)
            raise
        return client

    async def close_client(self, client: AIOKafkaClient) -> None:
        """Close a client's sockets within a few seconds."""
        await close_client(client, self.tuning.close_timeout_s)

    @property
    def _max_idle_ms(self) -> int:
        return int(self.tuning.connection_max_idle_s * 1000)

    def take_over_connecting(self, client: AIOKafkaClient) -> None:
        """Make a client find and connect to brokers by the methods of this object.

        aiokafka's own bootstrap logs why a server could not be used and drops the reason, although
        "wrong password" and "no broker" need different remedies; and it leaves the connection to
        close by itself, which with TLS can take longer than the loop lives. Later it queries only
        the brokers that it knows, even if all have moved to other addresses.

        Also make a connection that broke a moment ago fail the request instead of aiokafka's
        background tasks, and apply the reconnect back-off to brokers that could not be reached.
        """
        replace_connecting(
            client,
            bootstrap=partial(self._bootstrap, client),
            get_connection=partial(self._get_connection, client),
            find_metadata=self._find_metadata,
        )

    async def _bootstrap(self, client: AIOKafkaClient) -> None:
        reasons: list[str] = []
        for host, port in sorted(self._servers(), key=self._remaining_s):
            await asyncio.sleep(self._remaining_s((host, port)))
            try:
                answer = await self._request_metadata(host, port)
            except LogUnavailable as error:
                reasons.append(str(error))
            else:
                client.cluster.update_metadata(answer)
                start_metadata_refresh(client)
                return
        raise LogUnavailable("; ".join(reasons))

    async def _get_connection(
        self,
        client: AIOKafkaClient,
        node_id: int,
        *,
        group: int = ConnectionGroup.DEFAULT,
        **_options: Any,
    ) -> AIOKafkaConnection | None:
        """Return the connection to a node; None if there can be none now."""
        connection = open_connection(client, (node_id, group))
        if connection is not None:
            return connection
        broker = client.cluster.broker_metadata(node_id)
        if broker is None or self._remaining_s((broker.host, broker.port)):
            # As after a failure: the request may be another node's by now.
            client.force_metadata_update()
            return None
        return await self._connect(client, (broker.host, broker.port), (node_id, group))

    async def _connect(
        self, client: AIOKafkaClient, address: Address, key: tuple[int, int]
    ) -> AIOKafkaConnection | None:
        """Open a connection and register it as aiokafka's client does; return None on failure."""
        async with connecting_lock(client):
            connection = open_connection(client, key)
            if connection is not None:
                return connection
            if self._remaining_s(address):  # another task has tried meanwhile
                return None
            connection = new_connection(
                client,
                address,
                client_id=self.settings.client_id,
                max_idle_ms=self._max_idle_ms,
                **self._security,
            )
            try:
                # Not the client's timeout: a consumer's is that of a JoinGroup, and all requests of
                # the client wait for the lock. A starting broker may accept the connection and not
                # answer.
                async with asyncio.timeout(self.request_timeout_s):
                    await connection.connect()
            except (OSError, KafkaError) as error:
                log_connecting_failed(key[0], error)
                self._record_attempt(address, reached=False)
                client.force_metadata_update()
                return None
            self._record_attempt(address, reached=True)
            add_connection(client, key, connection)
            return connection

    def _servers(self) -> list[Address]:
        return [(host, port) for host, port, _ in collect_hosts(self.settings.bootstrap_servers)]

    def _remaining_s(self, address: Address) -> float:
        return self._reconnect.remaining_s(address, time.monotonic())

    def _record_attempt(self, address: Address, reached: bool) -> None:
        if reached:
            self._reconnect.succeeded(address)
        else:
            self._reconnect.failed(address, time.monotonic())

    async def _find_metadata(self, cluster: ClusterMetadata, topics: Collection[str]) -> bool:
        """Request metadata from the bootstrap servers, since no known broker answers."""
        for host, port in self._servers():
            if self._remaining_s((host, port)):
                continue
            try:
                answer = await self._request_metadata(host, port, list(topics) or None)
            except HeadraceError:
                continue  # `refusal` finds the reason once the silence has lasted
            cluster.update_metadata(answer)
            return True
        return False

    async def refusal(self) -> HeadraceError | None:
        """Connect once more and return the error if a broker refuses us or the settings are wrong;
        None if brokers are merely unreachable, or answer again.
        """
        for host, port in self._servers():
            try:
                await self._request_metadata(host, port)
            except LogUnavailable:
                continue
            except HeadraceError as error:
                return error
            return None
        return None

    async def _request_metadata(
        self, host: str, port: int, topics: Sequence[str] | None = ()
    ) -> Any:
        """Return the metadata from one server over a connection of its own; None for `topics` is
        all.
        """
        timeout_s = min(self.request_timeout_s, self.tuning.bootstrap_timeout_s)
        connection = DirectConnection(
            host,
            port,
            client_id=self.settings.client_id,
            request_timeout_ms=int(timeout_s * 1000),
            **self._security,
        )
        try:
            await connection.connect()
            answer = await connection.send(
                MetadataRequest(None if topics is None else list(topics))
            )
            self._record_attempt((host, port), reached=True)
        except (OSError, KafkaError, ValueError) as error:
            self._record_attempt((host, port), reached=False)
            raise self._connection_error(f"{host}:{port}", error) from error
        finally:
            await close_connection(connection, self.tuning.close_timeout_s)
        if not answer.brokers:
            raise self._no_brokers_error(f"{host}:{port}")
        return answer

    def _no_brokers_error(self, where: str) -> HeadraceError:
        """Return the error for a server whose answer names no broker, not even itself."""
        by_token = self.settings.sasl_mechanism == "OAUTHBEARER"
        if by_token and self.settings.security_protocol.startswith("SASL"):
            # A broker refuses a bearer token in a challenge (RFC 7628, 3.2.3) that aiokafka does
            # not read: the refusal then arrives instead of the first response.
            return self._connection_error(where, kafka_errors.SaslAuthenticationFailed())
        return LogUnavailable(f"{where}: it is starting, and knows of no broker yet")

    def _connection_error(self, where: str, error: Exception) -> HeadraceError:
        """Return an error of the right kind, with one line on why a connection failed."""
        tls = _find_tls_error(error)
        if tls is not None:
            return LogAuthenticationFailed(f"{where}: {_explain_tls(tls)}")
        if isinstance(error, kafka_errors.SaslAuthenticationFailed):
            return LogAuthenticationFailed(f"{where}: {self._credentials()} refused")
        if isinstance(
            error,
            kafka_errors.UnsupportedSaslMechanismError | kafka_errors.IllegalSaslStateError,
        ):
            return LogAuthenticationFailed(
                f"{where}: this listener takes no SASL mechanism "
                f"{self.settings.sasl_mechanism} (kafka.sasl_mechanism)"
            )
        if isinstance(error, OSError) and error.filename:
            return ConfigurationError(f"kafka.oauth_token_file: {error.filename}: {error.strerror}")
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        hung_up = isinstance(error, ConnectionResetError | kafka_errors.KafkaConnectionError)
        return LogUnavailable(f"{where}: {reason}{self._protocol_hint() if hung_up else ''}")

    def _protocol_hint(self) -> str:
        """Return a hint on what to check when a listener disconnects without a message."""
        protocol = self.settings.security_protocol
        return f"; is this a listener for {protocol} (kafka.security_protocol)?"

    def _credentials(self) -> str:
        if self.settings.sasl_mechanism == "OAUTHBEARER":
            return f"the token in {self.settings.oauth_token_file}"
        return (
            f"user {self.settings.sasl_username!r} or its password ({self.settings.sasl_mechanism})"
        )


# --- TLS and SASL ------------------------------------------------------------------------------


class TokenFile(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka publishes no types
    """A bearer token that another program keeps fresh in a file; read for every connection."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def token(self) -> str:
        """Return the token. Raises `OSError`, which aiokafka takes for a failed connection."""
        return (await asyncio.to_thread(self._path.read_text, encoding="utf-8")).strip()


def _security_options(settings: KafkaSettings) -> dict[str, Any]:
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
