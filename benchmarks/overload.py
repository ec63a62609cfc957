"""A minute at twice the capacity: which requests are answered in time, which are refused and when,
how memory grows, and how long recovery takes.

    python -m benchmarks.overload [--seconds N] [--factor N] [--timeout-ms N] [--out DIRECTORY]

The four services run in this process on the embedded log; the sender and the reader of the answers
share the event loop with them. The model sleeps for 10 ms and 1 ms for each row, 16 rows at most;
its capacity is measured first, with a queue that never ends.
Requests of one row then arrive as a Poisson process at `factor` times that, with a deadline. After
the load, single requests show when the service is as quick as before it.

Writes `overload.json` and `overload.svg`; exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop
from matplotlib.figure import Figure
from prometheus_client import CollectorRegistry

from benchmarks.machine import describe_machine
from benchmarks.plots import Line, plot_over_time, write_plot
from headrace.config import Settings, make_settings
from headrace.log.memory import MemoryLog
from headrace.log.port import Consumer, NewRecord, Producer, TopicPartition
from headrace.protocol.codec import encode_request
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import configure_logging
from headrace.telemetry.metrics import Metrics
from headrace.topics import Topic

PARTITIONS = 4
RETENTION_BYTES = 256 * 1024
"""Retention of each partition. The embedded log's memory is not the services', so it is filled
soon.
"""
MAX_ROWS = 16
MODEL = """
import time
import numpy as np


class Model:
    inputs = [("x", "FP32", (-1, 1))]
    outputs = [("y", "FP32", (-1, 1))]

    def run(self, inputs):
        time.sleep(0.010 + 0.001 * len(inputs["x"]))
        return {"y": inputs["x"]}
"""
CALIBRATE_S = 5.0
TICK_S = 0.005
BIN_S = 0.5
PROBES = 20
PROBE_EVERY_S = 0.1
SETTLE_S = 5.0
TARGETS = {"goodput_of_capacity": 0.9, "unanswered": 0, "recovery_s": 1.0, "memory_growth": 0.1}


@dataclass
class AnswerCounts:
    """Counts of the answers.

    Attributes:
        codes: how many answers had which `x-status`.
        times: by status, when they were written, in seconds of the epoch.
        late: answers that came after the deadline, although they were `ok`.
    """

    codes: Counter[str] = field(default_factory=Counter)
    times: dict[str, list[float]] = field(default_factory=dict)
    late: int = 0


class OverloadRun:
    """Sends requests and reads their answers."""

    def __init__(self, settings: Settings, producer: Producer, reader: Consumer) -> None:
        self._requests = settings.topic(Topic.REQUESTS)
        self._producer = producer
        self._reader = reader
        self._value = encode_request("application/msgpack", "model", {"x": np.ones((1, 1), "f4")})
        self._deadlines: dict[bytes, float] = {}
        self._progress = asyncio.Event()
        self.sent = 0
        self.seen = AnswerCounts()
        self.rss_mb: list[tuple[float, float]] = []

    async def send(self, count: int, timeout_ms: int | None) -> None:
        """Send this many requests at once, round-robin."""
        parts: dict[int, list[NewRecord]] = {}
        deadline_ms = int(time.time() * 1000) + (timeout_ms or 0)
        for _ in range(count):
            name = b"%d" % self.sent
            headers = [("kafka_correlationId", name)]
            if timeout_ms is not None:
                headers.append(("x-deadline-ms", b"%d" % deadline_ms))
                self._deadlines[name] = deadline_ms / 1000
            parts.setdefault(self.sent % PARTITIONS, []).append(
                NewRecord(None, self._value, headers)
            )
            self.sent += 1
        for number, records in parts.items():
            for sent in await self._producer.send(TopicPartition(self._requests, number), records):
                await sent.acknowledged

    async def read(self, until: asyncio.Event) -> None:
        """Count answers until cancelled."""
        while not until.is_set():
            for records in (await self._reader.poll(0.05, 5000)).values():
                for record in records:
                    headers = dict(record.headers)
                    status = (headers["x-status"] or b"").decode()
                    at_s = record.timestamp / 1000
                    self.seen.codes[status] += 1
                    self.seen.times.setdefault(status, []).append(at_s)
                    deadline_s = self._deadlines.pop(headers["kafka_correlationId"] or b"", at_s)
                    self.seen.late += status == "ok" and at_s > deadline_s
            self._progress.set()

    async def watch_memory(self, until: asyncio.Event) -> None:
        """Record the resident memory twice per second."""
        process = psutil.Process()
        while not until.is_set():
            self.rss_mb.append((time.time(), process.memory_info().rss / 1e6))
            await asyncio.sleep(BIN_S)

    @property
    def answered(self) -> int:
        """Number of answers."""
        return self.seen.codes.total()

    async def all_answered(self, deadline_s: float) -> None:
        """Wait for missing answers, up to the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                while self.answered < self.sent:
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            pass


