"""S(b), the duration of a batch of b rows: given, learned from answers, or measured."""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import accumulate, cycle
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from headrace.client.rpc import last_header
from headrace.errors import ConfigurationError
from headrace.models.backends.warmup import make_sample_batch
from headrace.models.version import ModelVersion
from headrace.protocol.headers import HeaderName
from headrace.tools.bodies import BodyReader
from headrace.tools.replay.recording import Recording

ENOUGH = 5
"""Batch sizes that were seen less often are left out, if there are others."""


_LONGEST_US = 3600 * 1_000_000


class BatchTime(NamedTuple):
    """A batch size and its median duration in microseconds over `seen` batches."""

    rows: int
    us: float
    seen: int = 1


class ServiceTime:
    """S(b) of one model, in microseconds.

    With known points, S is their medians, made monotone and linearly interpolated; beyond them, and
    without any, it is the line t0 + a b.

    Args:
        points: known sizes.
        line: t0 and a; None for the least-squares line of the points, weighted by `seen`.
        ratios: of single runs to S of their sizes, in order of time.

    Attributes:
        around_us: delay of the answer after the run, while the instance continues; see `learn`.

    Raises:
        ValueError: neither points nor a line, or negative times.
    """

    def __init__(
        self,
        points: Sequence[BatchTime],
        line: tuple[float, float] | None = None,
        *,
        ratios: Sequence[float] = (),
    ) -> None:
        if not points and line is None:
            raise ValueError("expected points or a line")
        known = sorted(points)
        self.t0_us, self.a_us = line or _fitted(known)
        if min(self.t0_us, self.a_us, *(each.us for each in known), 0) < 0:
            raise ValueError("expected times that are not negative")
        self.points = tuple(known)
        self._rows = [each.rows for each in known]
        self._us = list(accumulate((each.us for each in known), max))
        self._ratios = tuple(ratios)
        self.around_us = 0

    def __call__(self, rows: int) -> int:
        """Return S(rows), at least one microsecond."""
        return max(1, round(self._us_of(rows)))

    def drawn(self, chance: random.Random) -> Callable[[int], int]:
        """Return a function that gives S(b) of successive runs, each as slow as a recorded one.

        The ratios are used in recorded order, cyclically from a random start: a machine that is
        slow for a while is slow for many runs in a row. Without ratios all runs take S.
        """
        ratios = self._ratios
        if not ratios:
            return self
        first = chance.randrange(len(ratios))
        drawn = cycle((*ratios[first:], *ratios[:first]))

        def run_us(rows: int) -> int:
            return max(1, round(self._us_of(rows) * next(drawn)))

        return run_us

    def spread(self, runs: Iterable[tuple[int, float]]) -> ServiceTime:
        """Return the same S(b) with the ratios of single runs: their rows and microseconds."""
        ratios = [us / max(self._us_of(rows), 1e-3) for rows, us in runs]
        return ServiceTime(self.points, (self.t0_us, self.a_us), ratios=ratios)

    def _us_of(self, rows: int) -> float:
        at = bisect_left(self._rows, rows)
        if at < len(self._rows) and self._rows[at] == rows:
            return self._us[at]
        if not self._rows:
            return self.t0_us + self.a_us * rows
        if at == len(self._rows):
            return self._us[-1] + self.a_us * (rows - self._rows[-1])
        if at == 0:
            return max(self._us[0] - self.a_us * (self._rows[0] - rows), 0.0)
        share = (rows - self._rows[at - 1]) / (self._rows[at] - self._rows[at - 1])
        return self._us[at - 1] + share * (self._us[at] - self._us[at - 1])

    def __str__(self) -> str:
        known = ", ".join(f"S({each.rows})={each.us:.0f}" for each in self.points)
        return f"{self.t0_us:.0f} + {self.a_us:.1f} b us" + (f" ({known})" if known else "")


