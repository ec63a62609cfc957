"""Worker processes that run the same command, and are started again when they end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import structlog

from headrace.primitives.backoff import Pauses
from headrace.runtime.shutdown import Stop
from headrace.telemetry.logs import Event
from headrace.tuning import TUNING, RuntimeTuning

log = structlog.get_logger(__name__)


class WorkerCommand(NamedTuple):
    """Command that starts a worker.

    Attributes:
        line: its command line.
        environment: variables besides those of this process.
    """

    line: Sequence[str]
    environment: Mapping[str, str]


class Workers:
    """Keeps worker processes running until a stop.

    Each has a session of its own: Ctrl-C at the terminal reaches this process alone, which passes
    it on once.

    Args:
        commands: how each worker is started.
        unusable: exit code of a worker whose settings cannot be used.
        tuning: pauses between restarts.
    """

    def __init__(
        self,
        commands: Sequence[WorkerCommand],
        unusable: int,
        tuning: RuntimeTuning = TUNING.runtime,
    ) -> None:
        self._commands = commands
        self._unusable = unusable
        self._tuning = tuning
        self._running: dict[int, Process] = {}

    async def run(self, stop: Stop) -> int:
        """Run the workers until a stop, and return the highest exit code: 0 if all drained.

        A stop is passed on, and so is the second request for one. If the settings are unusable at
        the first start of a worker, all are stopped; later, when a file has changed, the others
        still have what they began with.
        """
        async with asyncio.TaskGroup() as tasks:
            kept = [
                tasks.create_task(self._keep(number, command, stop), name=f"worker-{number}")
                for number, command in enumerate(self._commands)
            ]
            forwarding = tasks.create_task(self._forward(stop), name="forward-stop")
            await asyncio.wait(kept)
            forwarding.cancel()
        return max(each.result() for each in kept)

    def send(self, number: int) -> None:
        """Send a signal to all workers."""
        for process in self._running.values():
            with suppress(ProcessLookupError):  # it has just ended
                process.send_signal(number)

    async def _forward(self, stop: Stop) -> None:
        await stop.requested.wait()
        self.send(signal.SIGTERM)
        await stop.forced.wait()
        self.send(signal.SIGTERM)

    async def _keep(self, number: int, command: WorkerCommand, stop: Stop) -> int:
        pauses = Pauses(self._tuning.worker_restart)
        is_first = True
        while not stop.requested.is_set():
            began_s = time.monotonic()
            code = await self._run_once(number, command, stop)
            if stop.requested.is_set():
                return code if code >= 0 else int(code != -signal.SIGTERM)
            if is_first and code == self._unusable:
                stop.request()
                return code
            is_first = False
            if time.monotonic() - began_s >= self._tuning.worker_steady_s:
                pauses.reset()
            with suppress(TimeoutError):
                async with asyncio.timeout(pauses.next_s()):
                    await stop.requested.wait()
        return 0

    async def _run_once(self, number: int, command: WorkerCommand, stop: Stop) -> int:
        try:
            process = await asyncio.create_subprocess_exec(
                *command.line,
                env={**os.environ, **command.environment},
                stdin=DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            # The system has no memory or process left, which is no reason to end the others.
            log.warning(Event.WORKER_ENDED, worker=number, reason=f"not started: {error}")
            return 1
        self._running[number] = process
        log.info(Event.WORKER_STARTED, worker=number, pid=process.pid)
        if stop.requested.is_set():  # since the loop's condition: `send` did not reach this one
            with suppress(ProcessLookupError):
                process.terminate()
        code = await process.wait()
        del self._running[number]
        log.info(Event.WORKER_ENDED, worker=number, pid=process.pid, exit_code=code)
        return code
