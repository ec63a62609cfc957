"""A version is unloaded before its successor is loaded, under load, and nobody is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from headrace.client import Client
from headrace.config import Settings, make_settings
from headrace.models.version import State
from headrace.models.wanted import fold, load, roll_back, set_label
from headrace.runtime.process import Pipeline
from headrace.topics import STAGES, Stage
from tests.flow.test_controlled_models import Operator
from tests.support.conditions import eventually
from tests.support.pipelines import PARTITIONS, Grouping, log_for
from tests.support.pipelines import serving as serving_groups
from tests.support.python_models import BEGUN, GATE, shut_gate
from tests.support.sized_models import MIB, MODEL_BYTES, add_model, settings_with_budget, states

FIRST = 'swap = "unload_first"'
ROOM_FOR_ONE = MODEL_BYTES + 70 * MIB
FUSED: Grouping = [STAGES]
APART: Grouping = [(Stage.INGEST,), (Stage.BATCHER,), (Stage.EXECUTOR,), (Stage.RESPONDER,)]
AT_ONCE = 4
FAILS = "raise ValueError('does not load')"
AT_THE_GATE = "from tests.support.python_models import BEGUN, GATE; BEGUN.set(); GATE.wait()"


@asynccontextmanager
async def serving(
    repository: Path, grouping: Grouping = FUSED
) -> AsyncIterator[tuple[Sequence[Pipeline], Client]]:
    """Processes with memory for one version, and a client."""
    settings = settings_with_budget(repository, memory_bytes=ROOM_FOR_ONE)
    log = await log_for(settings)
    async with (
        serving_groups(settings, log, grouping) as pipelines,
        Client(log=log, settings=settings) as client,
    ):
        yield pipelines, client


async def factor_of_answer(client: Client, name: str = "a") -> float:
    """By what the version that answers a request multiplies."""
    response = await client.infer(name, {"x": np.array([[1]], np.float32)}, timeout_s=60)
    return float(response.outputs["y"][0, 0])


class Callers:
    """Callers that send requests one after the other; each failure ends the test."""

    def __init__(self, client: Client, names: Sequence[str] = ("a",)) -> None:
        self._client = client
        self._names = names
        self._stopping = False
        self.factors: list[float] = []

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        """Call until the end of the context."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(AT_ONCE):
                tasks.create_task(self._call(self._names[number % len(self._names)]))
            yield
            self._stopping = True

    async def _call(self, name: str) -> None:
        while not self._stopping:
            self.factors.append(await factor_of_answer(self._client, name))

    async def answered_more(self, factor: float) -> None:
        """Wait until some more requests were answered by the version with this factor."""
        before = self.factors.count(factor)
        await eventually(lambda: self.factors.count(factor) > before + 5 * AT_ONCE)


def waiting_requests(pipeline: Pipeline) -> int:
    """Requests that wait in its batcher."""
    queue = pipeline.state.queue()
    return 0 if queue is None else queue.requests


def count(pipeline: Pipeline, metric: str, reason: str) -> float:
    """Loads or unloads of the model's versions for a reason."""
    value = pipeline.metrics.registry.get_sample_value
    labels = ({"model": "a", "version": each, "reason": reason} for each in "123")
    return sum(value(f"headrace_model_{metric}_total", each) or 0 for each in labels)


async def test_version_without_room_beside_old_one_replaces_it_under_load(tmp_path: Path) -> None:
    """With the default it would be refused. Callers see one version, then the other."""
    add_model(tmp_path, "a", FIRST, factor=2)
    async with serving(tmp_path) as ((pipeline,), client):
        callers = Callers(client)
        async with callers.calling():
            await callers.answered_more(2)
            add_model(tmp_path, "a", FIRST, version=2, factor=3)
            await pipeline.models.reload()
            await callers.answered_more(3)
        assert states(pipeline) == {"a/2": (State.READY, "")}
        assert count(pipeline, "unloads", "swap") == 1
    assert set(callers.factors) == {2, 3}
    assert callers.factors[-AT_ONCE:] == [3] * AT_ONCE


async def test_old_version_answers_again_when_new_one_cannot_be_loaded(tmp_path: Path) -> None:
    """Requests that waited for the new version get the old one's answers; the reason is shown."""
    add_model(tmp_path, "a", FIRST)
    async with serving(tmp_path) as ((pipeline,), client):
        callers = Callers(client)
        async with callers.calling():
            await callers.answered_more(2)
            add_model(tmp_path, "a", FIRST, version=2, factor=3, load=FAILS)
            await pipeline.models.reload()
            await eventually(lambda: count(pipeline, "loads", "restored") == 1)
            await callers.answered_more(2)
        found = states(pipeline)
        assert found["a/1"] == (State.READY, "")
        assert found["a/2"][0] == State.FAILED
        assert "does not load" in found["a/2"][1]
        assert pipeline.models.catalog.lookup("a").version == "1"
    assert set(callers.factors) == {2}


