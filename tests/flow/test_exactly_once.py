"""Exactly once, whatever happens between computing an answer and sealing it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from headrace.config import Settings
from headrace.flow import sealing
from headrace.flow.answered import Progress
from headrace.flow.lifecycle import Stop
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicPartition
from headrace.pipeline import Pipeline
from headrace.services.responder import sealed
from headrace.topics import STAGES, Stage
from tests.support.conditions import eventually
from tests.support.pipelines import PARTITIONS, Caller, Grouping, log_for, serving, settings_of
from tests.support.visible import answered

FUSED: Grouping = [STAGES]
APART: Grouping = [(stage,) for stage in STAGES]
THREE: Grouping = [(Stage.INGEST,), (Stage.BATCHER, Stage.EXECUTOR), (Stage.RESPONDER,)]
FORMS = pytest.mark.parametrize("form", [FUSED, THREE], ids=["fused", "three"])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries follow at once."""
    monkeypatch.setattr(sealing, "RETRY_S", 0.01)
    monkeypatch.setattr(sealed, "RETRY_S", 0.01)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Exactly once."""
    return once(settings_of(tmp_path))


def once(settings: Settings, **more: str) -> Settings:
    """The same settings, for exactly once."""
    delivery = {"guarantee": "exactly_once", **more}
    return Settings.model_validate(settings.model_dump() | {"delivery": delivery})


def each_once(count: int) -> Counter[tuple[int, int]]:
    """One answer for each of a caller's requests, which go to the partitions in turn."""
    return Counter((number % PARTITIONS, number // PARTITIONS) for number in range(count))


async def all_visible(log: MemoryLog, settings: Settings, count: int) -> None:
    """Wait until so many requests have an answer."""

    async def enough() -> bool:
        return len(await answered(log, settings)) >= count

    await eventually(enough, recheck_s=0.05, deadline_s=30)


async def is_committed(log: MemoryLog, expected: int) -> bool:
    """Whether each partition's base is there, with nothing answered above it."""
    names = [TopicPartition("headrace.requests", number) for number in range(PARTITIONS)]
    committed = await log.committed("headrace", names)
    return all(
        found is not None and Progress.from_committed(found) == Progress(expected)
        for found in committed.values()
    )


@FORMS
async def test_each_request_has_one_visible_answer(settings: Settings, form: Grouping) -> None:
    """And its offset is committed with it."""
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, form):
        await caller.send(500)
        await all_visible(log, settings, 500)

    assert await answered(log, settings) == each_once(500)
    assert await is_committed(log, 500 // PARTITIONS)
