"""A real Kafka for tests: started when the first test asks for it, stopped after the last.

Tests share it, so each takes names of its own for topics and groups (`unique_name`), and none
stops it; a test that breaks brokers starts a `LocalKafka` for itself. Where no broker can be had
the tests are skipped, with the reason and the fix, except under CI, where they fail.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from headrace.tools.local_kafka import BrokerUnavailable, LocalKafka, ScramTls, install
from tests.support.acl import AUTHORIZER

FIXTURES = frozenset({"kafka", "kafka_scram_tls", "kafka_installed"})
SCRAM_USER = "tester"
SCRAM_PASSWORD = "correct4horse"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that ask for a broker, so that `-m "not broker"` leaves them out."""
    for item in items:
        if _needs_broker(item):
            item.add_marker(pytest.mark.broker)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetch Kafka before the first test, so that no test's timeout pays for the download."""
    if session.config.option.collectonly or not any(map(_needs_broker, session.items)):
        return
    try:
        install()
    except BrokerUnavailable:
        return  # `kafka_installed` meets it again, where it can skip or fail.


def _needs_broker(item: pytest.Item) -> bool:
    return not FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def kafka_installed() -> None:
    """Java and Kafka's jars are here; for tests that start clusters of their own."""
    try:
        install()
    except BrokerUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI needs a real Kafka: {error}", pytrace=False)
        pytest.skip(f"no Kafka on this machine: {error}")


@pytest.fixture(scope="session")
def kafka(kafka_installed: None) -> Iterator[LocalKafka]:
    """Start one node without TLS and logins, shared by the whole session.

    It deletes no record for its age unless a topic says so: tests write records whose timestamps
    are years old, and every five minutes a broker deletes what is older than a week. It obeys
    access rules, and allows everything on names that have none.
    """
    yield from running(LocalKafka(properties={"log.retention.ms": "-1", **AUTHORIZER}))


@pytest.fixture(scope="session")
def kafka_scram_tls(kafka_installed: None) -> Iterator[LocalKafka]:
    """One node with TLS and SASL, shared; `SCRAM_USER` logs in with `SCRAM_PASSWORD`."""
    yield from running(LocalKafka(security=ScramTls({SCRAM_USER: SCRAM_PASSWORD})))


@pytest.fixture
def unique_name(request: pytest.FixtureRequest) -> str:
    """A name for this test's topics and groups, legal in Kafka and used by no other run."""
    readable = re.sub(r"[^A-Za-z0-9.-]", "-", request.node.name)[:60]
    return f"{readable}-{secrets.token_hex(4)}"


def running(cluster: LocalKafka) -> Iterator[LocalKafka]:
    """The body of a fixture that starts a cluster and stops it."""
    _run(cluster.start())
    try:
        yield cluster
    finally:
        _run(cluster.stop())


def _run(step: Coroutine[Any, Any, None]) -> None:
    """Run on a loop that is nobody else's, and leave the current one in its place."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(step)