async def test_request_for_version_that_is_replaced_before_it_loads_is_answered(
    tmp_path: Path,
) -> None:
    """It waits for version 2, which waits for a run of version 1; then version 3 is to be loaded
    instead.
    """
    GATE.set()
    add_model(tmp_path, "a", FIRST, run=AT_THE_GATE)
    async with serving(tmp_path) as ((pipeline,), client), asyncio.TaskGroup() as tasks:
        with shut_gate():
            busy = tasks.create_task(factor_of_answer(client))
            await eventually(BEGUN.is_set)
            add_model(tmp_path, "a", FIRST, version=2, factor=3)
            await pipeline.models.reload()
            waiting = tasks.create_task(factor_of_answer(client))
            await eventually(lambda: waiting_requests(pipeline) == 1)
            add_model(tmp_path, "a", FIRST, version=3, factor=5)
            await pipeline.models.reload()
            GATE.set()
            assert [await busy, await waiting] == [2, 5]


@pytest.mark.parametrize("fails", [False, True], ids=["loads", "fails"])
async def test_changed_version_is_swapped_under_its_number(tmp_path: Path, *, fails: bool) -> None:
    """The old one leaves its queue to the new one, although it is never empty."""
    add_model(tmp_path, "a", FIRST)
    async with serving(tmp_path) as ((pipeline,), client):
        callers = Callers(client)
        async with callers.calling():
            await callers.answered_more(2)
            old = pipeline.models.catalog.lookup("a")
            config = tmp_path / "a" / "model.toml"
            if fails:  # four instances do not fit, even if the old one's memory is freed late
                config.write_text(f"{config.read_text()}\ninstances = 4")
            else:
                code = tmp_path / "a" / "1" / "model.py"
                code.write_text(code.read_text().replace("* 2", "* 3"))
            await pipeline.models.reload()
            if fails:
                await eventually(lambda: count(pipeline, "loads", "restored") == 1)
            await callers.answered_more(2 if fails else 3)
        assert (pipeline.models.catalog.lookup("a") is old) is fails
        assert old.config.instances == 1
    assert set(callers.factors) == ({2} if fails else {2, 3})


async def test_executor_apart_swaps_under_load(tmp_path: Path) -> None:
    """Requests that other processes still bind to the old version get answers of the new one."""
    add_model(tmp_path, "a", FIRST)
    async with serving(tmp_path, APART) as (pipelines, client):
        callers = Callers(client)
        async with callers.calling():
            await callers.answered_more(2)
            add_model(tmp_path, "a", FIRST, version=2, factor=3)
            ingest, batcher, executor, _ = pipelines
            for pipeline in (executor, batcher, ingest):
                await pipeline.models.reload()
                await callers.answered_more(3)
        assert states(executor) == {"a/2": (State.READY, "")}
    assert set(callers.factors) == {2, 3}


async def test_executor_apart_loads_old_version_again(tmp_path: Path) -> None:
    """The other processes need not know that there was a change."""
    add_model(tmp_path, "a", FIRST)
    async with serving(tmp_path, APART) as (pipelines, client):
        callers = Callers(client)
        async with callers.calling():
            await callers.answered_more(2)
            add_model(tmp_path, "a", FIRST, version=2, factor=3, load=FAILS)
            executor = pipelines[2]
            await executor.models.reload()
            await eventually(lambda: count(executor, "loads", "restored") == 1)
            await callers.answered_more(2)
    assert set(callers.factors) == {2}


def controlled(repository: Path) -> Settings:
    """Settings of a deployment that follows the control topic."""
    return make_settings(
        {
            "kafka": {"bootstrap_servers": "127.0.0.1:1"},  # for its settings alone
            "topics": {"partitions": PARTITIONS},
            "models": {
                "repository": repository,
                "mode": "explicit",
                "keep_replaced_s": 0.5,
                "trial_load": False,
            },
        }
    )


@pytest.mark.parametrize("fails", [False, True], ids=["loads", "fails"])
async def test_stages_apart_swap_under_load_by_one_change_of_control_topic(
    tmp_path: Path, *, fails: bool
) -> None:
    """Requests for the default and for a label wait, and none is refused. After a version that
    cannot be loaded the old one answers again, also when the change is rolled back.
    """
    add_model(tmp_path, "a", FIRST)
    add_model(tmp_path, "a", FIRST, version=2, factor=3, load=FAILS if fails else "pass")
    settings = controlled(tmp_path)
    log = await log_for(settings)
    async with (
        serving_groups(settings, log, APART) as pipelines,
        Client(log=log, settings=settings) as client,
    ):
        executor = pipelines[2]
        operator = Operator(settings, log, pipelines)
        await operator.change(load("a", "1"))
        await operator.change(set_label("a", "stable", "1"))
        earlier = fold(await operator.topic.read()).models
        callers = Callers(client, ("a", "a@stable"))
        async with callers.calling():
            await callers.answered_more(2)
            await operator.change(load("a", "2", instead_of="1"), wait=not fails)
            if fails:
                await eventually(lambda: count(executor, "loads", "restored") == 1)
                await eventually(lambda: "does not load" in str(operator.unready()))
                await callers.answered_more(2)
                await operator.change(roll_back(earlier))
                await callers.answered_more(2)
            else:
                await callers.answered_more(3)
        assert count(executor, "unloads", "swap") == 1
        assert states(executor) == {"a/1" if fails else "a/2": (State.READY, "")}
    assert set(callers.factors) == ({2} if fails else {2, 3})
