"""What turns of the event loop take with the models of a repository, measured in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace.config import ModelSettings, Settings
from headrace.models.version import ModelVersion
from headrace.models.warmup import sized_inputs
from headrace.protocol.codec import encode_request
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.services.executor.instance import INLINE_BELOW_US
from headrace.telemetry.logs import configure_logging
from headrace.tools.replay.loop_measuring import measure_turns
from headrace.tools.replay.service_times import ServiceTime
from headrace.tools.replay.simulated_loop import LoopTime


def on_the_loop(times: Mapping[str, ServiceTime]) -> list[str]:
    """The models whose runs are so short that they are made on the event loop."""
    return sorted(model for model, each in times.items() if each(1) < INLINE_BELOW_US)


async def loop_times(
    settings: Settings, models: Mapping[str, ModelVersion], directory: Path | None
) -> dict[str, LoopTime]:
    """T(n) and U(n) of each model, one after the other: its warm-up sample, asked again and again.

    Args:
        settings: of the pipeline that is measured, but for its log and its models.
        models: by name.
        directory: the repository that they are in; None for that of the settings.

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
