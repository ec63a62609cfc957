"""An executor at work, without a batcher before it or a responder behind it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from headrace.crash_isolation.run_gate import RunGate
from headrace.models.registry import Models
from headrace.protocol.messages import Batch, Request
from headrace.protocol.tensors import to_array
from headrace.services.executor.service import ExecutorService
from headrace.services.executor.trial import TrialLoads
from headrace.services.executor.worker import NoQuarantine
from headrace.transport.channels import BatchQueue, Demand
from headrace.tuning import TUNING, ExecutorTuning
from tests.support.conditions import eventually
from tests.support.models import settings_for
from tests.support.services import StillClock, make_instruments
from tests.support.work import Tray, make_request

POISON = 13.0


def requests_of(*values: float, deadline_ms: int = 0) -> list[Request]:
    """Return one request of one row for each value."""
    return [
        make_request(
            "model",
            shape_class=(1,),
            deadline_ms=deadline_ms,
            inputs={"x": np.full((1, 1), value, np.float32)},
        )
        for value in values
    ]


def outcome(request: Request) -> float | str:
    """Return the output of the request, or its error code."""
    if request.failure is not None:
        return request.failure.code
    assert request.outputs is not None
    return float(to_array(request.outputs[0])[0, 0])


class ExecutorHarness:
    """A running executor, the batches that it pulls, and its answers."""

    def __init__(
        self,
        repository: Path,
        tuning: ExecutorTuning,
        trials: TrialLoads | None = None,
        gate: RunGate | None = None,
    ) -> None:
        quarantine = NoQuarantine()
        quarantine.gate = gate or quarantine.gate
        self.models = Models(settings_for(repository), executes=True)
        self.clock = StillClock()
        self.instruments = make_instruments(self.clock)
        self.answers = Tray()
        self._ready: dict[tuple[str, str], deque[Batch]] = {}
        self.batch_queue: BatchQueue[tuple[str, str], Batch] = BatchQueue(self._supply)
        self.executor = ExecutorService(
            self.batch_queue,
            self.answers,
            self.models,
            self.instruments,
            quarantine=quarantine,
            trials=trials,
            tuning=tuning,
        )

    def _supply(self, key: tuple[str, str] | None, _demand: Demand) -> Batch | None:
        queue = self._ready.get(key) if key is not None else None
        return queue.popleft() if queue else None

    def give(self, *batches: list[Request]) -> None:
        """Batches to be pulled."""
        for requests in batches:
            batch = Batch(f"b-{requests[0].offset}", requests, "idle")
            self._ready.setdefault((batch.model, batch.version), deque()).append(batch)
        self.batch_queue.notify()

    def waits(self) -> int:
        """How many batches nobody has pulled."""
        return sum(len(queue) for queue in self._ready.values())

    async def answered(self, count: int) -> list[Request]:
        """The requests that have ended, in the order in which they did."""
        await eventually(lambda: len(self.answers.requests) >= count)
        return self.answers.requests


@asynccontextmanager
async def running(
    repository: Path,
    tuning: ExecutorTuning = TUNING.executor,
    trials: TrialLoads | None = None,
    gate: RunGate | None = None,
) -> AsyncIterator[ExecutorHarness]:
    """Run the executor until the end of the context, when its batches end."""
    bench = ExecutorHarness(repository, tuning, trials, gate)
    bench.models.open()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bench.executor.run())
        await bench.executor.loaded.wait()
        yield bench
        bench.batch_queue.close()


def expect_long_runs(bench: ExecutorHarness) -> None:
    """Let the executor expect long runs, as if it had measured them."""
    bench.models.catalog.lookup("model").latency.observe((1,), 1, 50_000)
