"""Idle models make room for others, and are loaded again when a request comes."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.client import Client, InferenceError, InferenceTimeout
from headrace.errors import Code
from headrace.models.repository import compute_checksum
from headrace.models.version import State
from headrace.runtime.process import Pipeline
from headrace.topics import STAGES, Stage
from headrace.tuning import TUNING, Tuning
from tests.support.conditions import eventually
from tests.support.pipelines import Grouping, log_for
from tests.support.pipelines import serving as serving_groups
from tests.support.python_models import BEGUN, GATE, shut_gate
from tests.support.sized_models import (
    LIMIT_BYTES,
    MODEL_BYTES,
    add_model,
    answers,
    held_bytes,
    settings_with_budget,
    states,
)

WAIT = 'unload_idle = "wait"'
REFUSE = 'unload_idle = "refuse"'
AT_THE_GATE = "from tests.support.python_models import BEGUN, GATE; BEGUN.set(); GATE.wait()"
WITH_POSTPROCESS = """
max_execution_s = 3600
[transform.record]
[transform.record.inputs]
x = [{ path = "number" }]
[answer.python]
"""
AT_THE_GATE_BEHIND = """
from tests.support.python_models import BEGUN, GATE

def postprocess(outputs, request):
    BEGUN.set()
    GATE.wait()
    return {"y": outputs["y"]}
