"""One instance of a model version: a backend and the thread that all its calls are made on.

A run that is quicker than the way to the thread and back is made inline, on the event loop: the
hand-off costs 20 to 60 microseconds, and more while the loop is busy, since the thread has to win
the interpreter lock back. `Inline` decides by what runs took lately, and lets a model whose runs
have become slow go back to its thread after one of them.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple, Self

from headrace.errors import Fatal
from headrace.models.backend import Arrays, Backend

INLINE_BELOW_US = 200
CANCEL_GRACE_S = 5.0


class Inline:
    """Whether runs of a model are short enough for the event loop.

    Judged by the last `window` runs: their median is below the limit, and all but two of them
    (a machine that is busy otherwise stretches some) are not far above it.
    """

    def __init__(self, limit_us: int = INLINE_BELOW_US, window: int = 16) -> None:
        self._limit_us = limit_us
        self._recent_us: deque[int] = deque(maxlen=window)
        self.allowed = False

    def observe(self, compute_us: int) -> None:
        """Learn from a run."""
        recent_us = self._recent_us
        recent_us.append(compute_us)
        far_above = sum(one > 10 * self._limit_us for one in recent_us)
        self.allowed = (
            len(recent_us) == recent_us.maxlen
            and median(recent_us) < self._limit_us
            and far_above <= 2
        )


class _Call(NamedTuple):
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]


class Instance:
    """A backend in its thread. Entering loads and warms it up; leaving unloads it.

    Args:
        backend: not yet loaded.
        name: of the thread.
        max_execution_s: a run that takes longer is taken for hung and ended.
        may_inline: the backend may run on the event loop's thread as well.
    """

    def __init__(
        self, backend: Backend, name: str, *, max_execution_s: float, may_inline: bool
    ) -> None:
        self._backend = backend
        self._max_execution_s = max_execution_s
        self._may_inline = may_inline
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._inline = Inline()
        self.compute_us = 0

    async def __aenter__(self) -> Self:
        self._thread.start()
        try:
            await self._call(self._backend.load)
            await self._call(self._backend.warm_up)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call(self._backend.unload)
        await self._end()

    async def _end(self) -> None:
        """Wait for the thread, and cut short what it runs. The interpreter must not go before
        it: native code that is still running then would abort the process.
        """
        self._calls.put(None)
        self._backend.cancel()
        await asyncio.to_thread(self._thread.join, CANCEL_GRACE_S)

    async def run(self, inputs: Arrays) -> Arrays:
        """Run once; `compute_us` tells afterwards how long it took.

        Raises:
            TimeoutError: it took longer than `max_execution_s` and was ended.
            Fatal: it did not even end when told to.
            Exception: whatever the backend raises.
        """
        if self._may_inline and self._inline.allowed:
            outputs = self._timed(inputs)
        else:
            outputs = await self._bounded(inputs)
        self._inline.observe(self.compute_us)
        return outputs

    def _timed(self, inputs: Arrays) -> Arrays:
        began = time.perf_counter_ns()
        try:
            return self._backend.run(inputs)
        finally:
            self.compute_us = (time.perf_counter_ns() - began) // 1000

    async def _bounded(self, inputs: Arrays) -> Arrays:
        running = self._call(lambda: self._timed(inputs))
        done, _ = await asyncio.wait([running], timeout=self._max_execution_s)
        if done:
            return running.result()  # type: ignore[no-any-return]  # a future of anything
        self._backend.cancel()
        done, _ = await asyncio.wait([running], timeout=CANCEL_GRACE_S)
        if not done:
            raise Fatal(
                f"{self._thread.name}: a run did not end {CANCEL_GRACE_S} s after it was cancelled"
            )
        raise TimeoutError(f"the run took longer than max_execution_s = {self._max_execution_s}")

    def _call(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        # A failure that nobody waits for any more, of a run cut short, is no news to anyone.
        done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._calls.put(_Call(work, loop, done))
        return done

    def _serve(self) -> None:
        """The thread: calls, one after the other."""
        while (call := self._calls.get()) is not None:
            result, error = None, None
            try:
                result = call.work()
            except BaseException as raised:  # noqa: BLE001 - it is raised again by who awaits
                error = raised
            try:
                call.loop.call_soon_threadsafe(_resolve, call.done, result, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return


def _resolve(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
