"""The tasks of aiokafka's clients on the running event loop, found by their coroutines."""

from __future__ import annotations

import asyncio
from typing import Any


def fetching_tasks() -> set[asyncio.Task[Any]]:
    """Return a task for each consumer that is open."""
    return _tasks_of("Fetcher._fetch_requests_routine")


def _tasks_of(coroutine: str) -> set[asyncio.Task[Any]]:
    tasks = asyncio.all_tasks()
    return {each for each in tasks if getattr(each.get_coro(), "__qualname__", "") == coroutine}
