"""TLS and SASL: what gets in, and the one clear line for what does not."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import ssl
import struct
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from aiokafka.client import AIOKafkaClient
from aiokafka.cluster import ClusterMetadata
from pydantic import SecretStr

from headrace.config import KafkaSettings
from headrace.errors import ConfigurationError
from headrace.log.errors import LogAuthenticationFailed, LogUnavailable
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.log import KafkaLog
from headrace.log.port import TopicInfo, TopicPartition
from headrace.tools.local_kafka import LocalKafka
from tests.support.broker import SCRAM_PASSWORD, SCRAM_USER
from tests.support.conditions import DEADLINE_S
from tests.support.logs import read, values, write

WRONG_PASSWORD = "wrong4horse"
SASL_HANDSHAKE = 17
UNSUPPORTED_SASL_MECHANISM = 33
SUPPORTED = struct.pack(">hihhh", 0, 1, SASL_HANDSHAKE, 0, 1)
"""An answer to ApiVersions: no error, and versions 0 and 1 of SaslHandshake."""
REFUSAL = struct.pack(">hi", UNSUPPORTED_SASL_MECHANISM, 0)
"""An answer to SaslHandshake."""


def secure(cluster: LocalKafka, **changes: Any) -> KafkaSettings:
    """Settings that get in, with `changes` over them."""
    settings: dict[str, Any] = {
        "bootstrap_servers": cluster.bootstrap_servers,
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_username": SCRAM_USER,
        "sasl_password": SecretStr(SCRAM_PASSWORD),
        "ssl_ca_file": cluster.ca_file,
        "request_timeout_ms": 5000,
    }
    return KafkaSettings(**settings | changes)


def token(lifetime_s: int) -> str:
    """An unsigned JSON Web Token, as Kafka's validator for tests takes it."""

    def part(fields: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")

    now = int(time.time())
    claims = {"sub": SCRAM_USER, "iat": now - 60, "exp": now + lifetime_s}
    return f"{part({'alg': 'none'})}.{part(claims)}."


async def describe(settings: KafkaSettings) -> None:
    """Ask the brokers one thing."""
    async with KafkaLog(settings) as log:
        await log.describe_topics(["any"])


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_user_with_password_is_accepted(
    kafka_scram_tls: LocalKafka, unique_name: str, mechanism: str
) -> None:
    """Records travel both ways over TLS with each mechanism that takes a password."""
    partition = TopicPartition(unique_name, 0)
    async with KafkaLog(secure(kafka_scram_tls, sasl_mechanism=mechanism)) as log:
        await log.create_topics([TopicInfo(unique_name, 1, {})], replication_factor=1)
        async with log.reader([partition]) as reader, log.producer() as producer:
            await write(producer, partition, b"v")
            assert values(await read(reader, 1)) == [b"v"]


async def test_token_is_read_anew_for_each_connection(
    kafka_scram_tls: LocalKafka, tmp_path: Path
) -> None:
    """An expired token is refused; once the file holds a fresh one, the same log gets in."""
    file = tmp_path / "token"
    file.write_text(token(-30) + "\n")
    settings = secure(kafka_scram_tls, sasl_mechanism="OAUTHBEARER", oauth_token_file=file)
    async with KafkaLog(settings) as log:
        with pytest.raises(LogAuthenticationFailed, match=f"the token in {file} refused"):
            await log.describe_topics(["any"])
        file.write_text(token(3600) + "\n")
        assert await log.describe_topics(["any"]) == {"any": None}


@pytest.mark.parametrize("part", ["admin", "producer", "reader"])
async def test_wrong_password_is_reported_in_one_line(
    kafka_scram_tls: LocalKafka, part: str
) -> None:
    """Every part of the log says whose credentials were refused, and does not say the password."""
    settings = secure(kafka_scram_tls, sasl_password=SecretStr(WRONG_PASSWORD))
    with pytest.raises(LogAuthenticationFailed) as caught:  # noqa: PT012 - one of three ways in
        async with KafkaLog(settings) as log:
            if part == "admin":
                await log.describe_topics(["any"])
            elif part == "producer":
                await log.producer().__aenter__()
            else:
                await log.reader([TopicPartition("any", 0)]).__aenter__()
    message = str(caught.value)
    assert f"user '{SCRAM_USER}' or its password (SCRAM-SHA-512) refused" in message
    assert "\n" not in message
    assert WRONG_PASSWORD not in message


def test_refused_connection_to_slow_broker_is_closed_with_loop(
    kafka_scram_tls: LocalKafka,
) -> None:
    """A broker that refuses over TLS and does not answer the closing keeps no socket open."""
    refused = threading.Event()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(kafka_scram_tls.certificates.broker)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        serving = threads.submit(_answer_and_stop, server, context, refused, SUPPORTED, REFUSAL)
        settings = secure(
            kafka_scram_tls,
            bootstrap_servers=f"127.0.0.1:{server.getsockname()[1]}",
            ssl_check_hostname=False,
        )
        try:
            with (
                warnings.catch_warnings(record=True) as unclosed,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
                pytest.raises(LogAuthenticationFailed),
            ):
                runner.run(describe(settings))
        finally:
            refused.set()
        serving.result(DEADLINE_S)
    assert [str(each.message) for each in unclosed] == []


def test_reader_of_silent_broker_is_closed_with_loop(
    kafka_scram_tls: LocalKafka, unique_name: str
) -> None:
    """A broker that does not answer the closing over TLS keeps no socket of a consumer open."""

    async def read_until_silent() -> None:
        partition = TopicPartition(unique_name, 0)
        async with KafkaLog(secure(kafka_scram_tls)) as log:
            await log.create_topics([TopicInfo(unique_name, 1, {})], replication_factor=1)
            async with log.reader([partition]) as reader, log.producer() as producer:
                await write(producer, partition, b"v")
                await read(reader, 1)
                kafka_scram_tls.pause_node()

    with (
        warnings.catch_warnings(record=True) as unclosed,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        try:
            runner.run(read_until_silent())
        finally:
            kafka_scram_tls.resume_node()
    assert [str(each.message) for each in unclosed] == []


def test_connection_cancelled_while_it_authenticates_is_closed_with_loop(
    kafka_scram_tls: LocalKafka,
) -> None:
    """As at a stop. A broker that does not answer the closing over TLS keeps no socket open."""
    stopped, asked = threading.Event(), threading.Event()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(kafka_scram_tls.certificates.broker)

    async def stop_while_authenticating(port: int) -> None:
        settings = secure(kafka_scram_tls, ssl_check_hostname=False)
        connection = Connection(settings)
        client = AIOKafkaClient(**connection.client_options())
        connection.take_over_connecting(client)
        client.cluster = ClusterMetadata()
        client.cluster.update_metadata(
            SimpleNamespace(
                API_VERSION=1, brokers=[(1, "127.0.0.1", port, None)], controller_id=1, topics=[]
            )
        )
        connecting = asyncio.create_task(client.ready(1))
        await asyncio.to_thread(asked.wait, DEADLINE_S)
        connecting.cancel()
        await asyncio.wait([connecting])
        await connection.close_client(client)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        serving = threads.submit(_answer_and_stop, server, context, stopped, SUPPORTED, asked=asked)
        try:
            with (
                warnings.catch_warnings(record=True) as unclosed,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                runner.run(stop_while_authenticating(server.getsockname()[1]))
        finally:
            stopped.set()
        serving.result(DEADLINE_S)
    assert [str(each.message) for each in unclosed] == []


def _answer_and_stop(
    server: socket.socket,
    context: ssl.SSLContext,
    until: threading.Event,
    *bodies: bytes,
    asked: threading.Event | None = None,
) -> None:
    """Answer the requests of one client with these, and read nothing more of it until the event;
    but one more request if `asked` has to be set then.
    """
    accepted, _ = server.accept()
    with context.wrap_socket(accepted, server_side=True) as connection:
        for body in bodies:
            (size,) = struct.unpack(">i", connection.recv(4))
            _key, _version, correlation_id = struct.unpack_from(">hhi", connection.recv(size))
            connection.sendall(struct.pack(">ii", 4 + len(body), correlation_id) + body)
        if asked is not None:
            connection.recv(4)
            asked.set()
        until.wait(DEADLINE_S)


async def test_untrusted_certificate_is_reported_in_one_line(kafka_scram_tls: LocalKafka) -> None:
    """Without the authority's file the broker's certificate is not trusted, and that is said."""
    with pytest.raises(LogAuthenticationFailed, match=r"is not trusted: .*ssl_ca_file"):
        await describe(secure(kafka_scram_tls, ssl_ca_file=None))


async def test_certificate_for_other_host_is_reported_in_one_line(
    kafka_scram_tls: LocalKafka,
) -> None:
    """The right authority does not make up for the wrong name, unless that is allowed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(kafka_scram_tls.certificates.broker)

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.2", 0, ssl=context)
    async with server:
        address = f"127.0.0.2:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(LogAuthenticationFailed, match=r"mismatch.*127\.0\.0\.2"):
            await describe(secure(kafka_scram_tls, bootstrap_servers=address))
        with pytest.raises(LogUnavailable):
            await describe(
                secure(kafka_scram_tls, bootstrap_servers=address, ssl_check_hostname=False)
            )


async def test_tls_on_plain_listener_is_reported_in_one_line(kafka_scram_tls: LocalKafka) -> None:
    """The line names the setting that is wrong."""
    address = kafka_scram_tls.plaintext_bootstrap_servers
    with pytest.raises(LogUnavailable, match=r"a listener for SASL_SSL \(kafka.security_protocol"):
        await describe(secure(kafka_scram_tls, bootstrap_servers=address))


async def test_plain_client_on_tls_listener_is_unavailable(kafka_scram_tls: LocalKafka) -> None:
    """It shows as a connection that breaks; the line says what to look at."""
    address = kafka_scram_tls.bootstrap_servers
    with pytest.raises(LogUnavailable, match=rf"{address}: .*for PLAINTEXT .*security_protocol"):
        await describe(KafkaSettings(bootstrap_servers=address, request_timeout_ms=5000))


@pytest.mark.parametrize("setting", ["ssl_ca_file", "ssl_cert_file", "oauth_token_file"])
async def test_missing_certificate_file_is_named(
    kafka_scram_tls: LocalKafka, tmp_path: Path, setting: str
) -> None:
    """Entering the log tells which setting names a file that cannot be read."""
    missing = tmp_path / "missing"
    settings = (
        secure(kafka_scram_tls, **{setting: missing}, sasl_mechanism="OAUTHBEARER")
        if (setting == "oauth_token_file")
        else secure(kafka_scram_tls, **{setting: missing})
    )
    with pytest.raises(ConfigurationError, match=f"kafka.{setting}: {missing}: No such file"):
        await KafkaLog(settings).__aenter__()


async def test_certificate_file_without_certificates_is_named(
    kafka_scram_tls: LocalKafka, tmp_path: Path
) -> None:
    """A readable file with something else in it is told apart from a missing one."""
    file = tmp_path / "ca.pem"
    file.write_text("not a certificate")
    with pytest.raises(ConfigurationError, match=f"kafka.ssl_ca_file: {file}: expected cert"):
        await KafkaLog(secure(kafka_scram_tls, ssl_ca_file=file)).__aenter__()


async def test_log_representation_shows_no_secret(kafka_scram_tls: LocalKafka) -> None:
    """Neither the log nor its parts print the password."""
    settings = secure(kafka_scram_tls)
    async with KafkaLog(settings) as log, log.producer() as producer:
        parts = [log, Connection(settings), producer, log.reader([])]
        text = " ".join(f"{part!r} {part!s}" for part in parts)
    assert SCRAM_PASSWORD not in text
