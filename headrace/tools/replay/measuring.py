"""Quick measurement of S(b): loads a model's backend and runs it at a few batch sizes."""

from __future__ import annotations

import time
from collections.abc import Iterator

from headrace.errors import ConfigurationError
from headrace.models.backends.warmup import sized_inputs
from headrace.models.version import ModelVersion
from headrace.tools.replay.service_times import ServiceTime, fitted

MEASURE_S = 0.3
"""Duration of the measurement for each batch size."""
MOST_RUNS = 2000
LEAST_RUNS = 5
_FIRST_SIZES = (1, 2, 4)


def measure(version: ModelVersion, measure_s: float = MEASURE_S) -> ServiceTime:
    """Return the median durations of runs with a warm-up sample. Blocks for seconds.

    The executor's work around a run (gathering inputs, splitting outputs, handing over to another
    thread) is not included.

    Raises:
        ConfigurationError: the model cannot be loaded, or cannot run.
    """
    backend = version.new_backend()
    backend.load()
    try:
        backend.warm_up()
        runs: list[tuple[int, float]] = []
        for rows in _sizes(version.max_batch_size):
            inputs = sized_inputs(version.signature, version.config, version.directory, rows)
            times_us: list[float] = []
            end_s = time.perf_counter() + measure_s
            while len(times_us) < LEAST_RUNS or (
                len(times_us) < MOST_RUNS and time.perf_counter() < end_s
            ):
                began_s = time.perf_counter()
                backend.run(inputs)
                times_us.append((time.perf_counter() - began_s) * 1e6)
            runs += [(rows, us) for us in times_us]
    except ConfigurationError:
        raise
    except Exception as error:  # a model may raise anything
        raise ConfigurationError(f"{version.name}/{version.version}: {error}") from error
    finally:
        backend.unload()
    return fitted(runs)


def _sizes(limit: int) -> Iterator[int]:
    """Yield 1, 2, 4, then multiples of 8, and the limit itself."""
    yield from (size for size in _FIRST_SIZES if size < limit)
    step = 8
    while step * (limit // step) > 8 * step:  # at most eight of them
        step *= 2
    yield from range(step, limit, step)
    yield limit
