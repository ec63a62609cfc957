"""A model that cannot keep up holds its share of the byte budget, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.client import Client, InferenceError
from headrace.config import Settings, make_settings
from headrace.errors import Code
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicPartition
from headrace.runtime.process import Pipeline
from headrace.topics import STAGES, Stage, Topic
from tests.support.conditions import eventually
from tests.support.pipelines import Grouping, log_for, name_of, serving
from tests.support.python_models import add_python_model, shut_gate

MIB = 1024 * 1024
BLOCKS_AT = 13
"""A value at which the endless model waits; its trial runs have others."""
LARGE = {"x": np.full((1, MIB // 16), BLOCKS_AT, np.float32)}  # 256 KiB
SMALL = {"x": np.ones((1, 1), np.float32)}
FLOOD = 64
"""Number of large requests: together four times as large as the budget."""

PARTITIONS = 2
FUSED: Grouping = [STAGES]
APART: Grouping = [[Stage.INGEST], [Stage.BATCHER, Stage.EXECUTOR], [Stage.RESPONDER]]


def settings_of(repository: Path, **more: Any) -> Settings:
    """A budget of 4 MiB, a model that takes its time, and one that does not."""
    add_model(repository, "slow", "time.sleep(0.05)")
    add_model(repository, "quick", "")
    return make_settings(
        {
            "topics": {"partitions": PARTITIONS},
            "models": {"repository": str(repository)},
            "limits": {"max_in_flight_bytes": 4 * MIB},
            **more,
        }
    )


def add_model(repository: Path, name: str, run: str) -> None:
    """Add a model whose rows may have any width."""
    add_python_model(repository, run, name=name, config="probe = false\nmax_batch_size = 1\n")
    path = repository / name / "1" / "model.py"
    path.write_text(path.read_text().replace("(-1, 1)", "(-1, -1)"))


@asynccontextmanager
async def asking(settings: Settings, grouping: Grouping) -> AsyncIterator[Client]:
    """A client of services that are ready."""
    async with (
        await log_for(settings) as log,
        serving(settings, log, grouping),
        Client(log=log, settings=settings, max_in_flight=1000) as client,
    ):
        yield client


def flood_of(client: Client, tasks: asyncio.TaskGroup, model: str) -> list[asyncio.Task[Any]]:
    """Large requests, all at once."""
    return [tasks.create_task(client.infer(model, LARGE, timeout_s=60)) for _ in range(FLOOD)]


def done(flood: list[asyncio.Task[Any]]) -> int:
    """How many are answered."""
    return sum(task.done() for task in flood)


@pytest.mark.parametrize("grouping", [FUSED, APART], ids=name_of)
async def test_saturated_model_lets_others_on_its_partitions_through(
    tmp_path: Path, grouping: Grouping
) -> None:
    """Requests of another model, sent behind its flood, are answered before most of the flood."""
    async with asking(settings_of(tmp_path), grouping) as client, asyncio.TaskGroup() as tasks:
        flood = flood_of(client, tasks, "slow")
        await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)

        await asyncio.gather(*(client.infer("quick", SMALL) for _ in range(8)))

        assert done(flood) < FLOOD / 2
        await asyncio.gather(*flood)


async def test_late_request_above_share_is_refused_at_once(tmp_path: Path) -> None:
    """The flood takes twelve seconds. What has five is refused while most of the flood waits."""
    settings = settings_of(tmp_path)
    add_model(tmp_path, "slower", "time.sleep(0.2)")
    async with asking(settings, FUSED) as client, asyncio.TaskGroup() as tasks:
        flood = flood_of(client, tasks, "slower")
        await eventually(lambda: done(flood) >= 4)

        headers = [("x-timeout-ms", b"5000")]
        with pytest.raises(InferenceError) as refused:
            await client.infer("slower", LARGE, timeout_s=60, headers=headers)

        assert refused.value.code == Code.OVERLOADED
        assert done(flood) < FLOOD / 2
        for task in flood:
            task.cancel()


async def test_deferred_request_is_answered_when_its_deadline_passes(tmp_path: Path) -> None:
    """Nothing is known of the pace of a model whose first run goes on, so nothing is predicted."""
    settings = settings_of(tmp_path)
    add_model(
        tmp_path,
        "endless",
        f"from tests.support.python_models import GATE\nif {BLOCKS_AT} in x: GATE.wait()",
    )
    async with (
        await log_for(settings) as log,
        serving(settings, log, FUSED) as (process,),
        Client(log=log, settings=settings, max_in_flight=1000) as client,
        asyncio.TaskGroup() as tasks,
    ):
        with shut_gate():
            flood = flood_of(client, tasks, "endless")
            await eventually(lambda: deferred_records(process))

            headers = [("x-timeout-ms", b"500")]
            with pytest.raises(InferenceError) as expired:
                await client.infer("endless", LARGE, timeout_s=60, headers=headers)

            assert expired.value.code == Code.DEADLINE_EXCEEDED
            assert not done(flood)
            for task in flood:
                task.cancel()


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
async def test_deferred_requests_survive_change_of_owner(tmp_path: Path, guarantee: str) -> None:
    """The next process answers each request that a stopped process left in the log, once."""
    settings = settings_of(tmp_path, delivery={"guarantee": guarantee})
    async with (
        await log_for(settings) as log,
        Client(log=log, settings=settings, max_in_flight=1000) as client,
        asyncio.TaskGroup() as tasks,
    ):
        async with serving(settings, log, FUSED) as (first,):
            flood = flood_of(client, tasks, "slow")
            await eventually(lambda: deferred_records(first))
        assert done(flood) < FLOOD
        async with serving(settings, log, FUSED):
            await asyncio.gather(*flood)
        assert await count_answers(settings, log) == FLOOD
        assert await committed(settings, log) == FLOOD


def deferred_records(pipeline: Pipeline) -> int:
    """How many requests a process has left in the log for now."""
    sources = [asked() for asked in pipeline.state.sources]
    return sum(each.deferred_records for one in sources for each in one.partitions)


async def committed(settings: Settings, log: MemoryLog) -> int:
    """How many requests are committed, not counting those above an unanswered one."""
    found = await log.committed(settings.namespace, partitions_of(settings, Topic.REQUESTS))
    return sum(each.offset for each in found.values() if each is not None)


async def count_answers(settings: Settings, log: MemoryLog) -> int:
    """How many answers a reader sees."""
    partitions, count = partitions_of(settings, Topic.RESPONSES), 0
    async with log.reader(partitions) as reader:
        for each in partitions:
            reader.seek(each, 0)
        while found := await reader.poll(0, 1000):
            count += sum(map(len, found.values()))
    return count


def partitions_of(settings: Settings, topic: Topic) -> list[TopicPartition]:
    """Return all partitions of a topic."""
    return [TopicPartition(settings.topic(topic), number) for number in range(PARTITIONS)]
