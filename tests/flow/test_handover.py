"""Partitions change hands in the middle of a backlog: new requests do not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from headrace.config import Settings, make_settings
from headrace.crash_isolation.markers import NOBODY, CrashMarkers
from headrace.crash_isolation.poison_search import CrashMarker
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicPartition
from headrace.runtime.process import Pipeline
from headrace.runtime.shutdown import Stop
from headrace.topics import Stage, Topic
from tests.support.conditions import eventually
from tests.support.dying import FUSED, number_value, outcomes, send_values
from tests.support.pipelines import PARTITIONS, Grouping, log_for, name_of, serving
from tests.support.python_models import GATE, STEPS, WAITS_AT_THE_GATE, add_python_model

BACKLOG = 40
FAST = range(1000, 1000 + PARTITIONS)
"""One for each partition, so that each of them shows whether it is read."""

GROUPINGS: list[Grouping] = [
    [FUSED],
    [(Stage.INGEST, Stage.BATCHER, Stage.EXECUTOR), (Stage.RESPONDER,)],
]
GUARANTEES = ["at_least_once", "exactly_once"]


@pytest.fixture(autouse=True)
def _closed_gate() -> Iterator[None]:
    GATE.clear()
    yield
    GATE.set()


def _settings(repository: Path, guarantee: str) -> Settings:
    """Settings with `slow`, whose runs wait at the gate, and `fast`."""
    add_python_model(repository, WAITS_AT_THE_GATE, name="slow", config="max_batch_size = 4")
    add_python_model(repository, "", name="fast")
    return make_settings(
        {
            "topics": {"partitions": PARTITIONS},
            "models": {"repository": repository},
            "limits": {"drain_timeout_s": 0.2},
            "delivery": {"guarantee": guarantee},
        }
    )


async def _send(settings: Settings, log: MemoryLog, model: str, ids: Sequence[int]) -> None:
    await send_values(settings, log, [number_value(1.0, str(one), model) for one in ids])


async def _backlog_is_read(pipelines: Sequence[Pipeline]) -> None:
    def in_flight() -> int:
        snapshots = [source() for each in pipelines for source in each.state.sources]
        return sum(one.in_flight_records for one in snapshots)

    await eventually(lambda: in_flight() == BACKLOG)


async def _fast_goes_first(settings: Settings, log: MemoryLog) -> None:
    """Send fast requests to every partition; they are answered while the backlog cannot be."""
    await _send(settings, log, "fast", FAST)

    async def answered() -> bool:
        return set(await outcomes(settings, log)) >= set(FAST)

    await eventually(answered)
    assert set(await outcomes(settings, log)) == set(FAST)


async def _all_answered(settings: Settings, log: MemoryLog) -> None:
    GATE.set()

    async def answered() -> bool:
        return len(await outcomes(settings, log)) == BACKLOG + len(FAST)

    await eventually(answered)


@pytest.mark.parametrize("guarantee", GUARANTEES)
@pytest.mark.parametrize("grouping", GROUPINGS, ids=name_of)
async def test_fast_request_after_incomplete_drain_is_answered_before_backlog(
    tmp_path: Path, grouping: Grouping, guarantee: str
) -> None:
    """The successor of a process that was stopped goes on as if it had been there all along."""
    settings = _settings(tmp_path, guarantee)
    log = await log_for(settings)
    await _send(settings, log, "slow", range(BACKLOG))
    async with serving(settings, log, grouping) as pipelines:
        await _backlog_is_read(pipelines)

    async with serving(settings, log, grouping):
        await _fast_goes_first(settings, log)
        await _all_answered(settings, log)


@pytest.mark.parametrize("guarantee", GUARANTEES)
@pytest.mark.parametrize("grouping", GROUPINGS, ids=name_of)
async def test_fast_request_after_join_is_answered_before_backlog(
    tmp_path: Path, grouping: Grouping, guarantee: str
) -> None:
    """A second process takes partitions over in the middle of a backlog."""
    settings = _settings(tmp_path, guarantee)
    log = await log_for(settings)
    await _send(settings, log, "slow", range(BACKLOG))
    async with serving(settings, log, grouping) as pipelines:
        await _backlog_is_read(pipelines)
        async with serving(settings, log, grouping):
            await _fast_goes_first(settings, log)
            await _all_answered(settings, log)


async def _die(settings: Settings, log: MemoryLog, grouping: Grouping) -> None:
    """Serve until the whole backlog has been read, and end without a drain."""
    pipelines = [Pipeline(settings, log, stages) for stages in grouping]
    killed = [asyncio.create_task(each.run(Stop())) for each in pipelines]
    await _backlog_is_read(pipelines)
    for each in killed:
        each.cancel()
    await asyncio.wait(killed)


@pytest.mark.parametrize("ends", [1, 2])
@pytest.mark.parametrize("guarantee", GUARANTEES)
@pytest.mark.parametrize("grouping", GROUPINGS, ids=name_of)
async def test_fast_request_after_unclean_ends_is_answered_before_backlog(
    tmp_path: Path, grouping: Grouping, guarantee: str, ends: int
) -> None:
    """Nothing waits for what a process that was killed had merely read."""
    settings = _settings(tmp_path, guarantee)
    log = await log_for(settings)
    await _send(settings, log, "slow", range(BACKLOG))
    for _ in range(ends):
        await _die(settings, log, grouping)

    async with serving(settings, log, grouping):
        await _fast_goes_first(settings, log)
        await _all_answered(settings, log)


@pytest.mark.parametrize("grouping", GROUPINGS, ids=name_of)
async def test_fast_request_during_poison_search_is_answered_before_suspects(
    tmp_path: Path, grouping: Grouping
) -> None:
    """Other models and partitions go on between the requests that run alone."""
    settings = _settings(tmp_path, "at_least_once")
    log = await log_for(settings)
    await _send(settings, log, "slow", range(BACKLOG))
    await _send(settings, log, "fast", FAST)
    topic, group = settings.topic(Topic.REQUESTS), settings.namespace
    if grouping != [FUSED]:
        group = f"{group}.{Stage.INGEST}"
    suspects = CrashMarker(is_open=True, suspects=((0, BACKLOG // PARTITIONS),))
    marks = {TopicPartition(topic, number): suspects for number in range(PARTITIONS)}
    await CrashMarkers(log, group).write(marks, NOBODY)

    async with serving(settings, log, grouping):
        slow_answered = 0
        while not set(await outcomes(settings, log)) >= set(FAST):
            STEPS.release()  # one of the suspects runs to its end
            slow_answered += 1
            await eventually(partial(_has_answered, settings, log, slow_answered))
        await _all_answered(settings, log)

    assert slow_answered < BACKLOG // 2


async def _has_answered(settings: Settings, log: MemoryLog, count: int) -> bool:
    return len(set(await outcomes(settings, log)) - set(FAST)) >= count
