"""Comparison of the simulation with real runs: the 99th percentile that `headrace replay simulate`
predicts from a run's arrivals, and the measured one.

    python -m benchmarks.simulation [--model NAME,...] [--load SHARE,...] [--rounds N] [--seconds N]

The four services run in this process on the embedded log. Requests of one row arrive as a Poisson
process, whose times come from a separate process. The compared latency is the sum of the times in
an answer: from the beginning of reading a request until its answer was encoded. S(b) is learned
from the run's own answers, and a second time from those of the previous run, at another load.
*paced* is a model whose runs wait for 200 ms and 25 ms per row, as for a device: on a busy machine
it is the only model whose runs always take the same time. Loads are shares of the capacity that
follows from these times. Every round has all loads; the result is the median over the rounds.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import numpy as np
import uvloop
from numpy.typing import NDArray

from benchmarks.campaign import SCRATCH
from benchmarks.embedded_load import (
    PARTITIONS,
    LoadStep,
    reported_latencies_us,
    running_pipeline,
    send_load,
    wait_for_answers,
)
from benchmarks.machine import describe_machine
from benchmarks.results import RESULTS, record
from benchmarks.subjects import SUBJECTS, BenchmarkModel, waiting
from headrace.config import Settings, make_settings
from headrace.log.port import Log
from headrace.services.batcher.batcher import DynamicBatcher
from headrace.telemetry.logs import configure_logging
from headrace.tools.replay.jobs import open_recording
from headrace.tools.replay.recording import Selection
from headrace.tools.simulate.arrivals import read_arrivals
from headrace.tools.simulate.events import Arrivals, BatchLimits
from headrace.tools.simulate.scenarios import (
    Scenario,
    ScenarioResult,
    Served,
    latest_models,
    resolved,
    served_now,
    simulate,
)
from headrace.tools.simulate.service_times import ServiceTime, learn, measure
from headrace.topics import Topic

WARM_UP_S = 1.0
WARM_UP_REQUESTS = 50
SLOW_MEASURE_S = 2.0
WITHIN = 0.15


class RealRun(NamedTuple):
    """A real run: latency of each request in microseconds, S(b), and the arrivals."""

    real_us: NDArray[np.int64]
    service: Mapping[str, ServiceTime]
    arrivals: Arrivals


class ComparedRun(NamedTuple):
    """A real run and its simulation, in milliseconds; `of_run_before` uses the S(b) of the previous
    run.
    """

    model: str
    load: float
    per_s: float
    requests: int
    real_p50_ms: float
    real_p99_ms: float
    simulated_p50_ms: float
    simulated_p99_ms: float
    of_run_before_p99_ms: float | None
    simulated_load: float
    machine_load: float
    times: str


def paced(scratch: Path) -> BenchmarkModel:
    """Return a model whose runs wait for 200 ms and 25 ms per row, whatever the machine's load."""
    return waiting("paced", scratch, run_s=0.2, row_s=0.025)


MODELS = {"magika": SUBJECTS["magika"], "resnet50": SUBJECTS["resnet50"], "paced": paced}


def settings_of(subject: BenchmarkModel) -> Settings:
    """Return settings with the embedded log and this model only."""
    models = {"repository": str(subject.repository)}
    return make_settings({"models": models, "topics": {"partitions": PARTITIONS}})


# --- the simulated one -------------------------------------------------------------------------


async def learned(log: Log, settings: Settings) -> Mapping[str, ServiceTime]:
    """Return S(b) learned from the answers in the log."""
    async with open_recording(log, settings.topic(Topic.RESPONSES), Selection()) as answers:
        return await learn(answers)


async def recorded(log: Log, settings: Settings, skipped: int) -> Arrivals:
    """Return the requests in the log."""
    async with open_recording(log, settings.topic(Topic.REQUESTS), Selection()) as requests:
        read = await read_arrivals(requests, 0)
    return resolved(read.arrivals, latest_models(settings, None)).chosen(slice(skipped, None))


def outcome(
    arrivals: Arrivals, settings: Settings, times: Mapping[str, ServiceTime]
) -> ScenarioResult:
    """Simulate the arrivals."""
    models = latest_models(settings, None)
    now = served_now(settings, arrivals, times, models)
    return simulate(arrivals, now, Scenario(), lambda limits: DynamicBatcher(limits, "simulated"))


