"""Tasks under one parent, with a permit before each."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Self


class TaskPool:
    """A task group that runs at most `limit` tasks at a time.

    A task that fails cancels the others and raises where the pool is left, as in a `TaskGroup`.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._permits = asyncio.Semaphore(limit)
        self._group = asyncio.TaskGroup()
        self._name = name

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._group.__aexit__(*error)

    async def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a piece of work, as soon as there is a permit."""
        try:
            await self._permits.acquire()
        except asyncio.CancelledError:
            work.close()
            raise
        task = self._group.create_task(work, name=self._name)
        task.add_done_callback(self._release)

    def _release(self, _: asyncio.Task[None]) -> None:
        self._permits.release()
