"""Connect to the brokers: addresses, TLS, SASL, and explanations of failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, Final

import aiokafka.errors as kafka_errors
from aiokafka import client as aiokafka_client
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection, collect_hosts
from aiokafka.errors import KafkaError
from aiokafka.protocol.metadata import MetadataRequest

from headrace.config import KafkaSettings
from headrace.errors import ConfigurationError, HeadraceError
from headrace.log.errors import LogAuthenticationFailed, LogUnavailable
from headrace.log.kafka.closing import close_client, hang_up
from headrace.log.kafka.errors import answered
from headrace.log.kafka.frame_protocol import DirectConnection
from headrace.log.kafka.reconnect import Address, ReconnectBackoff
from headrace.log.kafka.record_batches import DEFAULT_DECOMPRESSED_BYTES
from headrace.log.kafka.security import security_options, tls_error, tls_reason

RETRY_BACKOFF_S: Final = 0.1
METADATA_MAX_AGE_MS: Final = 60_000
"""How long a new partition or topic can stay unnoticed."""
CONNECTIONS_MAX_IDLE_MS: Final = 9 * 60 * 1000
"""Below the broker's own limit (`connections.max.idle.ms`, 10 minutes)."""
_FIRST_ANSWER_S: Final = 5.0


class Connection:
    """The options shared by all clients of one log. Its `repr` shows no secret.

    Args:
        settings: how to reach the brokers.
        decompressed_bytes: the limit on the decompressed records of one batch.

    Raises:
        ConfigurationError: a file that the settings name cannot be read or used.
    """

    def __init__(
        self, settings: KafkaSettings, decompressed_bytes: int = DEFAULT_DECOMPRESSED_BYTES
    ) -> None:
        self.settings = settings
        self.decompressed_bytes = decompressed_bytes
        self._security = security_options(settings)
        self._backoff = ReconnectBackoff()

    def __repr__(self) -> str:
        return f"Connection({self.settings.security_protocol}, {self.settings.bootstrap_servers!r})"

    @property
    def request_timeout_s(self) -> float:
        """How long to wait for one response."""
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
            "retry_backoff_ms": int(RETRY_BACKOFF_S * 1000),
            "metadata_max_age_ms": METADATA_MAX_AGE_MS,
            "connections_max_idle_ms": CONNECTIONS_MAX_IDLE_MS,
        }

    async def open_client(self) -> AIOKafkaClient:
        """Return a connected client for requests to brokers.

        Raises:
            LogUnavailable: no broker answers.
            LogAuthenticationFailed: a broker refuses us, or we its certificate.
        """
        client = AIOKafkaClient(**self.client_options())
        self.take_over_bootstrap(client)
        try:
            async with answered("connect", self.request_timeout_s):
                await client.bootstrap()
        except BaseException:
            await close_client(client)
            raise
        return client

    def take_over_bootstrap(self, client: AIOKafkaClient) -> None:
        """Replace the client's bootstrap, at first and later, with `_bootstrap`.

        aiokafka's own logs why a server could not be used and drops the reason, although "wrong
        password" and "no broker" need different remedies; and it leaves the connection to close by
        itself, which with TLS can take longer than the loop lives. Later it queries only the
        brokers that it knows, even if all have moved to other addresses.

        Also make a connection that broke a moment ago fail the request instead of aiokafka's
        background tasks, and apply the reconnect back-off to brokers that could not be reached.
        """
        client.send = partial(_sent, client.send)
        client._get_conn = partial(self._get_conn, client)
        client.bootstrap = partial(self._bootstrap, client)
        client._metadata_update = partial(self._metadata_update, client._metadata_update)

    async def _bootstrap(self, client: AIOKafkaClient) -> None:
        reasons: list[str] = []
        for host, port in sorted(self._servers(), key=self._rest_s):
            await asyncio.sleep(self._rest_s((host, port)))
            try:
                answer = await self._first_answer(host, port)
            except LogUnavailable as error:
                reasons.append(str(error))
            else:
                client.cluster.update_metadata(answer)
                if client._sync_task is None:
                    client._sync_task = asyncio.create_task(
                        client._md_synchronizer(), name="kafka-metadata"
                    )
                return
        raise LogUnavailable("; ".join(reasons))

    async def _get_conn(
        self,
        client: AIOKafkaClient,
        node_id: int,
        *,
        group: int = ConnectionGroup.DEFAULT,
        **_options: Any,
    ) -> AIOKafkaConnection | None:
        """Return the connection to a node; None if there can be none now."""
        made = client._conns.get((node_id, group))
        if made is not None and made.connected():
            return made
        broker = client.cluster.broker_metadata(node_id)
        if broker is None or self._rest_s((broker.host, broker.port)):
            # As after a failure: the request may be another node's by now.
            client.force_metadata_update()
            return None
        return await self._connected(client, (broker.host, broker.port), (node_id, group))

    async def _connected(
        self, client: AIOKafkaClient, address: Address, key: tuple[int, int]
    ) -> AIOKafkaConnection | None:
        """Open a connection and register it as aiokafka's client does; return None on failure."""
        async with client._get_conn_lock:
            made = client._conns.get(key)
            if made is not None and made.connected():
                return made
            if self._rest_s(address):  # another task has tried meanwhile
                return None
            connection = DirectConnection(
                *address,
                client_id=self.settings.client_id,
                request_timeout_ms=client._request_timeout_ms,
                on_close=client._on_connection_closed,
                max_idle_ms=CONNECTIONS_MAX_IDLE_MS,
                **self._security,
            )
            try:
                # Not the client's timeout: a consumer's is that of a JoinGroup, and all requests of
                # the client wait for the lock. A starting broker may accept the connection and not
                # answer.
                async with asyncio.timeout(self.request_timeout_s):
                    await connection.connect()
            except (OSError, KafkaError) as error:
                # Log as aiokafka's own client does, which this replaces.
                aiokafka_client.log.error("Unable connect to node with id %s: %s", key[0], error)
                self._tried(address, reached=False)
                client.force_metadata_update()
                return None
            self._tried(address, reached=True)
            client._conns[key] = connection
            return connection

    def _servers(self) -> list[Address]:
        return [(host, port) for host, port, _ in collect_hosts(self.settings.bootstrap_servers)]

    def _rest_s(self, address: Address) -> float:
        return self._backoff.left_s(address, time.monotonic())

    def _tried(self, address: Address, reached: bool) -> None:
        if reached:
            self._backoff.reached(address)
        else:
            self._backoff.failed(address, time.monotonic())

    async def _metadata_update(
        self,
        ask_known_brokers: Callable[[ClusterMetadata, Collection[str]], Awaitable[bool]],
        cluster: ClusterMetadata,
        topics: Collection[str],
    ) -> bool:
        """Request metadata from the known brokers, or the bootstrap servers if none answers."""
        if await ask_known_brokers(cluster, topics):
            return True
        for host, port in self._servers():
            if self._rest_s((host, port)):
                continue
            try:
                answer = await self._first_answer(host, port, list(topics) or None)
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
                await self._first_answer(host, port)
            except LogUnavailable:
                continue
            except HeadraceError as error:
                return error
            return None
        return None

    async def _first_answer(self, host: str, port: int, topics: Sequence[str] | None = ()) -> Any:
        """Return the metadata from one server over a connection of its own; None for `topics` is
        all.
        """
        timeout_s = min(self.request_timeout_s, _FIRST_ANSWER_S)
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
            self._tried((host, port), reached=True)
        except (OSError, KafkaError, ValueError) as error:
            self._tried((host, port), reached=False)
            raise self._explained(f"{host}:{port}", error) from error
        finally:
            await hang_up(connection)
        if not answer.brokers:
            raise self._brokerless(f"{host}:{port}")
        return answer

    def _brokerless(self, where: str) -> HeadraceError:
        """Return the error for a server whose answer names no broker, not even itself."""
        by_token = self.settings.sasl_mechanism == "OAUTHBEARER"
        if by_token and self.settings.security_protocol.startswith("SASL"):
            # A broker refuses a bearer token in a challenge (RFC 7628, 3.2.3) that aiokafka does
            # not read: the refusal then arrives instead of the first response.
            return self._explained(where, kafka_errors.SaslAuthenticationFailed())
        return LogUnavailable(f"{where}: it is starting, and knows of no broker yet")

    def _explained(self, where: str, error: Exception) -> HeadraceError:
        """Return an error of the right kind, with one line on why a connection failed."""
        tls = tls_error(error)
        if tls is not None:
            return LogAuthenticationFailed(f"{where}: {tls_reason(tls)}")
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
        return LogUnavailable(f"{where}: {reason}{self._hint() if hung_up else ''}")

    def _hint(self) -> str:
        """Return a hint on what to check when a listener disconnects without a message."""
        protocol = self.settings.security_protocol
        return f"; is this a listener for {protocol} (kafka.security_protocol)?"

    def _credentials(self) -> str:
        if self.settings.sasl_mechanism == "OAUTHBEARER":
            return f"the token in {self.settings.oauth_token_file}"
        return (
            f"user {self.settings.sasl_username!r} or its password ({self.settings.sasl_mechanism})"
        )


async def _sent(
    send: Callable[..., Awaitable[Any]], node_id: int, request: Any, **options: Any
) -> Any:
    """Call aiokafka's `send`, and raise its own error if the transport is closed already.

    asyncio's transport ignores writes after it was closed, and the request fails with its
    connection. uvloop's raises RuntimeError, which aiokafka does not expect and which would end its
    background tasks.
    """
    try:
        return await send(node_id, request, **options)
    except RuntimeError as error:
        if "handler is closed" not in str(error):
            raise
        raise kafka_errors.KafkaConnectionError(f"node {node_id}: {error}") from error
