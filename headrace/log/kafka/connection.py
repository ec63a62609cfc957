"""Connect to the brokers: the bootstrap servers, the brokers that they name, and back-off."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import aiokafka.errors as kafka_errors
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection, collect_hosts
from aiokafka.errors import KafkaError
from aiokafka.protocol.fetch import FetchRequest_v11
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.produce import ProduceRequest_v7

from headrace.config import KafkaSettings
from headrace.errors import HeadraceError
from headrace.log.errors import LogUnavailable
from headrace.log.kafka._aiokafka import (
    DirectConnection,
    add_connection,
    close_client,
    close_connection,
    connecting_lock,
    log_connecting_failed,
    log_fetch_failed,
    new_connection,
    open_connection,
    replace_codec,
    replace_connecting,
    reset_connection,
    start_metadata_refresh,
)
from headrace.log.kafka.errors import answered, broker_error, error_text
from headrace.log.kafka.record_batches import DEFAULT_DECOMPRESSED_BYTES
from headrace.log.kafka.record_requests import (
    FetchResponse,
    ProduceResponse,
    encode_fetch,
    encode_produce,
)
from headrace.log.kafka.security import connection_error, no_brokers_error, security_options
from headrace.primitives.backoff import Backoff
from headrace.tuning import TUNING, KafkaTuning

Address: TypeAlias = tuple[str, int]

# All clients are opened with a `Connection`.
replace_codec(FetchRequest_v11, encode_fetch, FetchResponse)
replace_codec(ProduceRequest_v7, encode_produce, ProduceResponse)


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


_EXPECTED_OF_FETCHES: Final = (
    kafka_errors.NotLeaderForPartitionError,
    kafka_errors.OffsetOutOfRangeError,
    kafka_errors.TopicAuthorizationFailedError,
    kafka_errors.UnknownTopicOrPartitionError,
)
"""aiokafka raises these, or looks for another leader. It repeats a fetch after any other error."""


class RefusedFetches:
    """Holds back fetch responses without records but with errors, of one client, and logs errors
    that aiokafka does not expect, with their partitions.

    A broker refuses a fetch at once, and aiokafka would send it again at once: hundreds of times a
    second until another broker leads, or the error has gone. The first refusal for a while is not
    held back, since it may be all that it takes to find another leader.

    Args:
        pause_s: how long a response is held back.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._last_s = -math.inf

    def pause_s(self, response: object, now_s: float) -> float:
        """Return for how long a response is held back.

        Args:
            response: to any request.
            now_s: monotonic seconds.
        """
        if not isinstance(response, FetchResponse) or not response.errors:
            return 0.0
        for topic, partition, code in response.errors:
            error = broker_error(code)
            if error is not None and not isinstance(error, _EXPECTED_OF_FETCHES):
                log_fetch_failed(topic, partition, error_text(error))
        if not response.is_refused:
            return 0.0
        is_first = now_s - self._last_s > 10 * self._pause_s
        self._last_s = now_s
        return 0.0 if is_first else self._pause_s


class Connection:
    """The options shared by all clients of one log. Its `repr` shows no secret.

    Args:
        settings: how to reach the brokers.
        decompressed_bytes: the limit on the decompressed records of one batch.
        tuning: times and sizes of all clients.
        on_request: called with the name of each request to a broker, except those that bring a
            connection about.

    Raises:
        ConfigurationError: a file that the settings name cannot be read or used.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        decompressed_bytes: int = DEFAULT_DECOMPRESSED_BYTES,
        tuning: KafkaTuning = TUNING.kafka,
        on_request: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._on_request = on_request
        self.settings = settings
        self.decompressed_bytes = decompressed_bytes
        self.tuning = tuning
        self._security = security_options(settings)
        self._reconnect = ReconnectTimes(tuning.reconnect)

    def __repr__(self) -> str:
        return f"Connection({self.settings.security_protocol}, {self.settings.bootstrap_servers!r})"

    @property
    def request_timeout_s(self) -> float:
        """The time limit of one response."""
        return self.settings.request_timeout_ms / 1000

    @property
    def _heartbeat_timeout_s(self) -> float:
        """The time limit of a heartbeat: within a session there is time for another one."""
        return min(self.request_timeout_s, self.settings.session_timeout_ms / 2000)

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
            on_request=self._on_request,
            pause_s=RefusedFetches(self.tuning.request_retry_s).pause_s,
            metadata_pause_s=self.tuning.request_retry_s,
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
                key[1],
                request_timeout_ms=self.settings.request_timeout_ms,
                heartbeat_timeout_s=self._heartbeat_timeout_s,
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
                await close_connection(connection, self.tuning.close_timeout_s)
                return None
            except asyncio.CancelledError:
                # No client has it yet, so nothing else would reset it: over TLS its socket would
                # stay open until the broker answers the closing.
                reset_connection(connection)
                raise
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
            where = f"{host}:{port}"
            raise connection_error(self.settings, where, error, timeout_s) from error
        finally:
            await close_connection(connection, self.tuning.close_timeout_s)
        if not answer.brokers:
            raise no_brokers_error(self.settings, f"{host}:{port}")
        return answer
