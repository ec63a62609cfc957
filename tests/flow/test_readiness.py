"""A process is ready as long as something comes of what it reads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from headrace.client import Client
from headrace.config import make_settings
from headrace.telemetry.health import Health, Phase
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.snapshots import CommitSnapshot, SourceSnapshot
from headrace.telemetry.status import ProcessState
from headrace.topics import STAGES
from tests.support.conditions import eventually
from tests.support.pipelines import log_for, serving
from tests.support.python_models import add_python_model


async def test_process_without_answers_for_too_long_is_not_ready(tmp_path: Path) -> None:
    """The reason says how many records wait; an answer makes the process ready again."""
    add_python_model(tmp_path, "self.cancelled.wait(4)")
    settings = make_settings(
        {"models": {"repository": str(tmp_path)}, "limits": {"max_unanswered_s": 0.5}}
    )
    async with (
        await log_for(settings) as log,
        serving(settings, log, [STAGES]) as (pipeline,),
        Client(log=log, settings=settings) as client,
    ):
        assert pipeline.health.ready
        asked = asyncio.create_task(client.infer("model", {"x": np.ones((1, 1), np.float32)}))
        await eventually(lambda: not pipeline.health.ready)
        reason = pipeline.health.ready_fault()
        assert pipeline.health.live
        await asked

        await eventually(lambda: pipeline.health.ready)
    assert reason.startswith("headrace.requests: 1 records wait, and none was answered for")


def test_process_that_cannot_take_up_partitions_is_not_ready() -> None:
    """The process is unready after the time that an answer may take; a limit of 0 is none."""
    reasons = []
    for limit_s in (60.0, 120.0, 0.0):
        state = ProcessState([], Health(), Metrics(CollectorRegistry()), list, limit_s)
        state.sources.append(lambda: source_snapshot(assigning_s=90.0))
        state.health.enter(Phase.READY)
        reasons.append(state.health.ready_fault())

    assert reasons == [
        "requests: its partitions could not be taken up for 90 s; partitions.assignment_delayed in "
        "the log says why",
        "",
        "",
    ]


def source_snapshot(assigning_s: float) -> SourceSnapshot:
    """Return the snapshot of a source that has nothing to do."""
    commit = CommitSnapshot(True, 0.0, 0, "")
    idle = SourceSnapshot("requests", "group", 0.0, 0, 0, 1000, "", 0.0, 0, None, None, commit, ())
    return idle._replace(assigning_s=assigning_s)
