"""Requests that arrive by chance, for simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from headrace.models.profiling.latency import Latency
from headrace.services.batcher.batcher import DynamicBatcher
from headrace.tools.simulate.events import (
    NO_TIMEOUT,
    Arrivals,
    ExecutorPool,
    Kind,
    Observed,
    SimulatedLimits,
    Simulation,
)

START_US = 1_700_000_000_000_000
KIND = Kind("m", "1", ())


def arrivals(
    at_us: Sequence[int],
    *,
    timeout_us: int = NO_TIMEOUT,
    kinds: tuple[Kind, ...] = (KIND,),
) -> Arrivals:
    """Requests at these microseconds after the start, of the kinds in turn."""
    count = len(at_us)
    return Arrivals(
        START_US + np.asarray(at_us, dtype=np.int64),
        np.ones(count, dtype=np.int64),
        np.full(count, 256, dtype=np.int64),
        np.full(count, timeout_us, dtype=np.int64),
        np.arange(count, dtype=np.int64) % len(kinds),
        kinds,
    )


def poisson(
    count: int,
    per_us: float,
    seed: int,
    *,
    timeout_us: int = NO_TIMEOUT,
    kinds: tuple[Kind, ...] = (KIND,),
) -> Arrivals:
    """A Poisson process, of the kinds in turn."""
    gaps_us = np.random.default_rng(seed).exponential(1 / per_us, count)
    at_us = np.cumsum(gaps_us).astype(np.int64).tolist()
    return arrivals(at_us, timeout_us=timeout_us, kinds=kinds)


def together(*parts: Arrivals) -> Arrivals:
    """Several streams of requests at the same time."""
    kinds = tuple(kind for part in parts for kind in part.kinds)
    first = np.cumsum([0, *(len(part.kinds) for part in parts[:-1])])
    columns = [np.concatenate(each) for each in zip(*(part[:4] for part in parts), strict=True)]
    numbers = np.concatenate([part.kind + start for part, start in zip(parts, first, strict=True)])
    order = np.argsort(columns[0], kind="stable")
    at_us, rows, size_bytes, timeout_us = (column[order] for column in columns)
    return Arrivals(at_us, rows, size_bytes, timeout_us, numbers[order], kinds)


class Setup(NamedTuple):
    """How a simulation is set up; see `SimulatedLimits` and `ExecutorPool`."""

    instances: int = 1
    max_batch_size: int = 32
    max_queue_delay_ms: float = 0.0
    prepare_us: int = 0
    ahead: bool = False
    latency: Latency | None = None


PLAIN = Setup()


def simulated(
    arriving: Arrivals, service_us: Callable[[int], int], setup: Setup = PLAIN
) -> Observed:
    """The batcher's own rules on these arrivals. With a latency, it learns from each run."""
    latency = setup.latency
    limits = SimulatedLimits(setup.max_batch_size, 1 << 40, setup.max_queue_delay_ms, latency)

    def run_us(_model: str, rows: int) -> int:
        took_us = service_us(rows)
        if latency is not None:
            latency.observe((), rows, took_us)
        return took_us

    instances = {kind.key: setup.instances for kind in arriving.kinds}
    leads_us = dict.fromkeys(instances, setup.prepare_us) if setup.ahead else {}
    executors = ExecutorPool(instances, run_us, setup.prepare_us, leads_us)
    policy = DynamicBatcher(lambda _name, _version: limits, "test")
    return Simulation(arriving, policy, executors).run()
