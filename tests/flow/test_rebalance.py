"""Processes that come and go under load."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from msgspec.structs import replace

from headrace.log.memory import MemoryLog
from headrace.runtime.process import Pipeline
from headrace.runtime.shutdown import Stop
from headrace.topics import STAGES
from headrace.tuning import TUNING
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.pipelines import Caller, log_for, serving, settings_of


async def test_second_process_joining_and_leaving_loses_no_request(tmp_path: Path) -> None:
    """Partitions change hands twice while requests come in: each is answered exactly once."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, [STAGES]):
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                await caller.send(20)
                await eventually(lambda: caller.sent - caller.answered() < 500)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load())
            await eventually(lambda: caller.answered() > 100)
            async with serving(settings, log, [STAGES]):
                reached = caller.answered()
                await eventually(lambda: caller.answered() > reached + 200)
            reached = caller.answered()
            await eventually(lambda: caller.answered() > reached + 200)
            stop.set()
        await caller.all_answered()

    assert await caller.check() == Counter(range(caller.sent))


async def test_killed_process_loses_no_request(tmp_path: Path) -> None:
    """The next process answers each request that was in flight, some of them a second time."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    caller = Caller(settings, log)
    killed = asyncio.create_task(Pipeline(settings, log).run(Stop()))
    await caller.send(500)
    await eventually(lambda: caller.answered() > 50)
    killed.cancel()
    await asyncio.wait([killed])

    async with serving(settings, log, [STAGES]):
        await eventually(lambda: _all_there(caller))

    numbers = await caller.check()
    assert set(numbers) == set(range(500))


async def _all_there(caller: Caller) -> bool:
    return len(await caller.check()) == caller.sent


async def test_second_signal_ends_process_at_once(tmp_path: Path) -> None:
    """It waits for no drain, raises nothing, and its successor answers what is left."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    caller = Caller(settings, log)
    pipeline, stop = Pipeline(settings, log), Stop()
    running = asyncio.create_task(pipeline.run(stop))
    await asyncio.wait_for(pipeline.ready.wait(), DEADLINE_S)
    log.faults.acknowledgements.hold()
    await _produce_apart(caller, log)
    await eventually(caller.answered)
    stop.request()
    await asyncio.sleep(0)
    stop.request()
    await asyncio.wait_for(running, DEADLINE_S)
    log.faults.acknowledgements.release()

    async with serving(settings, log, [STAGES]):
        await eventually(lambda: _all_there(caller))


async def _produce_apart(caller: Caller, log: MemoryLog) -> None:
    """Send while acknowledgements are held: the caller's own are let through."""
    sending = asyncio.create_task(caller.send(1))
    await asyncio.sleep(0)
    log.faults.acknowledgements.release()
    log.faults.acknowledgements.hold()
    await sending


async def test_broker_that_returns_is_waited_for(tmp_path: Path) -> None:
    """An outage in the middle of the work ends nothing, and every request is answered."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    caller = Caller(settings, log)
    tuning = replace(TUNING, runtime=replace(TUNING.runtime, broker_silence_s=0.2))
    async with serving(settings, log, [STAGES], tuning) as [pipeline]:
        await caller.send(200)
        log.faults.brokers.take_down()
        await eventually(lambda: not pipeline.health.ready)
        log.faults.brokers.bring_back()
        log.faults.groups.force_rebalance("headrace")
        await caller.send(200)
        await eventually(lambda: _all_there(caller))


async def test_stop_does_not_wait_for_hung_broker(tmp_path: Path) -> None:
    """The drain has one deadline: a last commit that nobody answers is given up soon after it, and
    the process ends with an exit code of its own.
    """
    settings = settings_of(tmp_path, drain_timeout_s=0.2)
    log = await log_for(settings, request_timeout_s=3600.0)
    caller = Caller(settings, log)
    pipeline, stop = Pipeline(settings, log), Stop()
    running = asyncio.create_task(pipeline.run(stop))
    await asyncio.wait_for(pipeline.ready.wait(), DEADLINE_S)
    await caller.send(100)
    await caller.all_answered()
    log.faults.groups.hold_commits()
    await caller.send(100)
    log.faults.brokers.take_down(hang=True)
    stop.request()

    await asyncio.wait_for(running, DEADLINE_S)
    assert not pipeline.is_drained
