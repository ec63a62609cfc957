"""Requests that arrive by chance, for simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.replay.events import NO_TIMEOUT, Arrivals, Farm, Kind, Limits, Observed, Simulation
from headrace.services.batcher.forming import Forming

START_US = 1_700_000_000_000_000
KIND = Kind("m", "1", ())


def arrivals(
    at_us: Sequence[int],
    *,
    rows: int = 1,
    timeout_us: int = NO_TIMEOUT,
    kinds: tuple[Kind, ...] = (KIND,),
) -> Arrivals:
    """Requests at these microseconds after the start, of the kinds in turn."""
    count = len(at_us)
    return Arrivals(
        START_US + np.asarray(at_us, dtype=np.int64),
        np.full(count, rows, dtype=np.int64),
        np.full(count, 256, dtype=np.int64),
        np.full(count, timeout_us, dtype=np.int64),
        np.arange(count, dtype=np.int64) % len(kinds),
        kinds,
    )


def poisson(count: int, per_us: float, seed: int) -> Arrivals:
    """A Poisson process."""
    gaps_us = np.random.default_rng(seed).exponential(1 / per_us, count)
    return arrivals(np.cumsum(gaps_us).astype(np.int64).tolist())


def simulated(
    arriving: Arrivals,
    service_us: Callable[[int], int],
    *,
    instances: int = 1,
    max_batch_size: int = 32,
    max_queue_delay_ms: float = 0.0,
) -> Observed:
    """The batcher's own rules on these arrivals."""
    limits = Limits(max_batch_size, 1 << 40, max_queue_delay_ms)
    farm = Farm(
        {kind.key: instances for kind in arriving.kinds}, lambda _model, rows: service_us(rows)
    )
    return Simulation(arriving, Forming(lambda _name, _version: limits, "test"), farm).run()
