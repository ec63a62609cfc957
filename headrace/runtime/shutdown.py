"""How a process ends: the first signal asks it to drain, the second makes it stop at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Stop:
    """What is wanted of a running process.

    Attributes:
        requested: stop reading, finish what is in flight, and end.
        forced: end now; what is in flight is not committed, so nothing that was promised is lost.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()

    def ask(self) -> None:
        """Ask once to drain; ask again to end at once."""
        if self.requested.is_set():
            self.forced.set()
        self.requested.set()


@contextmanager
def stop_on_signals(stop: Stop) -> Iterator[None]:
    """SIGTERM and SIGINT ask to stop while the context lasts; the old handlers come back after.

    Must be entered in the main thread, with the event loop running.
    """
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in signals}
    for number in signals:
        loop.add_signal_handler(number, stop.ask)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
