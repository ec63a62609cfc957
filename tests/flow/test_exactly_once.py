"""Exactly once, whatever happens between computing an answer and sealing it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from headrace.config import Settings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.log.errors import LogRefused
from headrace.log.memory import MemoryLog
from headrace.log.memory.faults import TransactionFault
from headrace.log.port import TopicPartition
from headrace.runtime.process import Pipeline
from headrace.runtime.shutdown import Stop
from headrace.topics import STAGES, Stage
from tests.support.conditions import eventually
from tests.support.pipelines import PARTITIONS, Caller, Grouping, log_for, serving, settings_of
from tests.support.tuning import QUICK
from tests.support.visible import answered

FUSED: Grouping = [STAGES]
APART: Grouping = [(stage,) for stage in STAGES]
THREE: Grouping = [(Stage.INGEST,), (Stage.BATCHER, Stage.EXECUTOR), (Stage.RESPONDER,)]
FORMS = pytest.mark.parametrize("form", [FUSED, THREE], ids=["fused", "three"])


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

    await eventually(enough, recheck_s=0.05)


async def is_committed(log: MemoryLog, expected: int) -> bool:
    """Whether each partition's base is there, with nothing answered above it."""
    names = [TopicPartition("headrace.requests", number) for number in range(PARTITIONS)]
    committed = await log.committed("headrace", names)
    return all(
        found is not None and AckedOffsets.from_committed(found) == AckedOffsets(expected)
        for found in committed.values()
    )


@FORMS
async def test_each_request_has_one_visible_answer(settings: Settings, form: Grouping) -> None:
    """The offset of each request is committed with its answer."""
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, form, QUICK):
        await caller.send(500)
        await all_visible(log, settings, 500)

    assert await answered(log, settings) == each_once(500)
    assert await is_committed(log, 500 // PARTITIONS)


@FORMS
@pytest.mark.parametrize("fault", list(TransactionFault))
async def test_transaction_of_unknown_outcome_is_resolved_from_offsets(
    settings: Settings, form: Grouping, fault: TransactionFault
) -> None:
    """Whether the transaction was sealed or not: its successor learns it, and doubles nothing."""
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, form, QUICK):
        for _ in range(5):
            log.faults.transactions.fail(fault, fault)
            await caller.send(40)
            await all_visible(log, settings, caller.sent)

    assert await answered(log, settings) == each_once(caller.sent)


@FORMS
async def test_offsets_visible_late_repeat_no_answer(settings: Settings, form: Grouping) -> None:
    """They are read after the fence, which waits for them."""
    log = await log_for(settings)
    caller = Caller(settings, log)
    log.faults.transactions.let_offsets_lag()
    async with serving(settings, log, form, QUICK):
        await caller.send(100)
        await all_visible(log, settings, 100)
        log.faults.groups.force_rebalance("headrace")
        log.faults.transactions.fail(*[TransactionFault.UNKNOWN_BUT_COMMITTED] * 4)
        await caller.send(100)
        await all_visible(log, settings, 200)

    assert await answered(log, settings) == each_once(200)


@FORMS
async def test_answers_of_zombie_are_not_visible(settings: Settings, form: Grouping) -> None:
    """Evicted between computing and sealing, without knowing: its successor's answers count."""
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, form, QUICK):
        (zombie,) = log.faults.groups.members("headrace")
        log.faults.transactions.hold()
        await caller.send(200)
        await eventually(lambda: is_open(log))
        log.faults.groups.expire_session("headrace", zombie, noticed=False)
        async with serving(settings, log, form, QUICK):
            log.faults.transactions.release()
            await caller.send(200)
            await all_visible(log, settings, 400)

    assert await answered(log, settings) == each_once(400)


def is_open(log: MemoryLog) -> bool:
    """Whether a transaction is open, in which partitions share."""
    return bool(log.faults.transactions.open())


@FORMS
async def test_producer_fenced_by_broker_is_replaced(settings: Settings, form: Grouping) -> None:
    """The group still counts us in, so that there is no other owner: we go on."""
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, form, QUICK):
        await caller.send(40)
        await all_visible(log, settings, 40)
        for number in range(PARTITIONS):
            identity = f"headrace.headrace.requests.{number}"
            await log.transactional_producer(identity, "headrace").__aenter__()
        await caller.send(40)
        await all_visible(log, settings, 80)

    assert await answered(log, settings) == each_once(80)


