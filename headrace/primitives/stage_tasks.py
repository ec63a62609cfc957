"""Task group of a stage whose work is started by tasks of other stages."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


class StageTasks:
    """Tasks that last until the context exits; the first that fails cancels the others.

    The process ends when a task has failed or the context's own task was cancelled, and the
    stages that call this one are cancelled too, but some turns of the event loop later. `start`
    drops what they begin meanwhile. It would otherwise raise an error about this group in them,
    beside the error that ended it.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._is_ending = False

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_ending = self._is_ending or error is not None
        try:
            await self._group.__aexit__(kind, error, trace)
        finally:
            self._is_ending = True

    def start(
        self, work: Coroutine[Any, Any, None], name: str | None = None
    ) -> asyncio.Task[None] | None:
        """Start a task; return None if the group is ending and the work was dropped."""
        if self._is_ending:
            work.close()
            return None
        task = self._group.create_task(work, name=name)
        # Added after the group's own callback, and called with it: nothing runs between the two.
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._is_ending = True
