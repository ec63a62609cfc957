"""A client on an embedded log, and a scripted responder behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace.client import Client
from headrace.config import Settings, make_settings
from headrace.log.memory import MemoryLog
from headrace.runtime.topic_plan import plan_topics
from tests.support.responder import Responder


@pytest.fixture
def settings() -> Settings:
    """Defaults, with three partitions."""
    return make_settings({"topics": {"partitions": 3}})


@pytest.fixture
async def log(settings: Settings) -> MemoryLog:
    """An embedded log with Headrace's topics."""
    log = MemoryLog(request_timeout_s=0.05)
    await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
    return log


@pytest.fixture
async def responder(log: MemoryLog, settings: Settings) -> AsyncIterator[Responder]:
    """Answers requests while the test runs; an echo until the test says otherwise."""
    responder = Responder(log, settings)
    async with responder.running():
        yield responder


@pytest.fixture
async def client(log: MemoryLog, settings: Settings) -> AsyncIterator[Client]:
    """A client whose answers come on partition 1."""
    async with Client(log=log, settings=settings, reply_partition=1) as client:
        yield client
