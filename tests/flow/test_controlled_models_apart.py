"""Models change on the control topic under load while each stage is a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.client import Client
from headrace.config import Settings
from headrace.control.topic import ControlTopic
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicPartition
from headrace.models.version import State
from headrace.models.wanted import (
    Author,
    fold,
    load,
    remove_label,
    roll_back,
    set_default,
    set_label,
    unload,
)
from headrace.runtime.process import Pipeline
from headrace.runtime.shutdown import Stop
from headrace.topics import Stage, Topic
from headrace.tuning import TUNING
from tests.flow.test_controlled_models import Operator, controlled, version_of_answer
from tests.support.conditions import eventually
from tests.support.pipelines import Grouping, log_for, serving
from tests.support.python_models import GATE, STEPS, add_whole_model, shut_gate

APART: Grouping = [(Stage.INGEST,), (Stage.BATCHER,), (Stage.EXECUTOR,), (Stage.RESPONDER,)]
ROUNDS = 3
RECORD_AND_MARKER = 2
"""Offsets of one change: its record, and the end of its transaction."""


@asynccontextmanager
async def deployment(
    settings: Settings, log: MemoryLog
) -> AsyncIterator[tuple[Operator, Client, list[Pipeline]]]:
    """Four processes, an operator and a client of them."""
    async with (
        serving(settings, log, APART) as pipelines,
        Client(log=log, settings=settings) as client,
    ):
        yield Operator(settings, log, pipelines), client, pipelines


@pytest.mark.timeout(120)
async def test_no_request_for_a_name_fails_during_changes(tmp_path: Path) -> None:
    """Load, label, default, rollback and unload, several times, under continuous load."""
    settings = controlled(tmp_path)
    log = await log_for(settings)
    stopping = asyncio.Event()
    allowed = {"1"}
    answered = 0

    async def call(client: Client) -> None:
        nonlocal answered
        while not stopping.is_set():
            before = set(allowed)
            assert await version_of_answer(client, "digits") in before | allowed
            answered += 1

    async with deployment(settings, log) as (operator, client, _):
        await operator.change(load("digits", "1"))
        earlier = fold(await operator.topic.read()).models
        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(call(client))
            for _ in range(ROUNDS):
                await operator.change(load("digits", "2"))
                await operator.change(set_label("digits", "canary", "2"))
                assert await version_of_answer(client, "digits@canary") == "2"
                allowed.add("2")
                await operator.change(set_default("digits", "2"))
                allowed.discard("1")
                assert await version_of_answer(client, "digits") == "2"
                await operator.change(remove_label("digits", "canary"))
                await operator.change(unload("digits", "1"))
                allowed.add("1")
                await operator.change(roll_back(earlier))
                allowed.discard("2")
                assert await version_of_answer(client, "digits") == "1"
            stopping.set()
    assert answered > ROUNDS


async def test_name_does_not_move_before_executor_has_version(tmp_path: Path) -> None:
    """A version that the executor cannot load is refused everywhere, with the reason."""
    settings = controlled(tmp_path)
    (tmp_path / "digits" / "9").mkdir()
    (tmp_path / "digits" / "9" / "model.onnx").write_bytes(b"garbage")
    log = await log_for(settings)
    async with deployment(settings, log) as (operator, client, _):
        await operator.change(load("digits", "1"))
        await operator.change(load("digits", "9"), wait=False)
        await operator.change(set_default("digits", "9"), wait=False)
        await eventually(operator.unready, what="what ingest waits for")
        assert await version_of_answer(client, "digits") == "1"


async def test_default_moves_when_min_ready_executors_have_version(tmp_path: Path) -> None:
    """With `min_ready = 2`, one executor has the new version, and the old one answers."""
    settings = controlled(tmp_path)
    both = settings.models.model_copy(update={"min_ready": 2})
    settings = settings.model_copy(update={"models": both})
    log = await log_for(settings)
    async with (
        serving(settings, log, APART) as pipelines,
        Client(log=log, settings=settings) as client,
    ):
        operator = Operator(settings, log, pipelines)
        async with serving(settings, log, [(Stage.EXECUTOR,)]):
            await operator.change(load("digits", "1"))
        await operator.change(load("digits", "2"), wait=False)
        await operator.change(set_default("digits", "2"), wait=False)
        executor = pipelines[2].models.catalog
        await eventually(
            lambda: (
                executor.lookup("digits").version == "2"
                and operator.unready() == ["digits/2: announced by 1 of 2 executors: loading"]
            ),
            what="one executor has the version, and ingest waits for another one",
        )
        answers = [await version_of_answer(client, "digits") for _ in range(5)]
        assert set(answers) == {"1"}
        async with serving(settings, log, [(Stage.EXECUTOR,)]):
            await eventually(operator.followed, what="both executors have the version")
            assert await version_of_answer(client, "digits") == "2"


async def test_ingest_that_starts_during_failed_change_gives_names_their_former_meaning(
    tmp_path: Path,
) -> None:
    """It takes over from one that had seen the version that served before, and learns of that from
    the changes, or where these are lost, from the last snapshot.
    """
    settings = controlled(tmp_path)
    (tmp_path / "digits" / "9").mkdir()
    (tmp_path / "digits" / "9" / "model.onnx").write_bytes(b"garbage")
    log = await log_for(settings)
    async with (
        serving(settings, log, APART[1:]) as rest,
        Client(log=log, settings=settings) as client,
    ):
        async with serving(settings, log, APART[:1]) as front:
            operator = Operator(settings, log, [*front, *rest])
            operator.topic = ControlTopic(log, settings, replace(TUNING.control, snapshot_every=6))
            await operator.change(load("digits", "1"))
            await operator.change(load("digits", "2"))
            await operator.change(set_label("digits", "canary", "2"))
            await operator.change(load("digits", "9"), wait=False)
            await operator.change(set_default("digits", "9"), wait=False)
            await operator.change(set_label("digits", "canary", "9"), wait=False)
            assert await version_of_answer(client, "digits") == "1"
        control = TopicPartition(settings.topic(Topic.CONTROL), 0)
        for first in (0, log.faults.partitions.end_offset(control) - RECORD_AND_MARKER):
            log.faults.partitions.trim(control, first)
            async with serving(settings, log, APART[:1]):
                assert await version_of_answer(client, "digits") == "1"
                assert await version_of_answer(client, "digits@canary") == "2"


async def test_ingest_that_starts_before_executors_reads_when_they_are_ready(
    tmp_path: Path,
) -> None:
    """Requests wait in the log, and none is refused."""
    settings = controlled(tmp_path)
    log = await log_for(settings)
    topic = ControlTopic(log, settings)
    await topic.write(load("digits", "1"), 0, Author("test"), 0)
    stop = Stop()
    async with Client(log=log, settings=settings) as client, asyncio.TaskGroup() as tasks:
        front = Pipeline(settings, log, (Stage.INGEST,))
        running = tasks.create_task(front.run(stop))
        asking = tasks.create_task(version_of_answer(client, "digits"))
        await eventually(
            lambda: "announced by 0 of 1 executors" in front.health.reason,
            what="ingest says what it waits for",
        )
        async with serving(settings, log, APART[1:]):
            assert await asking == "1"
            stop.request()
            await running


async def test_requests_wait_for_executor_that_is_started_again(tmp_path: Path) -> None:
    """It ends without a drain while the default moves, and the next one serves what is wanted."""
    settings = controlled(tmp_path)
    log = await log_for(settings)
    async with (
        serving(settings, log, [(Stage.INGEST,), (Stage.BATCHER,), (Stage.RESPONDER,)]) as others,
        Client(log=log, settings=settings) as client,
    ):
        doomed = asyncio.create_task(Pipeline(settings, log, (Stage.EXECUTOR,)).run(Stop()))
        operator = Operator(settings, log, others)
        await operator.change(load("digits", "1"))
        await operator.change(load("digits", "2"), wait=False)
        await operator.change(set_default("digits", "2"), wait=False)
        doomed.cancel()
        await asyncio.wait([doomed])
        asking = [asyncio.create_task(version_of_answer(client, "digits")) for _ in range(20)]
        async with serving(settings, log, [(Stage.EXECUTOR,)]):
            assert set(await asyncio.gather(*asking)) <= {"1", "2"}
            await eventually(operator.followed, what="all have followed")
            assert await version_of_answer(client, "digits") == "2"


GATED = """
from tests.support.python_models import GATE