def _fitted(points: Sequence[BatchTime]) -> tuple[float, float]:
    """Fit by least squares with neither part below 0; a single point is all fixed cost."""
    if len({each.rows for each in points}) == 1:
        return points[0].us, 0.0
    rows = np.array([each.rows for each in points], dtype=float)
    us = np.array([each.us for each in points])
    weights = np.array([each.seen for each in points], dtype=float)
    a_us, t0_us = np.polyfit(rows, us, 1, w=np.sqrt(weights))
    if t0_us < 0:
        return 0.0, float((weights * rows * us).sum() / (weights * rows * rows).sum())
    if a_us < 0:
        return float((weights * us).sum() / weights.sum()), 0.0
    return float(t0_us), float(a_us)


def parse_service_time(text: str) -> tuple[str, ServiceTime]:
    """Parse `[MODEL=]T0+A` in microseconds, A per row; without a model the name is empty.

    Raises:
        ValueError: the text has another form, or a row takes more than an hour.
    """
    model, _, line = text.rpartition("=")
    t0, plus, a = line.partition("+")
    try:
        t0_us, a_us = float(t0), float(a) if plus else 0.0
        if not 0 < t0_us + a_us <= _LONGEST_US:
            raise ValueError(line)
        return model, ServiceTime((), (t0_us, a_us))
    except ValueError:
        raise ValueError(
            "expected [MODEL=]T0+A in microseconds, as 1000+50 or digits=60+1.5, of an hour at "
            f"most, got {text!r}"
        ) from None


# --- learned from answers ---------------------------------------------------------------------


class _Parameters(msgspec.Struct):
    compute_us: int = 0
    batch_us: int = 0
    batch_size: int = 0

    @property
    def is_of_run(self) -> bool:
        """False if no run can have these timings: another program wrote them, or none did."""
        shortest_us, longest_us = sorted((self.compute_us, self.batch_us))
        return self.batch_size > 0 and shortest_us >= 0 and longest_us <= _LONGEST_US


class _Answer(msgspec.Struct):
    model_name: str = ""
    parameters: _Parameters | None = None


_answers = BodyReader(_Answer)


async def learn(answers: Recording) -> Mapping[str, ServiceTime]:
    """Return by model the median of `compute_us` for each `batch_size` of the answers.

    The time around the runs is the lower quartile of `batch_us`. A batch that closes just in time
    waits for the run before it, which is part of the higher values.

    Raises:
        ConfigurationError: no answer has these timings.
    """
    seen: defaultdict[str, _ReportedRuns] = defaultdict(_ReportedRuns)
    async with aclosing(answers.chunks()) as chunks:
        async for chunk in chunks:
            for record in chunk:
                if last_header(record.headers, HeaderName.STATUS) not in (None, b"ok"):
                    continue
                found = _answers.read(record)
                if found is not None and found.parameters and found.parameters.is_of_run:
                    seen[found.model_name].add(found.parameters)
    if not seen:
        raise ConfigurationError(
            f"{answers.name}: expected answers with compute_us and batch_size, got none"
        )
    return {model: runs.fitted() for model, runs in seen.items()}


class _ReportedRuns:
    """Runs reconstructed from answers, of which up to b report the same run of b rows."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, float]] = []
        self._around_us: list[int] = []
        self._told: defaultdict[tuple[int, int], int] = defaultdict(int)

    def add(self, said: _Parameters) -> None:
        run = said.batch_size, said.compute_us
        if not self._told[run]:
            self._runs.append(run)
            self._around_us.append(said.batch_us)
        self._told[run] = (self._told[run] + 1) % said.batch_size

    def fitted(self) -> ServiceTime:
        found = fitted(self._runs)
        found.around_us = round(float(np.quantile(self._around_us, 0.25)))
        return found


def fitted(runs: Sequence[tuple[int, float]]) -> ServiceTime:
    """Return S(b) and its spread from single runs: rows and microseconds, in order of time."""
    return ServiceTime(_points(runs)).spread(runs)


def _points(runs: Iterable[tuple[int, float]]) -> list[BatchTime]:
    by_rows: defaultdict[int, list[float]] = defaultdict(list)
    for rows, us in runs:
        by_rows[rows].append(us)
    points = [BatchTime(rows, median(times), len(times)) for rows, times in by_rows.items()]
    return [each for each in points if each.seen >= ENOUGH] or points


# --- measured with a model -----------------------------------------------------------------------


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
            inputs = make_sample_batch(version.signature, version.config, version.directory, rows)
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
