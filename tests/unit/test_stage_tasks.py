"""Task group of a stage that tasks of other stages call."""

from __future__ import annotations

import asyncio

import pytest

from headrace.primitives.stage_tasks import StageTasks


async def wait_turns(count: int) -> None:
    """Let other tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_stage_context_ends_after_its_tasks() -> None:
    """Tasks started while the context was being left are awaited too."""
    ended: list[str] = []

    async def later() -> None:
        await wait_turns(3)
        tasks.start(wait_and_end())

    async def wait_and_end() -> None:
        await wait_turns(3)
        ended.append("later")

    tasks = StageTasks()
    async with tasks:
        tasks.start(later())

    assert ended == ["later"]


async def test_error_that_ended_stage_is_raised_alone() -> None:
    """Work that another task starts after a failure is dropped; the failure is raised once."""
    tasks = StageTasks()
    started: list[bool] = []

    async def fail() -> None:
        raise ValueError("first")

    async def run() -> None:
        async with tasks:
            await asyncio.Event().wait()

    async def call() -> None:
        while True:
            started.append(tasks.start(wait_turns(2)) is not None)
            await asyncio.sleep(0)

    async def fail_while_called() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(run())
            await asyncio.sleep(0)
            group.create_task(call())
            tasks.start(fail())

    with pytest.raises(ExceptionGroup) as raised:
        await fail_while_called()

    assert started[-1] is False
    assert raised.group_contains(ValueError, match="first")
    assert not raised.group_contains(RuntimeError)


async def test_work_started_after_cancellation_is_dropped() -> None:
    """The callers are cancelled too, some turns later."""
    tasks = StageTasks()

    async def run() -> None:
        async with tasks:
            await asyncio.Event().wait()

    running = asyncio.create_task(run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])

    assert tasks.start(wait_turns(1)) is None
