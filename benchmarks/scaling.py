"""docs/scaling.md: what larger rates take, on paper and by simulation.

    python -m benchmarks.scaling        writes the page's tables from the recorded results

On paper: unit costs as `make bench` measured them, times a rate. By simulation: how long requests
wait for their process when partitions are dealt out to many of them, evenly filled or by keys of
which some are hot. A process is taken for a server that needs the same time for each request,
which it does when it is busy; arrivals are Poisson.
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

from benchmarks.contestants import FUSED
from benchmarks.page import with_tables
from benchmarks.results import Results, SubjectResults

RESULTS = Path("benchmarks/results/latest.json")
PAGE = Path("docs/scaling.md")
RATES_PER_S = (1_000, 10_000, 100_000, 1_000_000)
BUSY = 0.7
"""How busy processes are planned to be; the simulation says what that costs in waiting."""

KEYS = 10_000
UTILISATIONS = (0.5, 0.7, 0.8, 0.9)
PROCESSES = (1, 8, 64)
PARTITIONS_PER_PROCESS = 4
SIMULATED = 400_000


class Needs(NamedTuple):
    """What a rate takes."""

    rate_per_s: int
    processes: int
    cores: float
    broker_cores: float


def needs(cpu_us: float, broker_us: float, per_process_s: float, rate_per_s: int) -> Needs:
    """By unit costs.

    Args:
        cpu_us: of Headrace's processes, for each answer.
        broker_us: of the broker, for each answer.
        per_process_s: answers per second of one saturated process.
        rate_per_s: answers per second that are wanted.
    """
    return Needs(
        rate_per_s,
        math.ceil(rate_per_s / (BUSY * per_process_s)),
        rate_per_s * cpu_us / 1e6,
        rate_per_s * broker_us / 1e6,
    )


class Waiting(NamedTuple):
    """How long requests wait for their process, in service times, and how busy the busiest is."""

    mean: float
    p50: float
    p99: float
    busiest: float


def simulate(processes: int, utilisation: float, *, keyed: bool, seed: int = 0) -> Waiting:
    """Partitions are dealt out to processes, requests to partitions: evenly, or by their keys,
    the n-th of which is asked 1/n as often as the first (Zipf's law).

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
    """Lindley's recursion for a service time of 1: the wait is how far the sum of what came in
    beyond what could be served lies above its lowest point.
    """
    steps = 1 - random.exponential(1 / load, count)
    sums = np.concatenate([[0.0], np.cumsum(steps[1:])])
    waits: NDArray[np.float64] = sums - np.minimum.accumulate(sums)
    return waits


# --- the page ----------------------------------------------------------------------------------


def render(results: Results | None) -> str:
    """Both tables; without results, the second."""
    lines: list[str] = []
    if results is not None:
        for subject in results.subjects:
            lines += _on_paper(subject)
    return "\n".join([*lines, *_simulated()])


def _on_paper(subject: SubjectResults) -> Iterator[str]:
    contest = subject.contest(FUSED)
    if contest is None or not contest.runs:
        return
    per_s, cpu_us, broker_us = (
        spread[0]
        for each in ("per_s", "cpu_us", "broker_us")
        if (spread := contest.spread(each)) is not None
    )
    yield f"### {subject.name}"
    yield ""
    yield (
        f"From {per_s:,.0f} answers a second of one process, {cpu_us:,.1f} µs of its processor "
        f"time and {broker_us:,.1f} µs of the broker's for each; processes {BUSY:.0%} busy."
    )
    yield ""
    yield "| answers/s | processes | cores for Headrace | cores for brokers |"
    yield "|---:|---:|---:|---:|"
    for rate_per_s in RATES_PER_S:
        found = needs(cpu_us, broker_us, per_s, rate_per_s)
        yield (
            f"| {rate_per_s:,} | {found.processes:,} | {found.cores:,.1f} "
            f"| {found.broker_cores:,.1f} |"
        )
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
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_tables(page, render(results)), encoding="utf-8")


@click.command()
def main() -> None:
    """Write docs/scaling.md's tables from the recorded results, where there are any."""
    recorded = None
    if RESULTS.exists():
        recorded = msgspec.json.decode(RESULTS.read_bytes(), type=Results)
    write_scaling(recorded)


if __name__ == "__main__":
    main()
