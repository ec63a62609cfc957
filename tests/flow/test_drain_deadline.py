"""A process that stops has one deadline: for its gateway, its stages and the last commit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from headrace.clock import steady_clock_us
from headrace.log.port import Committed, TopicPartition
from headrace.runtime.process import Pipeline, running
from headrace.telemetry.health import Phase
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.snapshots import GatewaySnapshot
from headrace.topics import STAGES, Topic
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.pipelines import PARTITIONS, Caller, log_for, settings_of
from tests.support.tuning import EAGER

HOUR_S = 3600


class BusyDoors:
    """A gateway whose callers wait for all the time that they are given, on a clock of its own."""

    ports: Mapping[str, int] = {}

    def __init__(self) -> None:
        self._waited_us = 0

    def steady(self) -> int:
        return steady_clock_us() + self._waited_us

    def snapshot(self) -> GatewaySnapshot:
        raise NotImplementedError

    async def give_notice(self) -> None:
        pass

    async def drain(self, timeout_s: float) -> None:
        self._waited_us += round(timeout_s * 1e6)


async def test_stages_get_no_second_deadline_after_gateway_used_first(tmp_path: Path) -> None:
    """An answer that is never acknowledged delays the stop no further."""
    settings = settings_of(tmp_path, drain_timeout_s=HOUR_S)
    log = await log_for(settings)
    caller = Caller(settings, log)
    doors = BusyDoors()
    instruments = Instruments(Metrics(CollectorRegistry()), steady=doors.steady)
    tuning = replace(EAGER, runtime=replace(EAGER.runtime, last_commit_timeout_s=0.01))
    pipeline = Pipeline(settings, log, STAGES, instruments=instruments, tuning=tuning)
    pipeline.doors = doors
    await caller.send(1)
    log.faults.acknowledgements.hold()
    async with asyncio.timeout(DEADLINE_S), running(pipeline):
        await caller.all_answered()
    assert not pipeline.is_drained


async def test_answers_sent_by_deadline_are_in_last_commit(tmp_path: Path) -> None:
    """Their acknowledgements come after the deadline, and before the commit."""
    settings = settings_of(tmp_path, drain_timeout_s=1e-6)
    log = await log_for(settings)
    caller = Caller(settings, log)
    runtime = replace(EAGER.runtime, last_commit_timeout_s=2 * DEADLINE_S)
    pipeline = Pipeline(settings, log, STAGES, tuning=replace(EAGER, runtime=runtime))

    async def release() -> None:
        await eventually(lambda: pipeline.health.phase is Phase.DRAINING)
        log.faults.acknowledgements.release()

    await caller.send(PARTITIONS)
    log.faults.acknowledgements.hold()
    async with asyncio.TaskGroup() as tasks, running(pipeline):
        await caller.all_answered()
        tasks.create_task(release(), name="release")
    requests = [
        TopicPartition(settings.topic(Topic.REQUESTS), number) for number in range(PARTITIONS)
    ]
    committed = await log.committed(settings.namespace, requests)
    assert (committed, pipeline.is_drained) == (dict.fromkeys(requests, Committed(1)), True)