async def calibrate(load: OverloadRun) -> float:
    """Return the answers per second under a constant backlog, without deadlines."""
    await load.send(200, None)
    await load.all_answered(60)
    before, began_s = load.answered, time.monotonic()
    while time.monotonic() < began_s + CALIBRATE_S:
        if load.sent - load.answered < 8 * MAX_ROWS:
            await load.send(4 * MAX_ROWS, None)
        await asyncio.sleep(TICK_S)
    done, elapsed_s = load.answered - before, time.monotonic() - began_s
    await load.all_answered(60)
    return done / elapsed_s


async def overload(load: OverloadRun, per_s: float, seconds: float, timeout_ms: int) -> None:
    """Send Poisson arrivals, once per tick."""
    chance = random.Random(1)
    began_s = time.monotonic()
    due_s = began_s
    while (now_s := time.monotonic()) < began_s + seconds:
        count = 0
        while due_s <= now_s:
            due_s += chance.expovariate(per_s)
            count += 1
        if count:
            await load.send(count, timeout_ms)
        await asyncio.sleep(TICK_S)


async def probe(load: OverloadRun, ended_s: float, usual_s: float) -> float:
    """Return the seconds from the load's end until latency is about that of an idle pipeline."""
    for _ in range(PROBES):
        sent_s = time.monotonic()
        await load.send(1, None)
        await load.all_answered(SETTLE_S)
        if time.monotonic() - sent_s <= 2 * usual_s:
            return sent_s - ended_s
        await asyncio.sleep(PROBE_EVERY_S)
    return float("inf")


async def usual(load: OverloadRun) -> float:
    """Return the median seconds of a single request without load."""
    found = []
    for _ in range(PROBES):
        sent_s = time.monotonic()
        await load.send(1, None)
        await load.all_answered(SETTLE_S)
        found.append(time.monotonic() - sent_s)
    return float(np.median(found))


async def measure(settings: Settings, given: argparse.Namespace) -> dict[str, Any]:
    """Run all phases, one after the other."""
    responses = [TopicPartition(settings.topic(Topic.RESPONSES), n) for n in range(PARTITIONS)]
    ending = asyncio.Event()
    instruments = Instruments(Metrics(CollectorRegistry()))
    async with MemoryLog(retention_bytes=RETENTION_BYTES) as log:
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        async with (
            running(Pipeline(settings, log, instruments=instruments)),
            log.producer() as producer,
            log.reader(responses) as reader,
            asyncio.TaskGroup() as tasks,
        ):
            for partition in responses:
                reader.seek(partition, 0)
            load = OverloadRun(settings, producer, reader)
            tasks.create_task(load.read(ending), name="read")
            usual_s = await usual(load)
            capacity = await calibrate(load)
            load.seen, load.sent = AnswerCounts(), 0
            tasks.create_task(load.watch_memory(ending), name="memory")
            report = await _overloaded(load, capacity, given, instruments.metrics.registry)
            report["usual_latency_s"] = usual_s
            report["recovery_s"] = await probe(load, report.pop("ended_s"), usual_s)
            ending.set()
    return report


