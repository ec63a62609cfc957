"""Tables of docs/scaling.md: the resources for larger rates, by calculation and by simulation.

    python -m benchmarks.scaling        writes the page's tables from the recorded results

On paper: unit costs as `python -m benchmarks.apart` and `make bench` measured them, times a rate.
By simulation: how long requests wait for their process when partitions are dealt out to many of
them, evenly filled or by keys of which some are hot. A process is taken for a server that needs the
same time for each request, which it does when it is busy; arrivals are Poisson.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.apart import APART, Apart, Form, OfSize
from benchmarks.contestants import FUSED
from benchmarks.page import with_tables
from benchmarks.plan import (
    BUSY,
    GPUS,
    PARTITIONS_PER_PROCESS,
    Costs,
    capacities,
    plan_resources,
)
from benchmarks.results import LATEST, Results

PAGE = Path("docs/scaling.md")
RATES_PER_S = (1_000, 10_000, 100_000)
KEYS = 10_000
UTILISATIONS = (0.5, 0.7, 0.8, 0.9)
PROCESSES = (1, 8, 64)
SIMULATED = 400_000


class Waiting(NamedTuple):
    """Waiting times in units of the service time, and the utilisation of the busiest process."""

    mean: float
    p50: float
    p99: float
    busiest: float


def simulate(processes: int, utilisation: float, *, keyed: bool, seed: int = 0) -> Waiting:
    """Simulate processes that own partitions and receive requests, evenly or by key. With keys, the
    n-th key is requested 1/n as often as the first (Zipf's law).

    Args:
        processes: with `PARTITIONS_PER_PROCESS` each.
        utilisation: of all together, below 1.
        keyed: by `KEYS` keys, instead of evenly.
        seed: equal seeds give equal results.
    """
    random = np.random.default_rng(seed)
    partitions = processes * PARTITIONS_PER_PROCESS
    if keyed:
        weights = 1 / np.arange(1, KEYS + 1)
        shares = np.bincount(random.integers(0, partitions, KEYS), weights, minlength=partitions)
    else:
        shares = np.ones(partitions)
    loads = shares.reshape(processes, PARTITIONS_PER_PROCESS).sum(axis=1)
    loads *= utilisation * processes / loads.sum()
    counts = np.maximum(1, (SIMULATED * loads / loads.sum()).astype(np.int64))
    waits = np.concatenate(
        [_waits(random, float(load), int(count)) for load, count in zip(loads, counts, strict=True)]
    )
    p50, p99 = np.quantile(waits, (0.5, 0.99)).tolist()
    return Waiting(float(waits.mean()), p50, p99, float(loads.max()))


def _waits(random: np.random.Generator, load: float, count: int) -> NDArray[np.float64]:
    """Return the waits by Lindley's recursion with a service time of 1: the sum of arrivals minus
    services, above its running minimum.
    """
    steps = 1 - random.exponential(1 / load, count)
    sums = np.concatenate([[0.0], np.cumsum(steps[1:])])
    waits: NDArray[np.float64] = sums - np.minimum.accumulate(sums)
    return waits


# --- the page ----------------------------------------------------------------------------------


def render(apart: Apart | None, results: Results | None) -> str:
    """Return all tables for which there are results; the simulation needs none."""
    lines: list[str] = []
    if apart is not None:
        lines += _carried(apart)
        for size in apart.sizes:
            lines += _taken(size)
    if results is not None:
        lines += _on_cores(results)
    return "\n".join([*lines, *_simulated()])


def _costs(size: OfSize, form: Form) -> Costs:
    return Costs(form.cpu_us_of, form.broker_us, form.written_bytes, GPUS.get(size.name))


def _carried(apart: Apart) -> Iterator[str]:
    yield "### What one of each carries"
    yield ""
    yield (
        "| requests | stages | µs of processes | of the broker | bytes written | one process |"
        " three brokers | one GPU | binds first |"
    )
    yield "|---|---|---|---:|---:|---:|---:|---:|---|"
    for size in apart.sizes:
        for name, form in size.forms.items():
            found = capacities(_costs(size, form))
            each = " + ".join(f"{us:,.1f}" for us in form.cpu_us_of.values())
            gpu = "" if math.isinf(found.gpu) else f"{found.gpu:,.0f}/s"
            yield (
                f"| {size.name} | {name} | {each} | {form.broker_us:,.1f} "
                f"| {form.written_bytes:,.0f} | {found.process:,.0f}/s | {found.brokers:,.0f}/s "
                f"| {gpu} | {found.first} |"
            )
    yield ""


def _taken(size: OfSize) -> Iterator[str]:
    gpu = GPUS.get(size.name)
    yield f"### {size.name}: {size.value_bytes:,} bytes" + (f", {gpu.model}" if gpu else "")
    yield ""
    yield "| requests/s | stages | processes | partitions | brokers | GPUs |"
    yield "|---:|---|---|---:|---:|---:|"
    for rate_per_s in RATES_PER_S:
        for name, form in size.forms.items():
            found = plan_resources(_costs(size, form), rate_per_s)
            processes = ", ".join(
                f"{count:,}" if len(found.processes) == 1 else f"{count:,} {stages}"
                for stages, count in found.processes.items()
            )
            gpus = f"{found.gpus:,}" if found.gpus else ""
            yield (
                f"| {rate_per_s:,} | {name} | {processes} | {found.partitions:,} "
                f"| {found.brokers:,} | {gpus} |"
            )
    yield ""


def _on_cores(results: Results) -> Iterator[str]:
    yield "### Models that compute on cores"
    yield ""
    yield (
        "| model | one process | µs of its cores | "
        + " | ".join(f"processes for {rate_per_s:,}/s, cores" for rate_per_s in RATES_PER_S)
        + " |"
    )
    yield "|---|---:|---:|" + "---:|" * len(RATES_PER_S)
    for subject in results.subjects:
        contest = subject.contest(FUSED)
        per_s, cpu_us = (contest and contest.spread(each) for each in ("per_s", "cpu_us"))
        if not per_s or not cpu_us:
            continue
        taken = " | ".join(
            f"{math.ceil(rate_per_s / (BUSY * per_s[0])):,}, {rate_per_s * cpu_us[0] / 1e6:,.1f}"
            for rate_per_s in RATES_PER_S
        )
        yield f"| {subject.name} | {per_s[0]:,.0f}/s | {cpu_us[0]:,.1f} | {taken} |"
    yield ""


def _simulated() -> Iterator[str]:
    yield "### How long requests wait for their process"
    yield ""
    yield "| busy | processes | filled | mean wait | p50 | p99 | busiest process |"
    yield "|---:|---:|---|---:|---:|---:|---:|"
    for utilisation in UTILISATIONS:
        for processes in PROCESSES:
            for keyed in (False, True) if processes > 1 else (False,):
                found = simulate(processes, utilisation, keyed=keyed)
                filled = "by key" if keyed else "evenly"
                start = f"| {utilisation:.0%} | {processes} | {filled} "
                if found.busiest >= 1:
                    yield f"{start}| grows | grows | grows | {found.busiest:.0%} |"
                else:
                    yield (
                        f"{start}| {found.mean:.1f} | {found.p50:.1f} | {found.p99:.1f} "
                        f"| {found.busiest:.0%} |"
                    )


def write_scaling(results: Results | None) -> None:
    """Write the tables between the marks of the page."""
    apart = msgspec.json.decode(APART.read_bytes(), type=Apart) if APART.exists() else None
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_tables(page, render(apart, results)), encoding="utf-8")


@click.command()
def main() -> None:
    """Write docs/scaling.md's tables from the recorded results that exist."""
    results = msgspec.json.decode(LATEST.read_bytes(), type=Results) if LATEST.exists() else None
    write_scaling(results)


if __name__ == "__main__":
    main()
