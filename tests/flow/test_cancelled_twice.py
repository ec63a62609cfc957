"""A process that is cancelled again while it ends, and fails."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping, Sequence
from typing import Any

from structlog.testing import capture_logs

from headrace.config import Settings
from headrace.errors import Fatal
from headrace.log.memory.log import MemoryLog
from headrace.log.port import TopicInfo
from headrace.runtime.process import Pipeline
from headrace.runtime.shutdown import Stop
from headrace.topics import Stage
from tests.support.conditions import eventually


class FailsWhenCancelledTwice(MemoryLog):
    """A log whose first request ends only by a second cancellation, and then with an error."""

    cancellations = -1  # the request has not been made

    async def describe_topics(self, topics: Sequence[str]) -> Mapping[str, TopicInfo | None]:
        self.cancellations = 0
        while self.cancellations < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancellations += 1
        raise Fatal("the second cancellation failed")


async def cancel_twice() -> bool:
    """Cancel a process, and again while it ends; return whether it was cancelled in the end."""
    log = FailsWhenCancelledTwice()
    running = asyncio.create_task(Pipeline(Settings(), log, (Stage.RESPONDER,)).run(Stop()))
    await eventually(lambda: log.cancellations == 0)
    running.cancel()
    await eventually(lambda: log.cancellations == 1)
    running.cancel()
    await asyncio.wait([running])
    return running.cancelled()


async def test_error_after_second_cancellation_is_logged_and_retrieved() -> None:
    """No task is left whose error asyncio would report at whatever moment it is collected."""
    unretrieved: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unretrieved.append(context))
    with capture_logs() as logs:
        assert await cancel_twice()
    gc.collect()

    assert not unretrieved
    assert [each["reason"] for each in logs if each["log_level"] == "error"] == [
        "Fatal: the second cancellation failed"
    ]
