"""Executors in processes of their own: they announce themselves, share the work, and may die."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from headrace.runtime.process import Pipeline
from headrace.runtime.shutdown import Stop
from headrace.topics import Stage
from tests.support.conditions import eventually
from tests.support.models import add_version, falsely_batched
from tests.support.pipelines import Caller, log_for, serving, settings_of

FRONT = (Stage.INGEST, Stage.BATCHER)
EXECUTOR = (Stage.EXECUTOR,)
BACK = (Stage.RESPONDER,)


def known(pipeline: Pipeline) -> float | None:
    """How many executors its batcher knows."""
    return pipeline.metrics.registry.get_sample_value("headrace_known_executors")


def rows_of(pipeline: Pipeline) -> float:
    """How many rows its executor has run."""
    labels = {"model": "digits", "version": "1"}
    return pipeline.metrics.registry.get_sample_value("headrace_rows_total", labels) or 0.0


async def test_executors_in_own_processes_share_work(tmp_path: Path) -> None:
    """Both get batches, every request is answered once, and the batcher learns their latency."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, [FRONT, EXECUTOR, EXECUTOR, BACK]) as pipelines:
        front, first, second, _ = pipelines
        await eventually(lambda: known(front) == 2)
        await caller.send(400)
        await caller.all_answered()
        assert rows_of(first) > 0
        assert rows_of(second) > 0
        latency = front.models.catalog.lookup("digits").latency
        await eventually(lambda: latency.predict_us((), 1) is not None)
    assert await caller.check() == Counter(range(400))


async def test_batches_of_dead_executor_go_to_another(tmp_path: Path) -> None:
    """Its partitions are announced by the other one, and what it had under way is run there."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, [FRONT, EXECUTOR, BACK]) as [front, _, _]:
        doomed = Pipeline(settings, log, EXECUTOR)
        dying = asyncio.create_task(doomed.run(Stop()))
        await eventually(lambda: known(front) == 2)
        await caller.send(200)
        await eventually(lambda: rows_of(doomed) > 0)
        dying.cancel()
        await asyncio.wait([dying])
        await caller.send(200)
        await eventually(lambda: known(front) == 1)
        await caller.all_answered()
    assert set(await caller.check()) == set(range(400))


async def test_stopped_executor_is_sent_no_batch(tmp_path: Path) -> None:
    """It says so, and the requests that come then are answered by whoever is there later."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, [FRONT, BACK]) as [front, _]:
        async with serving(settings, log, [EXECUTOR]):
            await eventually(lambda: known(front) == 1)
        await eventually(lambda: known(front) == 0)
        await caller.send(50)
        async with serving(settings, log, [EXECUTOR]):
            await caller.all_answered()
    assert await caller.check() == Counter(range(50))


async def test_batcher_learns_from_executor_that_model_is_unbatchable(tmp_path: Path) -> None:
    """Only the executor has tried it out."""
    add_version(tmp_path, "sum", 1, falsely_batched())
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    async with serving(settings, log, [FRONT, EXECUTOR, BACK]) as [front, _, _]:
        version = front.models.catalog.lookup("sum")
        await eventually(lambda: version.max_batch_size == 1)
        assert version.batching_off.startswith("dimension 0 is not the batch")
