"""A thread that makes calls for the event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from headrace.primitives.worker_thread import WorkerThread
from tests.support.conditions import eventually


def test_calls_queued_when_loop_ends_are_made_before_thread_ends() -> None:
    """They may end a child process, or release a device."""
    worker = WorkerThread("worker")
    loop_has_ended = threading.Event()
    made: list[str] = []

    async def leave_calls() -> None:
        worker.start()
        worker.call(loop_has_ended.wait)
        worker.call(lambda: made.append("clean up"))
        worker.close()

    asyncio.run(leave_calls())
    loop_has_ended.set()
    worker.thread.join()

    assert made == ["clean up"]


def test_failure_of_call_that_ends_with_loop_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its caller was cancelled, and the loop has no turn left for callbacks of the call."""
    worker = WorkerThread("worker")

    def fail() -> None:
        raise ValueError("failure of a call")

    async def leave_failure() -> None:
        worker.start()
        worker.call(fail)
        worker.close()
        worker.thread.join()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave_failure())
    loop.close()
    gc.collect()

    assert caplog.messages == []


async def test_idle_thread_keeps_nothing_of_its_last_call() -> None:
    """Its result may be large, and the next call may come hours later."""

    class Result:
        pass

    worker = WorkerThread("worker")
    worker.start()
    result = weakref.ref(await worker.call(Result).done)
    await eventually(lambda: result() is None)
    worker.close()
    worker.thread.join()
