"""The client on a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from headrace.client import Client, ClientClosed, InferenceError, InferenceTimeout
from headrace.config import Settings, make_settings
from headrace.log.port import Log
from headrace.runtime.log_factory import open_log
from headrace.runtime.topic_plan import plan_topics
from headrace.tools.local_kafka import LocalKafka
from tests.support.responder import Responder


@pytest.fixture
def settings(kafka: LocalKafka, unique_name: str) -> Settings:
    """The shared broker, in a namespace of this test's own."""
    return make_settings(
        {
            "namespace": unique_name,
            "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
            "topics": {"partitions": 3},
        }
    )


@pytest.fixture
async def log(settings: Settings) -> AsyncIterator[Log]:
    """A log with Headrace's topics."""
    async with open_log(settings) as log:
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        yield log


async def test_calls_side_by_side_get_their_own_answers(log: Log, settings: Settings) -> None:
    """The first call of a new client is answered like every later one."""
    async with (
        Responder(log, settings).running(),
        Client(settings.kafka.bootstrap_servers if settings.kafka else "", settings=settings) as it,
        asyncio.TaskGroup() as tasks,
    ):
        calls = [
            tasks.create_task(it.infer("m", {"x": np.array([number])}), name=f"call {number}")
            for number in range(200)
        ]
    assert [call.result().outputs["x"].item() for call in calls] == list(range(200))


async def test_timed_out_call_leaves_others_running(log: Log, settings: Settings) -> None:
    """One of two calls in one batch times out before it is acknowledged; the other is answered."""
    assert settings.kafka is not None
    lingering = settings.kafka.model_copy(update={"linger_ms": 200})
    slow = settings.model_copy(update={"kafka": lingering})

    async with (
        Responder(log, settings).running(),
        Client(settings=slow) as client,
        asyncio.TaskGroup() as tasks,
    ):

        async def hopeless() -> None:
            with pytest.raises(InferenceTimeout):
                await client.infer("m", {"x": np.array([0])}, timeout_s=0.05, key=b"same")

        tasks.create_task(hopeless(), name="hopeless")
        patient = tasks.create_task(
            client.infer("m", {"x": np.array([1])}, key=b"same"), name="patient"
        )
    assert patient.result().outputs["x"].item() == 1


async def test_oversized_requests_are_refused(log: Log, settings: Settings) -> None:
    """A record that the topic does not take is an error with its code."""
    async with Client(settings=settings) as client:
        with pytest.raises(InferenceError) as caught:
            await client.infer("m", {"x": np.zeros(9 * 1024 * 1024, np.uint8)})
    assert caught.value.code == "TOO_LARGE"


async def test_header_name_that_no_record_can_have_is_refused(log: Log, settings: Settings) -> None:
    """A lone surrogate that stands for no byte: it was a `RecursionError`."""
    async with Client(settings=settings) as client:
        with pytest.raises(InferenceError) as caught:
            await client.infer("m", {"x": np.zeros(1)}, headers=[("\ud800", b"")])
    assert caught.value.code == "INVALID_REQUEST"


async def test_call_of_closed_client_says_so_while_broker_is_silent() -> None:
    """Its request is not acknowledged, which is not why the call ends."""
    async with LocalKafka() as kafka:
        settings = make_settings({"kafka": {"bootstrap_servers": kafka.bootstrap_servers}})
        async with open_log(settings) as log:
            await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        async with Client(settings=settings) as client:
            kafka.pause_node(1)
            call = asyncio.create_task(client.infer("m", {"x": np.zeros(1)}), name="call")
            await asyncio.sleep(0)
        with pytest.raises(ClientClosed):
            await call
        kafka.resume_node(1)
