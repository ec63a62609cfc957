"""A thread that makes calls one after the other, and hands their results to the event loop.

It is a daemon thread, so a call that hangs does not keep the process from ending, as a thread of
`asyncio.to_thread` would. A round trip takes a third of the time of `run_in_executor`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from headrace.errors import describe_error

T = TypeVar("T")


class Call:
    """A call for a worker thread, made after the calls queued before it.

    Attributes:
        done: future of its result, on the loop.
        compute_us: its duration once it is done, unless the call sets it itself.
    """

    __slots__ = ("compute_us", "done", "loop", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self.loop.create_future()
        self.compute_us = 0


class WorkerThread:
    """A thread that makes queued calls until it is closed.

    Args:
        name: name of the thread.
        idle_timeout_s: returns how long to wait for a call before `on_idle`; None: without limit.
        on_idle: called on the thread each time that no call came within `idle_timeout_s`.

    Attributes:
        thread: the thread, for interruptions.
    """

    def __init__(
        self,
        name: str,
        *,
        idle_timeout_s: Callable[[], float | None] | None = None,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._on_idle = on_idle
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)

    @property
    def name(self) -> str:
        """Name of the thread."""
        return self.thread.name

    @property
    def is_started(self) -> bool:
        """True once the thread was started; it may have ended since."""
        return self.thread.ident is not None

    def start(self) -> None:
        """Start the thread. Raises `RuntimeError` if the system allows no more threads."""
        self.thread.start()

    def put(self, call: Call) -> None:
        """Queue a call."""
        self._calls.put(call)

    def call(self, work: Callable[[], Any]) -> Call:
        """Queue a call of `work`; its exceptions are raised where its result is awaited."""
        call = Call(work)
        self._calls.put(call)
        return call

    def close(self) -> None:
        """End the thread after the calls that are queued."""
        self._calls.put(None)

    async def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, at most `timeout_s`."""
        await asyncio.to_thread(self.thread.join, timeout_s)

    # --- on the thread ---------------------------------------------------------------------------

    def _next_call(self) -> Call | None:
        if self._idle_timeout_s is None or self._on_idle is None:
            return self._calls.get()
        while True:
            try:
                return self._calls.get(timeout=self._idle_timeout_s())
            except queue.Empty:
                self._on_idle()

    def _serve(self) -> None:
        while (call := self._next_call()) is not None:
            result: Any = None
            error: Exception | None = None
            began = time.perf_counter_ns()
            try:
                result = call.work()
            except StopIteration as raised:  # futures do not accept it
                error = _as_error(raised)
            except Exception as raised:  # noqa: BLE001 - it is raised again where it is awaited
                error = raised
            except BaseException as raised:  # noqa: BLE001 - user code must not end the process
                error = _as_error(raised)
            # The work refers to its call, and so to the result: break the reference cycle.
            call.work = _do_nothing
            call.compute_us = call.compute_us or (time.perf_counter_ns() - began) // 1000
            # If the loop is closed, no caller waits. The thread goes on, because later calls may
            # still have to end a child process.
            with suppress(RuntimeError):
                call.loop.call_soon_threadsafe(_resolve, call.done, result, error)
            # Otherwise an idle thread would keep the result of its last call in memory.
            del call, result, error


async def run_on_daemon_thread(work: Callable[[], T]) -> T:
    """Run blocking work on a thread of its own that does not keep the process from ending."""
    worker = WorkerThread("blocking-work")
    worker.start()
    call = worker.call(work)
    worker.close()
    result: T = await call.done
    return result


def _do_nothing() -> None:
    """Do nothing: the work of a call that has been made."""


def _as_error(raised: BaseException) -> RuntimeError:
    """Return an ordinary error for an exception that would end a thread, a task or the process."""
    error = RuntimeError(describe_error(raised))
    error.__cause__ = raised
    return error


def _resolve(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
        # Retrieve it, so that asyncio does not report the failure of a call that nobody awaits any
        # more. Do it here: if the loop ends now, a callback of the future is never called.
        done.exception()