async def _overloaded(
    load: OverloadRun, capacity: float, given: argparse.Namespace, registry: CollectorRegistry
) -> dict[str, Any]:
    before = _runs(registry)
    began_s, began_at_s = time.monotonic(), time.time()
    await overload(load, given.factor * capacity, given.seconds, given.timeout_ms)
    ended_s, ended_at_s = time.monotonic(), time.time()
    offered = load.sent
    await load.all_answered(SETTLE_S)
    drained_s = time.monotonic() - ended_s
    runs, compute_s, rows = (now - then for now, then in zip(_runs(registry), before, strict=True))
    return _report(load, capacity, (began_at_s, ended_at_s), offered) | {
        "offered_per_s": offered / (ended_s - began_s),
        "timeout_ms": given.timeout_ms,
        "drained_s": drained_s,
        "mean_batch_rows": rows / runs,
        "busy": compute_s / (ended_s - began_s),
        "run_in_vain": 1 - load.seen.codes["ok"] / rows,
        "counted": _counted(registry),
        "ended_s": ended_s,
    }


def _report(
    load: OverloadRun, capacity: float, span_s: tuple[float, float], offered: int
) -> dict[str, Any]:
    seen, (began_s, ended_s) = load.seen, span_s
    in_time = seen.codes["ok"] - seen.late
    rss = [mb for at_s, mb in load.rss_mb if began_s <= at_s <= ended_s]
    third = max(1, len(rss) // 3)
    early, late = float(np.median(rss[third : 2 * third])), float(np.median(rss[-third:]))
    edges = np.arange(began_s, ended_s + BIN_S, BIN_S)
    series = {
        status: (np.histogram(times, edges)[0] / BIN_S).tolist()
        for status, times in seen.times.items()
    }
    return {
        "machine": describe_machine(),
        "load_average": os.getloadavg()[0],
        "capacity_per_s": capacity,
        "requests": offered,
        "answers": dict(seen.codes),
        "ok_but_late": seen.late,
        "unanswered": offered - seen.codes.total(),
        "goodput_per_s": in_time / (ended_s - began_s),
        "goodput_of_capacity": in_time / (ended_s - began_s) / capacity,
        "rss_mb": {"second_third": early, "last_third": late, "max": max(rss)},
        "memory_growth": late / early - 1,
        "series": {"bin_s": BIN_S, "per_s": series, "rss_mb": rss},
    }


def _runs(registry: CollectorRegistry) -> tuple[float, float, float]:
    """Return the number of model runs, their total seconds, and their rows."""
    version = {"model": "model", "version": "1"}
    return (
        registry.get_sample_value("headrace_compute_duration_seconds_count", version) or 0.0,
        registry.get_sample_value("headrace_compute_duration_seconds_sum", version) or 0.0,
        registry.get_sample_value("headrace_rows_total", version) or 0.0,
    )


def _counted(registry: CollectorRegistry) -> dict[str, float]:
    """Return expired and refused requests by stage, and batches by closing reason."""
    names = (
        "headrace_expired_requests_total",
        "headrace_refused_requests_total",
        "headrace_batches_total",
    )
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name in names
    }


def main() -> int:
    """Measure, write the results, and report missed targets."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--timeout-ms", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    configure_logging("warning")
    with tempfile.TemporaryDirectory() as repository:
        version = Path(repository, "model", "1")
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL)
        (version.parent / "model.toml").write_text(
            f'backend = "python"\nmax_batch_size = {MAX_ROWS}\n'
        )
        settings = make_settings(
            {"models": {"repository": repository}, "topics": {"partitions": PARTITIONS}}
        )
        report = uvloop.run(measure(settings, given))
    report["targets"] = TARGETS
    missed = [
        name
        for name, target in TARGETS.items()
        if (report[name] < target if name == "goodput_of_capacity" else report[name] > target)
    ]
    report["missed"] = missed
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "overload.json").write_text(json.dumps(report, indent=1) + "\n")
    write_plot(given.out / "overload.svg", _plot(report))
    shown = {name: value for name, value in report.items() if name not in ("series", "machine")}
    print(json.dumps(shown, indent=1))
    return 1 if missed else 0


def _plot(report: dict[str, Any]) -> Figure:
    series = report["series"]["per_s"]
    seconds = [BIN_S * place for place in range(len(next(iter(series.values()))))]
    lines = [
        Line("answered in time", "good", series.get("ok", [])),
        Line("refused early", "refused", series.get("OVERLOADED", [])),
        Line("expired", "expired", series.get("DEADLINE_EXCEEDED", [])),
    ]
    shown = [line for line in lines if line.values]
    return plot_over_time(seconds, shown, report["capacity_per_s"])


if __name__ == "__main__":
    sys.exit(main())
