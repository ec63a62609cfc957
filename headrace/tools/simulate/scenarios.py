"""Simulation of latency, batches and missed deadlines: recorded arrivals under other limits.

One scenario is one run of the simulation in `headrace.tools.simulate.events`; `docs/simulate.md`
lists what it leaves out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.config import ModelSettings, Settings
from headrace.models.profiling.latency import Latency
from headrace.models.registry import Models
from headrace.models.version import ModelVersion
from headrace.protocol.messages import Batch
from headrace.tools.simulate.events import (
    Arrivals,
    ExecutorPool,
    Observed,
    Policy,
    SimulatedLimits,
    Simulation,
)
from headrace.tools.simulate.service_times import ServiceTime
from headrace.transport.channels import ModelKey
from headrace.tuning import TUNING

PolicyFactory: TypeAlias = Callable[[Callable[[str, str], SimulatedLimits]], Policy]
"""Makes the batcher's policy from the limits of each model version. It is passed in, since the
policy belongs to a service, and modules below the services do not import them.
"""

SEED = 1
"""Seed of the random choice of recorded runs for simulated ones."""

PROBABILITIES = (0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
"""Percentiles of the latencies in an outcome."""


class Served(NamedTuple):
    """A model version as it is served now, and the durations of its batches."""

    limits: SimulatedLimits
    instances: int
    service_time: ServiceTime

    def known(self) -> Served:
        """Return a copy whose learned durations are reset, as after warm-up."""
        latency = Latency()
        for point in self.service_time.points:
            latency.observe((), point.rows, self.service_time(point.rows))
        return self._replace(limits=self.limits._replace(latency=latency))

    def capacity_per_s(self) -> float:
        """Return the highest throughput of all instances in rows per second, at the best batch
        size.
        """
        sizes = range(1, self.limits.max_batch_size + 1)
        return self.instances * max(rows / self.service_time(rows) for rows in sizes) * 1e6


class Scenario(NamedTuple):
    """Changes to the current state; None changes nothing."""

    rate_factor: float = 1.0
    instances: int | None = None
    max_batch_size: int | None = None
    max_queue_delay_ms: float | None = None

    def applied(self, served: Served) -> Served:
        """Return the version's configuration in this scenario."""
        limits = served.limits
        if self.max_batch_size is not None:
            limits = limits._replace(max_batch_size=self.max_batch_size)
        if self.max_queue_delay_ms is not None:
            limits = limits._replace(max_queue_delay_ms=self.max_queue_delay_ms)
        return served._replace(limits=limits, instances=self.instances or served.instances)


def scenarios(
    rate_factors: Sequence[float],
    instances: Sequence[int],
    max_batch_sizes: Sequence[int],
    max_queue_delays_ms: Sequence[float],
) -> list[Scenario]:
    """Return all combinations, the current state first; an empty sequence changes nothing."""
    asked = product(
        rate_factors or (1.0,),
        instances or (None,),
        max_batch_sizes or (None,),
        max_queue_delays_ms or (None,),
    )
    return list(dict.fromkeys([Scenario(), *(Scenario(*one) for one in asked)]))


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """Result of a scenario.

    Attributes:
        rate_per_s: rate of arriving requests.
        load: arriving rows divided by the capacity, for the busiest version. From 1 on the queue
            grows as long as the load lasts, and latencies show how long that was.
        latencies_ms: at `PROBABILITIES`, of the completed requests; empty if there are none.
        mean_batch: in rows.
        reasons: number of batches by closing reason.
        expired: requests whose deadline passed while they waited; they are not run.
        late: requests that were completed after their deadline.
        utilisation: share of the time that an instance is busy, for the busiest version.
    """

    scenario: Scenario
    requests: int
    rate_per_s: float
    load: float
    latencies_ms: tuple[float, ...]
    mean_ms: float
    batches: int
    mean_batch: float
    reasons: Mapping[str, int]
    expired: int
    late: int
    utilisation: float

    def latency_ms(self, probability: float) -> float:
        """Return the latency at one of `PROBABILITIES`; NaN if no request was completed."""
        if not self.latencies_ms:
            return float("nan")
        return self.latencies_ms[PROBABILITIES.index(probability)]

    def as_json(self) -> dict[str, Any]:
        """Return the outcome in JSON's types."""
        names = [f"p{probability * 100:g}_ms" for probability in PROBABILITIES[:-1]]
        return {
            **self.scenario._asdict(),
            "requests": self.requests,
            "rate_per_s": self.rate_per_s,
            "load": self.load,
            **dict(zip([*names, "max_ms"], self.latencies_ms, strict=False)),
            "mean_ms": self.mean_ms if self.latencies_ms else None,
            "batches": self.batches,
            "mean_batch": self.mean_batch,
            "reasons": dict(self.reasons),
            "expired": self.expired,
            "late": self.late,
            "utilisation": self.utilisation,
        }


def simulate(
    arrivals: Arrivals,
    served: Mapping[ModelKey, Served],
    scenario: Scenario,
    make_policy: PolicyFactory,
) -> ScenarioResult:
    """Run one scenario.

    Args:
        arrivals: at least one.
        served: contains every arriving version.
        scenario: the changes.
        make_policy: makes the batcher's policy.
    """
    changed = {key: scenario.applied(each).known() for key, each in served.items()}
    faster = arrivals.faster(scenario.rate_factor)
    policy = make_policy(lambda name, version: changed[name, version].limits)
    observed = Simulation(faster, policy, _executor_pool(changed)).run()
    return _outcome(scenario, faster, changed, observed)


