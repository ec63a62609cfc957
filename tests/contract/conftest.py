"""The logs that the contract runs on, and a topic for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from msgspec.structs import replace

from headrace.config import KafkaSettings
from headrace.log.memory import MemoryLog
from headrace.log.port import Log, TopicInfo, TopicPartition
from tests.support.conditions import eventually
from tests.support.logs import PATIENT

MakeTopic = Callable[..., Awaitable[list[TopicPartition]]]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ask for the broker where a test runs on it, so that it is fetched before any test starts."""
    callspec = getattr(item, "callspec", None)
    if callspec is not None and callspec.params.get("adapter") == "kafka":
        assert isinstance(item, pytest.Function)
        item.fixturenames = ["kafka", *item.fixturenames]  # the old list is the other tests', too


@pytest.fixture(params=["memory", "kafka"])
def adapter(request: pytest.FixtureRequest) -> Log:
    """The embedded log, and a real Kafka; neither is opened yet."""
    if request.param == "memory":
        return MemoryLog()
    from headrace.log.kafka.log import KafkaLog

    broker = request.getfixturevalue("kafka")
    # Heartbeats, by which members learn of a rebalance, come several times in a session timeout.
    return KafkaLog(
        KafkaSettings(bootstrap_servers=broker.bootstrap_servers, session_timeout_ms=3000),
        tuning=replace(PATIENT, fetch_end_wait_s=0.1),
    )


@pytest.fixture
async def log(adapter: Log) -> AsyncIterator[Log]:
    """The adapter, open."""
    async with adapter:
        yield adapter


@pytest.fixture
def make_topic(log: Log, unique_name: str) -> MakeTopic:
    """Creates this test's topic and gives its partitions."""

    async def make(partitions: int = 1, **config: str) -> list[TopicPartition]:
        settings = {name.replace("_", "."): value for name, value in config.items()}
        info = TopicInfo(unique_name, partitions, settings)
        assert await log.create_topics([info], replication_factor=1) == {unique_name: True}

        async def is_known() -> bool:
            return (await log.describe_topics([unique_name]))[unique_name] is not None

        await eventually(is_known, what=f"topic {unique_name} is described")
        return [TopicPartition(unique_name, number) for number in range(partitions)]

    return make
