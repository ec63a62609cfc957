"""The wall clock is set while requests wait for a batch to fill."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headrace.config import Settings, make_settings
from headrace.log.memory import MemoryLog
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.metrics import Metrics
from headrace.topics import STAGES
from tests.support.clock import SettableClock
from tests.support.conditions import eventually
from tests.support.models import add_version, digits
from tests.support.pipelines import PARTITIONS, Caller, Grouping

FUSED: Grouping = [STAGES]
APART: Grouping = [(stage,) for stage in STAGES]


@asynccontextmanager
async def serving(
    settings: Settings, log: MemoryLog, grouping: Grouping, clock: SettableClock
) -> AsyncIterator[list[Pipeline]]:
    """A pipeline for each group of stages, all with this wall clock."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                running(
                    Pipeline(
                        settings,
                        log,
                        stages,
                        instruments=Instruments(Metrics(CollectorRegistry()), None, clock),
                    )
                )
            )
            for stages in reversed(grouping)
        ]


@pytest.mark.parametrize("grouping", [FUSED, APART], ids=["fused", "all-apart"])
@pytest.mark.parametrize("seconds", [-120.0, 120.0], ids=["back", "forward"])
async def test_wall_clock_set_back_stalls_no_model(
    tmp_path: Path, grouping: Grouping, seconds: float
) -> None:
    """Requests that wait in a batch are answered after its delay, and so are the next ones."""
    add_version(tmp_path, "digits", 1, digits(), "max_queue_delay_ms = 500")
    settings = make_settings(
        {"topics": {"partitions": PARTITIONS}, "models": {"repository": tmp_path}}
    )
    clock = SettableClock()
    log = MemoryLog(now_ms=clock.now_ms)
    await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
    caller = Caller(settings, log)
    async with serving(settings, log, grouping, clock) as pipelines:

        def waits() -> bool:
            found = [one.state.queue() for one in pipelines]
            return any(waiting is not None and waiting.requests for waiting in found)

        await caller.send(1)
        await eventually(waits, recheck_s=0.001)
        clock.set_by(seconds)
        await caller.all_answered()
        await caller.send(1)
        await caller.all_answered()
