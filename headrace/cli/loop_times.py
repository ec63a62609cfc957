"""Measurement of event loop turns with the models of a repository, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace.config import ModelSettings, Settings
from headrace.models.backends.warmup import sized_inputs
from headrace.models.version import ModelVersion
from headrace.protocol.codec import encode_request
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.telemetry.logs import configure_logging
from headrace.tools.replay.loop_measuring import measure_turns
from headrace.tools.replay.service_times import ServiceTime
from headrace.tools.replay.simulated_loop import LoopTime
from headrace.tuning import TUNING


def on_the_loop(times: Mapping[str, ServiceTime]) -> list[str]:
    """Return the models whose runs are short enough for the event loop."""
    below_us = TUNING.executor.inline_max_run_us
    return sorted(model for model, each in times.items() if each(1) < below_us)


async def loop_times(
    settings: Settings, models: Mapping[str, ModelVersion], directory: Path | None
) -> dict[str, LoopTime]:
    """Measure T(n) and U(n) of each model in turn, with its warm-up sample.

    Args:
        settings: of the measured pipeline, except for its log and its models.
        models: by name.
        directory: their repository; None for that of the settings.

    Raises:
        ConfigurationError: one of them does not answer.
        ExceptionGroup: with that, or with what ended the pipeline.
    """
    configure_logging("warning")
    changed: dict[str, object] = {"kafka": None}
    if directory is not None:
        changed["models"] = ModelSettings(repository=directory)
    own = settings.model_copy(update=changed)
    found: dict[str, LoopTime] = {}
    for name, version in models.items():
        inputs = sized_inputs(version.signature, version.config, version.directory, 1)
        value = encode_request("application/msgpack", name, inputs)
        async with open_log(own) as log, running(Pipeline(own, log)):
            found[name] = (await measure_turns(log, own, [value])).loop_time()
    return found
