"""Latency of one model while a large one is loaded in the same process.

    python -m benchmarks.loading [--model FILE] [--pairs N] [--rounds N] [--rate N]

First the signature of an ONNX file, by default a ResNet-50, is read in a child process and in the
process itself alternately, while a thread wakes every millisecond; its longest delay is the time in
which nothing of the process ran. Then one process serves `digits` from the embedded log at a
constant rate. Again and again the file is added to its repository, read in one of the two ways,
loaded, probed and warmed up, and removed. Both ways alternate, so that other load on the machine
affects both. Latencies are counted from the time at which a request was due.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import structlog
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.machine import describe_machine
from benchmarks.models import write_resnet50
from benchmarks.results import RESULTS, record
from headrace.client import Client
from headrace.config import make_settings
from headrace.log.memory import MemoryLog
from headrace.models.signature_child import read_large_signature
from headrace.models.version import State
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics
from headrace.tuning import TUNING, Tuning

BASE_S = 5.0
"""Time without a load before each one."""
SERVED = Path("headrace/tools/demo/models/digits")
IN_PROCESS = replace(TUNING, models=replace(TUNING.models, read_apart_from_bytes=2**60))
WAYS = {"in a child": TUNING, "in the process": IN_PROCESS}


class Measured(Struct):
    """One load.

    Attributes:
        way: where the file was read.
        load_s: from the reading of the repository until the version was ready.
        before_ms, during_ms: median and 99th percentile of the other model's latencies.
    """

    way: str
    load_s: float
    before_ms: tuple[float, float]
    during_ms: tuple[float, float]


class Pause(Struct):
    """One reading of the signature.

    Attributes:
        way: where the file was read.
        read_s: how long it took.
        longest_ms: longest delay of a thread that wakes every millisecond.
    """

    way: str
    read_s: float
    longest_ms: float


def _measure_pause(way: str, tuning: Tuning, file: Path) -> Pause:
    """Read the signature of a file, and measure how long a thread could not run meanwhile."""
    delays: list[float] = []
    ended = threading.Event()

    def wake() -> None:
        last_s = time.perf_counter()
        while not ended.wait(0.001):
            now_s = time.perf_counter()
            delays.append(now_s - last_s)
            last_s = now_s

    thread = threading.Thread(target=wake)
    thread.start()
    began_s = time.perf_counter()
    read_large_signature(file, tuning.models)
    read_s = time.perf_counter() - began_s
    ended.set()
    thread.join()
    return Pause(way, read_s, 1e3 * max(delays))


class Caller:
    """Sends requests at a constant rate.

    Attributes:
        latencies: time at which each request was due, and seconds until its answer.
    """

    def __init__(self, client: Client, rate: float) -> None:
        self._client = client
        self._rate = rate
        self.latencies: list[tuple[float, float]] = []

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        """Send until the end of the context."""
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(self._send(tasks))
            yield
            sending.cancel()

    async def _send(self, tasks: asyncio.TaskGroup) -> None:
        due_s = time.perf_counter()
        while True:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            tasks.create_task(self._call(due_s))
            due_s += 1 / self._rate

    async def _call(self, due_s: float) -> None:
        await self._client.infer("digits", {"pixels": np.ones((1, 64), np.float32)}, timeout_s=120)
        self.latencies.append((due_s, time.perf_counter() - due_s))

    def between(self, start_s: float, end_s: float) -> tuple[float, float]:
        """Return the median and the 99th percentile, in milliseconds, of what was due then."""
        found = sorted(taken for due_s, taken in self.latencies if start_s <= due_s < end_s)
        return 1e3 * median(found), 1e3 * found[int(0.99 * len(found))]


async def _load(pipeline: Pipeline, caller: Caller, way: str, file: Path, target: Path) -> Measured:
    """Measure one load of a file as a model."""
    start_s = time.perf_counter()
    await asyncio.sleep(BASE_S)
    (target / "1").mkdir(parents=True)
    os.link(file, target / "1" / "model.onnx")
    began_s = time.perf_counter()
    await pipeline.models.reload()
    while pipeline.models.catalog.versions(State.LOADING):  # noqa: ASYNC110 - nothing signals it
        await asyncio.sleep(0.01)
    ended_s = time.perf_counter()
    pipeline.models.catalog.lookup(target.name)
    shutil.rmtree(target)
    await pipeline.models.reload()
    await asyncio.sleep(1.0)  # what was due during the load has been answered
    before = caller.between(start_s, began_s)
    return Measured(way, ended_s - began_s, before, caller.between(began_s, ended_s))


async def _measure(way: str, tuning: Tuning, rate: float, file: Path, repository: Path) -> Measured:
    models = {"repository": repository}
    settings = make_settings({"topics": {"partitions": 4}, "models": models})
    log = MemoryLog()
    await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
    pipeline = Pipeline(settings, log, tuning=tuning)
    async with running(pipeline), Client(log=log, settings=settings) as client:
        caller = Caller(client, rate)
        async with caller.calling():
            return await _load(pipeline, caller, way, file, repository / "large")


async def _measure_loads(rounds: int, rate: float, file: Path, repository: Path) -> list[Measured]:
    """Measure loads in both ways alternately, and print each."""
    found: list[Measured] = []
    for _ in range(rounds):
        for way, tuning in WAYS.items():
            found.append(await _measure(way, tuning, rate, file, repository))
            print(found[-1], flush=True)
    return found


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="ONNX file that is loaded")
    parser.add_argument("--pairs", type=int, default=5, help="of readings of the signature")
    parser.add_argument("--rounds", type=int, default=5, help="of loads")
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with TemporaryDirectory(dir=".") as directory:
        file, repository = Path(directory) / "model.onnx", Path(directory) / "models"
        if arguments.model is None:
            write_resnet50(file)
        else:
            shutil.copy(arguments.model, file)
        file_bytes = file.stat().st_size
        shutil.copytree(SERVED, repository / "digits")
        pauses = [
            _measure_pause(way, tuning, file)
            for _ in range(arguments.pairs)
            for way, tuning in WAYS.items()
        ]
        loads = asyncio.run(_measure_loads(arguments.rounds, arguments.rate, file, repository))
    found = {
        "machine": describe_machine(),
        "file_bytes": file_bytes,
        "pauses": pauses,
        "loads": loads,
    }
    record(RESULTS / "loading.json", found)
    for way in WAYS:
        longest = sorted(each.longest_ms for each in pauses if each.way == way)
        print(f"file read {way}: longest pauses", *(f"{each:.0f}" for each in longest), "ms")
        ratios = [each.during_ms[1] / each.before_ms[1] for each in loads if each.way == way]
        if ratios:
            print(f"99th percentile during a load: {median(ratios):.1f} times that before it")


if __name__ == "__main__":
    main()
