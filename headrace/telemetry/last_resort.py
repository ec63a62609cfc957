"""End a process whose event loop has stalled, even if no Python code can run.

Native code that holds the interpreter lock stops every Python thread, including any watchdog in
Python. `faulthandler` has a watchdog thread in C that needs no lock: unless it is re-armed in time
it writes the traceback of each thread, and ends the process
(https://docs.python.org/3/library/faulthandler.html). The event loop re-arms it.

There is one per process, so only the composition root may enter it.
"""

from __future__ import annotations

import asyncio
import faulthandler
from types import TracebackType
from typing import Self

from headrace.tuning import TUNING

_STDERR = 2


class StallWatchdog:
    """While the context lasts, an event loop stalled for `limit_s` ends the process (exit 1).

    Args:
        limit_s: in seconds; 0 disables it.
        rearms_per_limit: how often the event loop re-arms the watchdog within the limit.
    """

    def __init__(
        self, limit_s: float, rearms_per_limit: int = TUNING.runtime.stall_rearms_per_limit
    ) -> None:
        self._limit_s = limit_s
        self._interval_s = limit_s / rearms_per_limit
        self._next: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if self._limit_s:
            self._rearm()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._next is not None:
            self._next.cancel()
            faulthandler.cancel_dump_traceback_later()

    def _rearm(self) -> None:
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=_STDERR)
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(self._interval_s, self._rearm)
