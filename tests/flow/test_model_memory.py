"""Models whose memory does not fit the budget of a process are refused, and the others serve."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.client import Client
from headrace.models.version import State
from headrace.runtime.process import Pipeline, running
from tests.support.conditions import eventually
from tests.support.pipelines import log_for
from tests.support.python_models import BEGUN, STEPS, add_whole_model, with_hooks
from tests.support.sized_models import (
    MODEL_BYTES,
    add_model,
    answers,
    held_bytes,
    settings_with_budget,
    states,
)


@asynccontextmanager
async def serving(repository: Path) -> AsyncIterator[tuple[Pipeline, Client]]:
    """A process with the budget, and a client."""
    settings = settings_with_budget(repository)
    log = await log_for(settings)
    pipeline = Pipeline(settings, log)
    async with running(pipeline), Client(log=log, settings=settings) as client:
        yield pipeline, client


async def test_third_model_is_refused_with_figures_and_first_two_answer(tmp_path: Path) -> None:
    """The memory of a version shows only while it is loaded, and is free again afterwards."""
    for name in ("a", "b", "c"):
        add_model(tmp_path, name, on_disk=0)
    async with serving(tmp_path) as (pipeline, client):
        assert await answers(client, "a")
        assert await answers(client, "b")
        found = states(pipeline)
        taken = {
            entry["name"]: entry["memory_bytes"].get("host")
            for entry in pipeline.models.catalog.status()
        }
        budget_bytes = held_bytes(pipeline)
        value = pipeline.metrics.registry.get_sample_value
        labels = {"model": "a", "version": "1", "device": "host"}
        shown = value("headrace_model_memory_bytes", labels)
        held = value("headrace_model_memory_budget_bytes", {"kind": "held"})
        of_c = {"model": "c", "version": "1"}
        failed_loads = value("headrace_model_load_failures_total", of_c)

    state, reason = found["c/1"]
    assert state == State.FAILED
    figure = r"\d+\.\d MiB"
    assert re.fullmatch(
        rf"models\.memory_bytes: the version needs {figure} \(measured\), and {figure} "
        rf"of 240\.0 MiB are in use, held by [ab]/1 \({figure}\), [ab]/1 \({figure}\)",
        reason,
    )
    assert failed_loads == 1
    assert taken["c"] is None
    # Other memory of the process grows and shrinks meanwhile.
    assert [size > MODEL_BYTES / 2 for size in taken["a"] + taken["b"]] == [True, True]
    assert shown == sum(taken["a"])
    assert held == budget_bytes == sum(taken["a"] + taken["b"])


async def test_version_that_is_too_large_does_not_replace_the_old_one(tmp_path: Path) -> None:
    """It is refused by the size of its files; when another model is gone, it fits."""
    add_model(tmp_path, "a")
    add_model(tmp_path, "b")
    async with serving(tmp_path) as (pipeline, client):
        add_model(tmp_path, "a", version=2)
        await pipeline.models.reload()
        await eventually(lambda: states(pipeline)["a/2"][0] == State.FAILED)
        assert "96.0 MiB (files times instances)" in states(pipeline)["a/2"][1]
        assert pipeline.models.catalog.lookup("a").version == "1"
        assert await answers(client, "a")

        shutil.rmtree(tmp_path / "b")
        await pipeline.models.reload()
        await eventually(lambda: held_bytes(pipeline) < 2 * MODEL_BYTES)
        await pipeline.models.reload()
        await eventually(lambda: pipeline.models.catalog.lookup("a").version == "2")
        assert await answers(client, "a")


async def test_version_removed_during_its_load_leaves_its_memory_to_the_next(
    tmp_path: Path,
) -> None:
    """Its successor is loaded only when it is unloaded, however long that takes."""
    add_model(tmp_path, "a")
    async with serving(tmp_path) as (pipeline, client):
        BEGUN.clear()
        step = "BEGUN.set(); STEPS.acquire()"
        imported = "from tests.support.python_models import BEGUN, STEPS"
        code = with_hooks(imported=imported, load=step, unload=step)
        add_whole_model(tmp_path, "a", code, version=2)
        with (tmp_path / "a" / "2" / "weights.bin").open("wb") as weights:
            weights.truncate(MODEL_BYTES)
        await pipeline.models.reload()
        await eventually(BEGUN.is_set)
        shutil.rmtree(tmp_path / "a" / "2")
        add_model(tmp_path, "a", version=3)
        await pipeline.models.reload()
        BEGUN.clear()
        STEPS.release()  # it is loaded
        await eventually(BEGUN.is_set)
        STEPS.release()  # and unloaded
        await eventually(lambda: states(pipeline)["a/3"][0] != State.LOADING)
        assert states(pipeline)["a/3"] == (State.READY, "")
        assert await answers(client, "a")
        labels = {"model": "a", "version": "2", "reason": "added"}
        assert not pipeline.metrics.registry.get_sample_value("headrace_model_loads_total", labels)