"""
FUSED: Grouping = [STAGES]
EXECUTOR_APART: Grouping = [(Stage.INGEST, Stage.BATCHER), (Stage.EXECUTOR,), (Stage.RESPONDER,)]
NAMES = ("a", "b", "c")
PATIENT = replace(TUNING, executor=replace(TUNING.executor, memory_wait_s=3600.0))
IMPATIENT = replace(TUNING, executor=replace(TUNING.executor, memory_wait_s=0.5))


@pytest.fixture(autouse=True)
def open_gate() -> None:
    """Models that wait at the gate are warmed up before it is shut."""
    GATE.set()


@asynccontextmanager
async def serving(
    repository: Path, grouping: Grouping = FUSED, tuning: Tuning = TUNING
) -> AsyncIterator[tuple[Pipeline, Client]]:
    """The process that runs the models, and a client."""
    settings = settings_with_budget(repository)
    log = await log_for(settings)
    async with (
        serving_groups(settings, log, grouping, tuning) as pipelines,
        Client(log=log, settings=settings) as client,
    ):
        place = next(place for place, stages in enumerate(grouping) if Stage.EXECUTOR in stages)
        yield pipelines[place], client


def unloaded(pipeline: Pipeline) -> list[str]:
    """Names of the models that are not in memory."""
    found = states(pipeline).items()
    return [key.partition("/")[0] for key, (state, _) in found if state == State.UNLOADED]


def count(pipeline: Pipeline, metric: str, reason: str) -> float:
    """Loads or unloads of all models for a reason."""
    value = pipeline.metrics.registry.get_sample_value
    labels = ({"model": name, "version": "1", "reason": reason} for name in NAMES)
    return sum(value(f"headrace_model_{metric}_total", each) or 0 for each in labels)


async def outcome(client: Client, name: str, timeout_s: float = 60) -> InferenceError:
    """How a request fails."""
    with pytest.raises(InferenceError) as caught:
        await answers(client, name, timeout_s)
    return caught.value


@pytest.mark.parametrize("grouping", [FUSED, EXECUTOR_APART], ids=["fused", "executor-apart"])
async def test_unloaded_model_is_loaded_again_and_its_requests_wait(
    tmp_path: Path, grouping: Grouping
) -> None:
    """Three models share memory for two; each answers, and the least recently used one goes."""
    for name in NAMES:
        add_model(tmp_path, name, WAIT)
    async with serving(tmp_path, grouping) as (pipeline, client):
        assert len(unloaded(pipeline)) == 1
        for name in (*NAMES, *NAMES):
            assert await answers(client, name)
            assert MODEL_BYTES <= held_bytes(pipeline) <= LIMIT_BYTES
        assert unloaded(pipeline) == ["a"]
        assert not pipeline.models.wanted.unready()
        loads, unloads = count(pipeline, "loads", "requested"), count(pipeline, "unloads", "memory")
    assert 4 <= loads <= 6
    assert unloads == loads + 1  # the first one went when the third was loaded at the start


async def test_requests_at_once_to_more_models_than_fit_are_all_answered(tmp_path: Path) -> None:
    """A model that has requests is not idle, so it goes only after it has answered them."""
    for name in NAMES:
        add_model(tmp_path, name, WAIT)
    async with serving(tmp_path) as (pipeline, client):
        found = await asyncio.gather(*[answers(client, name) for name in NAMES * 30])
        assert held_bytes(pipeline) <= LIMIT_BYTES
    assert found == [True] * 90


async def test_model_that_lets_no_request_wait_refuses_with_retry_time(tmp_path: Path) -> None:
    """The refused request has it loaded again, so that a later one is answered."""
    for name in NAMES:
        add_model(tmp_path, name, REFUSE)
    async with serving(tmp_path) as (pipeline, client):
        (name,) = unloaded(pipeline)
        refused = await outcome(client, name)
        await eventually(lambda: name not in unloaded(pipeline))
        assert await answers(client, name)
    assert refused.code == Code.MODEL_NOT_READY
    assert "unloaded while idle" in refused.message
    assert refused.retry_after_ms is not None
    assert refused.retry_after_ms >= 1000


async def test_refused_requests_of_executor_apart_have_retry_time(tmp_path: Path) -> None:
    """There it is the executor that knows."""
    for name in NAMES:
        add_model(tmp_path, name, REFUSE)
    async with serving(tmp_path, EXECUTOR_APART) as (pipeline, client):
        (name,) = unloaded(pipeline)
        refused = await outcome(client, name)
        await eventually(lambda: name not in unloaded(pipeline))
        assert await answers(client, name)
    assert refused.code == Code.MODEL_NOT_READY
    assert refused.retry_after_ms


async def test_model_that_may_not_be_unloaded_stays(tmp_path: Path) -> None:
    """A version that does not fit is refused then, as without any setting."""
    add_model(tmp_path, "a")
    add_model(tmp_path, "b")
    async with serving(tmp_path) as (pipeline, client):
        add_model(tmp_path, "c", WAIT)
        await pipeline.models.reload()
        await eventually(lambda: states(pipeline)["c/1"][0] == State.FAILED)
        assert "models.memory_bytes: the version needs" in states(pipeline)["c/1"][1]
        assert await answers(client, "a")
        assert not unloaded(pipeline)


def is_running(pipeline: Pipeline, *names: str) -> bool:
    """Whether each of these models is in a run."""
    running = {
        each["name"].split()[1].partition("-")[0]
        for each in pipeline.state.status()["activities"]
        if each["name"].startswith("executor ") and each["for_s"] is not None
    }
    return running >= {*names}


async def test_requests_are_refused_with_figures_while_all_others_are_busy(tmp_path: Path) -> None:
    """Nothing that runs is unloaded. The request is not lost, and a later one is answered."""
    add_model(tmp_path, "a", WAIT)
    add_model(tmp_path, "b", WAIT, run=AT_THE_GATE)
    add_model(tmp_path, "c", WAIT, run=AT_THE_GATE)
    async with serving(tmp_path, tuning=IMPATIENT) as (pipeline, client):
        assert unloaded(pipeline) == ["a"]
        with shut_gate():
            async with asyncio.TaskGroup() as tasks:
                busy = [tasks.create_task(answers(client, name)) for name in ("b", "c")]
                await eventually(lambda: is_running(pipeline, "b", "c"))
                refused = await outcome(client, "a")
                assert unloaded(pipeline) == ["a"]
                GATE.set()
        assert [task.result() for task in busy] == [True, True]
        assert await answers(client, "a")
    assert refused.code == Code.MODEL_NOT_READY
    assert "models.memory_bytes: the version needs" in refused.message
    assert refused.retry_after_ms


async def test_other_model_is_loaded_while_one_waits_for_memory(tmp_path: Path) -> None:
    """It fits beside those that are busy, and does not wait for them."""
    add_model(tmp_path, "a", WAIT)
    add_model(tmp_path, "b", WAIT, run=AT_THE_GATE)
    add_model(tmp_path, "c", WAIT, run=AT_THE_GATE)
    async with serving(tmp_path, tuning=PATIENT) as (pipeline, client):
        assert unloaded(pipeline) == ["a"]
        with shut_gate():
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(answers(client, name)) for name in ("b", "c")]
                await eventually(lambda: is_running(pipeline, "b", "c"))
                asked.append(tasks.create_task(answers(client, "a")))
                value = pipeline.metrics.registry.get_sample_value
                labels = {"topic": "headrace.requests"}
                await eventually(lambda: value("headrace_in_flight_records", labels) == 3)
                add_model(tmp_path, "small", taken=MODEL_BYTES // 100)
                await pipeline.models.reload()
                await eventually(lambda: states(pipeline)["small/1"][0] == State.READY)
                assert await answers(client, "small")
                assert unloaded(pipeline) == ["a"]
                GATE.set()
        assert [task.result() for task in asked] == [True, True, True]


async def test_deadline_holds_while_request_waits_for_its_model(tmp_path: Path) -> None:
    """It is answered when it expires, not when the model is there."""
    add_model(tmp_path, "a", WAIT)
    add_model(tmp_path, "b", WAIT, run=AT_THE_GATE)
    add_model(tmp_path, "c", WAIT, run=AT_THE_GATE)
    async with serving(tmp_path) as (pipeline, client):
        assert unloaded(pipeline) == ["a"]
        with shut_gate():
            async with asyncio.TaskGroup() as tasks:
                busy = [tasks.create_task(answers(client, name)) for name in ("b", "c")]
                await eventually(lambda: is_running(pipeline, "b", "c"))
                with pytest.raises((InferenceError, InferenceTimeout)):
                    await answers(client, "a", timeout_s=1.0)
                value = pipeline.metrics.registry.get_sample_value
                labels = {"stage": "batcher"}
                await eventually(lambda: value("headrace_expired_requests_total", labels) == 1)
                GATE.set()
        assert [task.result() for task in busy] == [True, True]


async def test_model_whose_answers_are_being_made_is_not_idle(tmp_path: Path) -> None:
    """Its run has ended, but code behind it may take as long as a run: another model goes."""
    add_model(tmp_path, "a", WAIT)
    add_model(tmp_path, "b", WAIT + WITH_POSTPROCESS)
    (tmp_path / "b" / "postprocess.py").write_text(AT_THE_GATE_BEHIND)
    add_model(tmp_path, "c", WAIT)
    async with serving(tmp_path) as (pipeline, client):
        assert unloaded(pipeline) == ["a"]
        with shut_gate():
            async with asyncio.TaskGroup() as tasks:
                payload = client.infer_raw("b", b'{"number": 21}', "application/json")
                busy = tasks.create_task(payload)
                await eventually(BEGUN.is_set)
                assert await answers(client, "a")
                assert unloaded(pipeline) == ["c"]
                GATE.set()
        assert busy.result().outputs["y"] == 42


async def test_model_is_not_idle_in_its_first_run(tmp_path: Path) -> None:
    """The request for which it was loaded waited, so that the instance takes it without a wait."""
    not_warmed_up = f'if inputs["x"][0, 0] == 21: {AT_THE_GATE}'
    add_model(tmp_path, "a", WAIT, run=not_warmed_up)
    add_model(tmp_path, "b", WAIT)
    add_model(tmp_path, "c")
    async with serving(tmp_path, tuning=IMPATIENT) as (pipeline, client):
        assert unloaded(pipeline) == ["a"]
        with shut_gate():
            async with asyncio.TaskGroup() as tasks:
                busy = tasks.create_task(answers(client, "a"))
                await eventually(BEGUN.is_set)
                refused = await outcome(client, "b")
                assert unloaded(pipeline) == ["b"]
                GATE.set()
        assert busy.result()
    assert refused.code == Code.MODEL_NOT_READY


async def test_model_that_cannot_be_loaded_again_refuses_those_that_wait(tmp_path: Path) -> None:
    """They get the reason, as does every operator; the other models serve on."""
    loads = "import os; assert os.path.exists({there!r}), 'its file is gone'"
    there = tmp_path / "there"
    there.touch()
    for name in NAMES:
        add_model(tmp_path / "models", name, WAIT, load=loads.format(there=str(there)))
    async with serving(tmp_path / "models") as (pipeline, client):
        (name,) = unloaded(pipeline)
        there.unlink()
        results: Sequence[InferenceError] = await asyncio.gather(
            *[outcome(client, name) for _ in range(10)]
        )
        assert states(pipeline)[f"{name}/1"][0] == State.FAILED
        assert "its file is gone" in states(pipeline)[f"{name}/1"][1]
        (kept,) = {each for each in NAMES if states(pipeline)[f"{each}/1"][0] == State.READY}
        assert await answers(client, kept)
    assert {each.code for each in results} == {Code.MODEL_NOT_READY}
    assert all("its file is gone" in each.message for each in results)


async def test_model_whose_files_cannot_be_listed_fails_alone(tmp_path: Path) -> None:
    """Where the file system of a model is in trouble, the other models serve on."""
    for name in NAMES:
        add_model(tmp_path, name, WAIT)
    async with serving(tmp_path) as (pipeline, client):
        (name,) = unloaded(pipeline)
        make_unlistable(tmp_path / name / "1")
        refused = await outcome(client, name)
        assert states(pipeline)[f"{name}/1"][0] == State.FAILED
        for kept in {*NAMES} - {name}:
            assert await answers(client, kept)
    assert refused.code == Code.MODEL_NOT_READY
    assert "File name too long" in refused.message


async def test_model_whose_files_were_changed_meanwhile_is_checked_again(tmp_path: Path) -> None:
    """Its checksum was right when it was loaded for the first time."""
    for name in NAMES:
        add_model(tmp_path, name, WAIT)
        with (tmp_path / name / "model.toml").open("a") as config:
            config.write(f'checksum = "{compute_checksum(tmp_path / name / "1")}"\n')
    async with serving(tmp_path) as (pipeline, client):
        (name,) = unloaded(pipeline)
        with (tmp_path / name / "1" / "model.py").open("a") as file:
            file.write("# changed")
        refused = await outcome(client, name)
        assert states(pipeline)[f"{name}/1"][0] == State.FAILED
        for kept in {*NAMES} - {name}:
            assert await answers(client, kept)
    assert refused.code == Code.MODEL_NOT_READY
    assert "checksum: expected sha256:" in refused.message


async def test_model_whose_files_were_changed_is_checked_after_a_load_without_memory(
    tmp_path: Path,
) -> None:
    """The load that found no memory has checked nothing."""
    add_model(tmp_path, "a", WAIT)
    add_model(tmp_path, "b", WAIT, run=AT_THE_GATE)
    add_model(tmp_path, "c", WAIT, run=AT_THE_GATE)
    async with serving(tmp_path, tuning=IMPATIENT) as (pipeline, client):
        assert unloaded(pipeline) == ["a"]
        golden = tmp_path / "a" / "1" / "golden"
        golden.mkdir()
        one = np.ones((1, 1), np.float32)
        arrays: dict[str, Any] = {"inputs.x": one, "outputs.y": one * 3}
        np.savez(golden / "one.npz", **arrays)
        with shut_gate():
            async with asyncio.TaskGroup() as tasks:
                busy = [tasks.create_task(answers(client, name)) for name in ("b", "c")]
                await eventually(lambda: is_running(pipeline, "b", "c"))
                short = await outcome(client, "a")
                GATE.set()
        assert [task.result() for task in busy] == [True, True]
        refused = await outcome(client, "a")
    assert "models.memory_bytes" in short.message
    assert "golden/one.npz: y: expected a difference" in refused.message


async def test_model_with_other_inputs_than_before_is_not_loaded_again(tmp_path: Path) -> None:
    """Requests that wait were checked against the former ones."""
    for name in NAMES:
        add_model(tmp_path, name, WAIT)
    async with serving(tmp_path) as (pipeline, client):
        (name,) = unloaded(pipeline)
        file = tmp_path / name / "1" / "model.py"
        file.write_text(file.read_text().replace('"x", "FP32", (-1, 1)', '"x", "FP32", (-1, 2)'))
        refused = await outcome(client, name)
        assert states(pipeline)[f"{name}/1"][0] == State.FAILED
    assert refused.code == Code.MODEL_NOT_READY
    assert "expected the inputs and outputs that it had" in refused.message


def make_unlistable(directory: Path) -> None:
    """Add directories below each other whose path is too long for the system."""
    place = os.open(directory, os.O_RDONLY)
    for _ in range(25):
        os.mkdir("d" * 200, dir_fd=place)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)


async def test_removed_model_answers_requests_that_had_it_loaded_again(tmp_path: Path) -> None:
    """A removal unloads it only after them."""
    for name in NAMES:
        add_model(tmp_path, name, WAIT, load=AT_THE_GATE)
    async with serving(tmp_path) as (pipeline, client):
        (name,) = unloaded(pipeline)
        with shut_gate():
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(answers(client, name))
                await eventually(BEGUN.is_set)
                shutil.rmtree(tmp_path / name)
                await pipeline.models.reload()
                GATE.set()
        assert asked.result()
        await eventually(lambda: f"{name}/1" not in states(pipeline))
