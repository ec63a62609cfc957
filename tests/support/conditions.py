"""Waiting for what will be, with a deadline instead of a guess."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable

DEADLINE_S = 40.0
"""How long a test waits before it fails: no promise, only the end of a test that hangs. A machine
that does other things besides may take many times as long as a quiet one.
"""
_RECHECK_S = 0.005


async def eventually(
    condition: Callable[[], object],
    *,
    deadline_s: float = DEADLINE_S,
    what: str = "",
    recheck_s: float = _RECHECK_S,
) -> None:
    """Return once `condition`, a function or a coroutine function, gives a true value.

    Raises:
        AssertionError: it did not come true within `deadline_s`; says the last value.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    while True:
        answer = condition()
        value = await answer if inspect.isawaitable(answer) else answer
        if value:
            return
        if loop.time() >= deadline:
            raise AssertionError(f"not within {deadline_s} s: {what or condition}; last: {value!r}")
        await asyncio.sleep(recheck_s)
