"""A thread that makes calls for the event loop."""

from __future__ import annotations

import asyncio
import threading

from headrace.primitives.worker_thread import WorkerThread


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
