"""Shutdown of a process: the first signal requests a drain, the second an immediate stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager


class Stop:
    """Stop requests to a running process.

    Args:
        on_forced: called when an immediate end is requested.

    Attributes:
        requested: stop reading, finish what is in flight, and end.
        forced: end now; what is in flight is not committed, so it is repeated and not lost.
    """

    def __init__(self, on_forced: Callable[[], None] = lambda: None) -> None:
        self._on_forced = on_forced
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()

    def request(self) -> None:
        """Request a drain; on the second call request an immediate end."""
        if self.requested.is_set() and not self.forced.is_set():
            self.forced.set()
            self._on_forced()
        self.requested.set()


class DrainDeadline:
    """Deadline by which all parts of a stopping process have answered what is in flight.

    Args:
        now_us: the time, on a clock for durations, in microseconds.
        timeout_s: time until the deadline.
    """

    def __init__(self, now_us: int, timeout_s: float) -> None:
        self._until_us = now_us + round(timeout_s * 1e6)

    def remaining_s(self, now_us: int) -> float:
        """Return the time until the deadline; 0 if it has passed."""
        return max(0, self._until_us - now_us) / 1e6


@asynccontextmanager
async def until_requested(stop: Stop) -> AsyncIterator[None]:
    """Leave the context, which is cancelled then, as soon as a stop is requested."""

    async def expire() -> None:
        await stop.requested.wait()
        limit.reschedule(asyncio.get_running_loop().time())

    limit = asyncio.timeout(None)
    try:
        async with limit:
            watching = asyncio.create_task(expire(), name="until-requested")
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError:
        if not limit.expired():
            raise


@contextmanager
def stop_on_signals(stop: Stop) -> Iterator[None]:
    """Call `stop.request` on SIGTERM and SIGINT while the context lasts; then restore the handlers.

    Must be entered in the main thread, with the event loop running.
    """
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in signals}
    for number in signals:
        loop.add_signal_handler(number, stop.request)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
