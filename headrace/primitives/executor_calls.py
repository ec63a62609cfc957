"""Calls by the threads of an executor that leave nothing behind when they are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def call_by(executor: Executor, function: Callable[[], T]) -> T:
    """Return what a function returns, which an executor calls.

    If this is cancelled before the executor comes to it, the function is dropped with all that it
    holds. The executor's queue would keep it, and no limit would count it.
    """
    waiting = [function]
    del function

    def work() -> T:
        return waiting.pop()()

    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work)
    finally:
        waiting.clear()