class Model:
    inputs = [("x", "FP32", (-1, 1))]
    outputs = [("y", "FP32", (-1, 1))]

    def warm_up(self):
        pass

    def run(self, inputs):
        GATE.wait()
        return {"y": inputs["x"] * 2}
"""


STEPPED = """
from tests.support.python_models import GATE, STEPS


class Model:
    inputs = [("x", "FP32", (-1, 1))]
    outputs = [("y", "FP32", (-1, 1))]

    def load(self):
        STEPS.acquire()

    def warm_up(self):
        pass

    def run(self, inputs):
        GATE.wait()
        return {"y": inputs["x"] * 2}
"""


def waiting(batcher: Pipeline) -> int:
    """Return the number of requests that wait in a batcher."""
    queue = batcher.state.queue()
    return 0 if queue is None else queue.requests


def known_executors(batcher: Pipeline) -> float | None:
    """Return the number of executors that a batcher knows."""
    return batcher.metrics.registry.get_sample_value("headrace_known_executors")


def unanswered(executor: Pipeline) -> int:
    """Return the number of batches that an executor has read and not answered."""
    records: int = executor.state.status()["sources"][0]["in_flight_records"]
    return records


async def test_version_is_kept_while_requests_for_it_wait_in_batcher(tmp_path: Path) -> None:
    """They name its number, and their runs take longer than unused versions are kept."""
    limits = "max_batch_size = 1\nmax_execution_s = 300"
    for number in (1, 2, 3):
        add_whole_model(tmp_path, "gated", GATED, limits, version=number)
    settings = controlled(tmp_path)
    log = await log_for(settings)
    ones = {"x": np.ones((1, 1), np.float32)}
    async with deployment(settings, log) as (operator, client, pipelines):
        batcher, executor = pipelines[1].models.catalog, pipelines[2].models.catalog
        for version in ("1", "2", "3"):
            await operator.change(load("gated", version))
        await operator.change(set_default("gated", "3"))
        # Otherwise the batcher would leave all of them to whichever executor comes.
        await eventually(lambda: known_executors(pipelines[1]) == 1)
        with shut_gate():
            asking = [
                asyncio.create_task(client.infer("gated", ones, version="1", timeout_s=120))
                for _ in range(12)
            ]
            await eventually(
                lambda: waiting(pipelines[1]) + unanswered(pipelines[2]) == len(asking),
                what="the executor has as many as it takes, and the others wait in the batcher",
            )
            await operator.change(unload("gated", "1"))
            await operator.change(unload("gated", "2"))
            await eventually(
                lambda: not batcher.find("gated", "2") and not executor.find("gated", "2"),
                what="the other version, unloaded later, was kept for its time",
            )
            GATE.set()
            answers = await asyncio.gather(*asking)
        assert {each.model_version for each in answers} == {"1"}
        await eventually(
            lambda: not batcher.find("gated", "1") and not executor.find("gated", "1"),
            what="it is unloaded when nothing needs it any more",
        )


async def test_batches_of_version_that_still_loads_wait_at_new_owner_of_their_partitions(
    tmp_path: Path,
) -> None:
    """One of two executors has the version, and ends without a drain while batches wait for it."""
    (tmp_path / "stepped" / "1").mkdir(parents=True)
    (tmp_path / "stepped" / "1" / "model.py").write_text(STEPPED)
    (tmp_path / "stepped" / "model.toml").write_text(
        'backend = "python"\nprobe = false\nmax_batch_size = 1\n'
    )
    settings = controlled(tmp_path)
    log = await log_for(settings)
    ones = {"x": np.ones((1, 1), np.float32)}
    with shut_gate():
        async with (
            serving(settings, log, [(Stage.INGEST,), (Stage.BATCHER,), (Stage.RESPONDER,)]) as rest,
            Client(log=log, settings=settings) as client,
        ):
            executors = [Pipeline(settings, log, (Stage.EXECUTOR,)) for _ in range(2)]
            running = [asyncio.create_task(each.run(Stop())) for each in executors]
            operator = Operator(settings, log, rest)
            await eventually(lambda: all(each.ready.is_set() for each in executors))
            await operator.change(load("stepped", "1"), wait=False)
            STEPS.release()
            await eventually(operator.followed, what="one executor has the version")
            owner = next(
                place
                for place, each in enumerate(executors)
                if each.models.catalog.versions(State.READY)
            )
            asking = [asyncio.create_task(client.infer("stepped", ones)) for _ in range(8)]
            await eventually(
                lambda: executors[owner].state.status()["sources"][0]["in_flight_records"] > 1,
                what="batches wait for the run at the gate",
            )
            running[owner].cancel()
            other = executors[1 - owner]
            await eventually(
                lambda: other.state.status()["sources"][0]["in_flight_records"] > 1,
                what="the other one has read them",
            )
            assert not any(each.done() for each in asking)
            GATE.set()
            STEPS.release()
            answers = await asyncio.gather(*asking)
            running[1 - owner].cancel()
            await asyncio.wait(running)
    assert [float(each.outputs["y"][0, 0]) for each in answers] == [2.0] * 8
