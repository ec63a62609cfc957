"""More than can be done: every request is answered, most of the capacity is used, and nobody
pays for somebody else's flood.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry

from headrace.client import Client, InferenceError
from headrace.config import Settings, make_settings
from headrace.errors import Code
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.metrics import Metrics
from tests.support.python_models import add_python_model
from tests.support.services import counted

RUN_S = 0.02
BATCH_ROWS = 4
CAPACITY_PER_S = BATCH_ROWS / RUN_S

X = {"x": np.ones((1, 1), np.float32)}


def settings_of(repository: Path) -> Settings:
    """Return settings with a model whose every run takes the same time."""
    add_python_model(repository, f"time.sleep({RUN_S})", config=f"max_batch_size = {BATCH_ROWS}")
    return make_settings({"models": {"repository": str(repository)}})


class Served(NamedTuple):
    """A client, and what the services that it asks have counted."""

    client: Client
    instruments: Instruments

    def runs(self) -> float:
        """How often the model has run."""
        return counted(self.instruments, "runs_total", model="model", version="1")

    def rows(self) -> float:
        """How many rows it has run."""
        return counted(self.instruments, "rows_total", model="model", version="1")


@asynccontextmanager
async def serving(repository: Path) -> AsyncIterator[Served]:
    """The four services, which have had a backlog once and know their pace."""
    settings = settings_of(repository)
    instruments = Instruments(Metrics(CollectorRegistry()))
    async with (
        open_log(settings) as log,
        running(Pipeline(settings, log, instruments=instruments)),
        Client(log=log, settings=settings, max_in_flight=5000) as client,
    ):
        await asyncio.gather(*(client.infer("model", X) for _ in range(10 * BATCH_ROWS)))
        yield Served(client, instruments)


async def outcome(client: Client, timeout_s: float, tenant: str = "") -> InferenceError | None:
    """None where there was an answer; the client waits longer than the deadline lasts."""
    headers = [("x-timeout-ms", b"%d" % round(timeout_s * 1000))]
    try:
        await client.infer("model", X, timeout_s=60, headers=headers, tenant=tenant)
    except InferenceError as error:
        return error
    return None


async def test_overload_is_answered_early_and_capacity_is_used(tmp_path: Path) -> None:
    """At twice the capacity the surplus is refused with a time to retry. Batches stay full, and
    hardly a row is run in vain.
    """
    async with serving(tmp_path) as served:
        runs, rows = served.runs(), served.rows()
        outcomes = await asyncio.gather(
            *(outcome(served.client, 1.0) for _ in range(round(2 * CAPACITY_PER_S)))
        )
        runs, rows = served.runs() - runs, served.rows() - rows

    refused = [error for error in outcomes if error is not None]
    done = len(outcomes) - len(refused)
    codes = Counter(error.code for error in refused)
    assert set(codes) <= {Code.OVERLOADED, Code.DEADLINE_EXCEEDED}, codes
    assert rows >= 0.8 * runs * BATCH_ROWS, (rows, runs)
    assert done >= 0.8 * rows, (done, rows, codes)
    early = [error for error in refused if error.code == Code.OVERLOADED]
    assert len(early) >= 0.5 * len(refused), codes
    for error in early:
        assert error.retriable
        assert error.retry_after_ms


async def test_flood_of_one_tenant_does_not_delay_another(tmp_path: Path) -> None:
    """One tenant sends the work of five seconds; another's requests, sent after that, are answered
    while most of it waits.
    """
    async with serving(tmp_path) as served, asyncio.TaskGroup() as tasks:
        client = served.client
        flood = [
            tasks.create_task(outcome(client, 30.0, "flood"), name=f"flood {number}")
            for number in range(round(5 * CAPACITY_PER_S))
        ]
        await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)

        outcomes = await asyncio.gather(
            *(outcome(client, 30.0, "quiet") for _ in range(round(CAPACITY_PER_S / 10)))
        )

        assert outcomes == [None] * len(outcomes)
        assert sum(task.done() for task in flood) < 0.5 * len(flood)
        for task in flood:
            task.cancel()