class SimulationCheck:
    """Real runs of one model and their simulations; keeps the S(b) of the previous run."""

    def __init__(self, subject: BenchmarkModel) -> None:
        self._subject = subject
        self._settings = settings_of(subject)
        self._before: Mapping[str, ServiceTime] | None = None

    async def capacity_per_s(self) -> float:
        """Return the capacity by a new measurement of S(b)."""
        versions = latest_models(self._settings, None)
        version = versions[self._subject.name]
        service_time = await asyncio.to_thread(measure, version, SLOW_MEASURE_S)
        limits = served_limits(self._settings, self._subject.name, service_time)
        return limits.known().capacity_per_s()

    async def compared(self, load: LoadStep) -> ComparedRun:
        """Run the load, and simulate its arrivals."""
        subject, settings, busy = self._subject, self._settings, os.getloadavg()[0]
        run = await self._run(load)
        found = outcome(run.arrivals, settings, run.service)
        before = None
        if self._before is not None:
            before = outcome(run.arrivals, settings, self._before)
        self._before = run.service
        p50_ms, p99_ms = (np.quantile(run.real_us, (0.5, 0.99)) / 1000).tolist()
        return ComparedRun(
            subject.name,
            load.share,
            load.per_s,
            len(run.real_us),
            p50_ms,
            p99_ms,
            found.latency_ms(0.5),
            found.latency_ms(0.99),
            None if before is None else before.latency_ms(0.99),
            float(found.load),
            busy,
            str(run.service[subject.name]),
        )

    async def _run(self, load: LoadStep) -> RealRun:
        """Run the load after a warm-up, which is not counted."""
        subject, settings = self._subject, self._settings
        warm_up_s = max(WARM_UP_S, WARM_UP_REQUESTS / load.per_s)
        due: list[int] = []
        async with running_pipeline(settings) as log:
            warm_up = load._replace(seconds=warm_up_s, seed=load.seed + 1000)
            await send_load(log, settings, subject.values, warm_up, due)
            await wait_for_answers(log, settings, skipped := len(due))
            await send_load(log, settings, subject.values, load, due)
            await wait_for_answers(log, settings, len(due))
            real_us = await reported_latencies_us(log, settings, skipped)
            service = await learned(log, settings)
            arrivals = await recorded(log, settings, skipped)
        gc.unfreeze()
        sent = len(due) - skipped
        if len(real_us) != sent:
            raise RuntimeError(f"expected {sent} answers in the log, got {len(real_us)}")
        return RealRun(real_us, service, arrivals)


def served_limits(settings: Settings, model: str, service_time: ServiceTime) -> Served:
    """Return the model with its current limits."""
    version = latest_models(settings, None)[model]
    limits = (version.max_batch_size, version.max_batch_bytes, version.max_queue_delay_ms)
    return Served(BatchLimits(*limits), version.config.instances, service_time)


def summary(rows: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Return the median ratios of simulated to real percentiles, by model and load."""
    found = []
    for model, load in dict.fromkeys((row.model, row.load) for row in rows):
        runs = [row for row in rows if (row.model, row.load) == (model, load)]
        p99 = [row.simulated_p99_ms / row.real_p99_ms for row in runs]
        before = [
            row.of_run_before_p99_ms / row.real_p99_ms
            for row in runs
            if row.of_run_before_p99_ms is not None
        ]
        found.append(
            {
                "model": model,
                "load": load,
                "rounds": len(runs),
                "real_p99_ms": median(row.real_p99_ms for row in runs),
                "simulated_over_real_p50": median(
                    row.simulated_p50_ms / row.real_p50_ms for row in runs
                ),
                "simulated_over_real_p99": median(p99),
                "lowest_and_highest": [min(p99), max(p99)],
                "times_of_run_before_p99": median(before) if before else None,
                "within_15_percent": bool(abs(median(p99) - 1) <= WITHIN),
            }
        )
    return found


async def compare(
    subject: BenchmarkModel, loads: Sequence[float], rounds: int, seconds: float
) -> list[ComparedRun]:
    """Run all loads in each round."""
    comparison, rows = SimulationCheck(subject), []
    for number in range(rounds):
        capacity_per_s = await comparison.capacity_per_s()
        for share in loads:
            load = LoadStep(share, capacity_per_s * share, seconds, number)
            rows.append(await comparison.compared(load))
            click.echo(json.dumps(rows[-1]._asdict()), err=True)
    return rows


def write(name: str, results: Mapping[str, Any]) -> None:
    """Write results as JSON, with a description of the machine."""
    record(RESULTS / name, {"machine": describe_machine(), **results})


def numbers(text: str) -> list[float]:
    """Parse numbers separated by commas."""
    return [float(each) for each in text.split(",")]


@click.command(help=__doc__)
@click.option("--model", "names", default="magika,paced", show_default=True)
@click.option("--load", "loads", default="0.3,0.5,0.8", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--seconds", default=20.0, show_default=True)
def main(names: str, loads: str, rounds: int, seconds: float) -> None:
    configure_logging("warning")
    rows: list[ComparedRun] = []
    for name in names.split(","):
        subject = MODELS[name](SCRATCH)
        rows += uvloop.run(compare(subject, numbers(loads), rounds, seconds))
    found = summary(rows)
    write("simulation.json", {"summary": found, "runs": [row._asdict() for row in rows]})
    click.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
