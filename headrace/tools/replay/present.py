"""Current serving configuration of the recorded models, and the durations of their batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from headrace.config import ModelSettings, Settings
from headrace.models.registry import Models
from headrace.models.version import ModelVersion
from headrace.tools.replay.events import Arrivals, Limits, ModelKey
from headrace.tools.replay.service_times import ServiceTime
from headrace.tools.replay.simulate import Served
from headrace.tools.replay.simulated_loop import LoopTime


def latest_models(settings: Settings, directory: Path | None) -> dict[str, ModelVersion]:
    """Return the latest openable version of each model, by name; empty without a repository.

    Args:
        settings: name the repository, and have the models' defaults.
        directory: repository to use instead.
    """
    repository = directory or settings.models.repository
    if not repository.is_dir():
        return {}
    models = Models(settings.model_copy(update={"models": ModelSettings(repository=repository)}))
    models.open()
    return {version.name: version for version in models.versions()}


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
    loop_times: Mapping[str, LoopTime] | None = None,
) -> dict[ModelKey, Served]:
    """Return limits and instances from the models' own settings, or from the settings' defaults.

    `times` and `loop_times` are by model.
    """
    batching = settings.batching
    defaults = Limits(
        batching.max_batch_size, batching.max_batch_bytes, batching.max_queue_delay_ms
    )
    served: dict[ModelKey, Served] = {}
    for kind in arrivals.kinds:
        if kind.model not in times:
            continue
        limits, instances = defaults, settings.executor.instances
        if (found := models.get(kind.model)) is not None:
            limits = Limits(found.max_batch_size, found.max_batch_bytes, found.max_queue_delay_ms)
            instances = found.config.instances
        loop_time = (loop_times or {}).get(kind.model)
        served[kind.key] = Served(limits, instances, times[kind.model], loop_time)
    return served