def _executor_pool(served: Mapping[ModelKey, Served]) -> ExecutorPool:
    """Return the executors of a scenario; durations of runs are learned, as in production."""
    drawing = random.Random(SEED)  # noqa: S311 - the same for every scenario, no secret
    runs = {model: each.service_time.drawn(drawing) for (model, _), each in served.items()}

    def learn_duration(batch: Batch, service_us: int, end_us: int) -> None:
        latency = served[batch.model, batch.version].limits.latency
        if latency is not None:
            latency.observe(batch.requests[0].shape_class, batch.rows, service_us)
            if batch.end_us:
                latency.observe_lateness(end_us - batch.end_us)

    # A single instance's next batch is closed during the run, as the executor does.
    tuning = TUNING.executor
    return ExecutorPool(
        {key: each.instances for key, each in served.items()},
        lambda model, rows: runs[model](rows),
        leads_us={
            key: tuning.prefetch_lead_us for key, each in served.items() if each.instances == 1
        },
        lead_from_us=tuning.prefetch_min_run_us,
        around_us={model: each.service_time.around_us for (model, _), each in served.items()},
        on_batch_done=learn_duration,
    )


def _outcome(
    scenario: Scenario, arrivals: Arrivals, served: Mapping[ModelKey, Served], seen: Observed
) -> ScenarioResult:
    done_us = seen.latency_us[seen.latency_us >= 0]
    start_us = int(arrivals.at_us[0])
    arriving_us = max(int(arrivals.at_us[-1]) - start_us, 1)
    running_us = max(seen.end_us - start_us, 1)
    batches = seen.batch_rows.total()
    rows = sum(size * times for size, times in seen.batch_rows.items())
    return ScenarioResult(
        scenario=scenario,
        requests=len(arrivals.at_us),
        rate_per_s=len(arrivals.at_us) / arriving_us * 1e6,
        load=max(_loads(arrivals, served, arriving_us)),
        latencies_ms=_quantiles_ms(done_us),
        mean_ms=float(done_us.mean() / 1000) if len(done_us) else float("nan"),
        batches=batches,
        mean_batch=rows / batches if batches else 0.0,
        reasons=dict(seen.reasons.most_common()),
        expired=len(seen.latency_us) - len(done_us),
        late=seen.late,
        utilisation=max(
            seen.busy_us[key] / (each.instances * running_us) for key, each in served.items()
        ),
    )


def _quantiles_ms(latency_us: NDArray[np.int64]) -> tuple[float, ...]:
    return tuple(np.quantile(latency_us, PROBABILITIES) / 1000) if len(latency_us) else ()


def _loads(arrivals: Arrivals, served: Mapping[ModelKey, Served], arriving_us: int) -> list[float]:
    per_kind = np.bincount(arrivals.kind, arrivals.rows, len(arrivals.kinds))
    rows = dict.fromkeys(served, 0.0)
    for kind, arrived in zip(arrivals.kinds, per_kind, strict=True):
        if arrived:
            rows[kind.key] += float(arrived)
    return [count / arriving_us * 1e6 / served[key].capacity_per_s() for key, count in rows.items()]


# --- the current configuration -------------------------------------------------------------------


def latest_models(settings: Settings, directory: Path | None) -> dict[str, ModelVersion]:
    """Return the latest openable version of each model, by name; empty without a repository.

    Args:
        settings: name the repository, and have the models' defaults.
        directory: repository to use instead.
    """
    repository = directory or settings.models.directory
    if not repository.is_dir():
        return {}
    models = Models(settings.model_copy(update={"models": ModelSettings(repository=repository)}))
    models.open()
    return {version.name: version for version in models.catalog.versions()}


def resolved(arrivals: Arrivals, models: Mapping[str, ModelVersion]) -> Arrivals:
    """Resolve requests without a version to the latest one."""
    kinds = tuple(
        kind._replace(version=models[kind.model].version)
        if not kind.version and kind.model in models
        else kind
        for kind in arrivals.kinds
    )
    return arrivals._replace(kinds=kinds)


def only(arrivals: Arrivals, wanted: Collection[str]) -> tuple[Arrivals, dict[str, int]]:
    """Return the arrivals of some models, and the numbers of the others by model."""
    counts = np.bincount(arrivals.kind, minlength=len(arrivals.kinds))
    others: dict[str, int] = {}
    for kind, count in zip(arrivals.kinds, counts.tolist(), strict=True):
        if kind.model not in wanted:
            others[kind.model] = others.get(kind.model, 0) + count
    places = [place for place, kind in enumerate(arrivals.kinds) if kind.model in wanted]
    return arrivals.chosen(np.isin(arrivals.kind, places)), others


def served_now(
    settings: Settings,
    arrivals: Arrivals,
    times: Mapping[str, ServiceTime],
    models: Mapping[str, ModelVersion],
) -> dict[ModelKey, Served]:
    """Return limits and instances from the models' own settings, or from the settings' defaults.

    `times` are by model.
    """
    batching = settings.batching
    defaults = SimulatedLimits(
        batching.max_batch_size, batching.max_batch_bytes, batching.max_queue_delay_ms
    )
    served: dict[ModelKey, Served] = {}
    for kind in arrivals.kinds:
        if kind.model not in times:
            continue
        limits, instances = defaults, settings.executor.instances
        if (found := models.get(kind.model)) is not None:
            limits = SimulatedLimits(
                found.max_batch_size, found.max_batch_bytes, found.max_queue_delay_ms
            )
            instances = found.config.instances
        served[kind.key] = Served(limits, instances, times[kind.model])
    return served