async def test_killed_process_repeats_no_answer(settings: Settings) -> None:
    """Requests whose transaction was committed are not run again; all others are."""
    log = await log_for(settings)
    caller = Caller(settings, log)
    killed = asyncio.create_task(Pipeline(settings, log, tuning=QUICK).run(Stop()))
    await caller.send(500)
    await all_visible(log, settings, 50)
    killed.cancel()
    await asyncio.wait([killed])

    async with serving(settings, log, FUSED, QUICK):
        await caller.send(100)
        await all_visible(log, settings, 600)

    assert await answered(log, settings) == each_once(600)


@FORMS
async def test_processes_joining_and_leaving_repeat_no_answer(
    settings: Settings, form: Grouping
) -> None:
    """Partitions change hands under load."""
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, form, QUICK):
        await caller.send(300)
        async with serving(settings, log, form, QUICK):
            await caller.send(300)
            await all_visible(log, settings, 400)
        await caller.send(300)
        log.faults.groups.force_rebalance("headrace")
        await all_visible(log, settings, 900)

    assert await answered(log, settings) == each_once(900)


@pytest.mark.parametrize(
    ("first", "second"),
    [(FUSED, APART), (APART, FUSED), (FUSED, THREE), (THREE, FUSED)],
    ids=["fused-apart", "apart-fused", "fused-three", "three-fused"],
)
async def test_process_of_other_stage_group_takes_over(
    settings: Settings, first: Grouping, second: Grouping
) -> None:
    """The other stage group, and then the first one again, lose nothing and repeat nothing."""
    log = await log_for(settings)
    caller = Caller(settings, log)
    for form in (first, second, first):
        async with serving(settings, log, form, QUICK):
            await caller.send(200)
            await all_visible(log, settings, caller.sent - 150)

    async with serving(settings, log, second, QUICK):
        await all_visible(log, settings, 600)

    assert await answered(log, settings) == each_once(600)


async def test_broker_outage_is_waited_for(settings: Settings) -> None:
    """No broker answers for a while, in the middle of the work."""
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, FUSED, QUICK) as [pipeline]:
        log.faults.transactions.hold()
        await caller.send(200)
        await eventually(lambda: is_open(log))
        log.faults.brokers.take_down()
        log.faults.transactions.release()
        await eventually(lambda: failures(pipeline) == PARTITIONS)
        log.faults.brokers.bring_back()
        await caller.send(200)
        await all_visible(log, settings, 400)

    assert await answered(log, settings) == each_once(400)


def failures(pipeline: Pipeline) -> float:
    """How many commits have failed."""
    name, labels = "headrace_commit_failures_total", {"reason": "unavailable"}
    return pipeline.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize("other", [THREE[-1:], FUSED], ids=["another-form", "another-guarantee"])
async def test_different_stage_groups_or_guarantees_do_not_run_side_by_side(
    settings: Settings, other: Grouping, tmp_path: Path
) -> None:
    """They would overwrite each other's commits: who comes second is refused, and says why."""
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, FUSED, QUICK):
        mine = settings if other != FUSED else settings_of(tmp_path)
        with pytest.raises(ExceptionGroup) as refused:
            await Pipeline(mine, log, other[0]).run(Stop())
        assert refused.group_contains(LogRefused, match="another kind")
        await caller.send(40)
        await all_visible(log, settings, 40)

    assert await answered(log, settings) == each_once(40)


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
async def test_range_deleted_before_reading_does_not_stop_base(
    tmp_path: Path, guarantee: str
) -> None:
    """Retention takes it while ingest is down, and the responder, which stayed, is told."""
    settings = once(settings_of(tmp_path), guarantee=guarantee)
    log = await log_for(settings)
    caller = Caller(settings, log)
    ingest, executor, responder = THREE
    async with serving(settings, log, [executor, responder], QUICK):
        async with serving(settings, log, [ingest], QUICK):
            await caller.send(40)
            await all_visible(log, settings, 40)
            await eventually(lambda: is_committed(log, 10))
        await caller.send(40)
        for number in range(PARTITIONS):
            log.faults.partitions.trim(TopicPartition("headrace.requests", number), 20)
        async with serving(settings, log, [ingest], QUICK) as [reading]:
            await eventually(lambda: is_committed(log, 20))
            await caller.send(40)
            await all_visible(log, settings, 80)
            await eventually(lambda: is_committed(log, 30))
            registry = reading.metrics.registry
            assert registry.get_sample_value("headrace_skipped_records_total") == 40

    assert set((await answered(log, settings)).values()) == {1}
