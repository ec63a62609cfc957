"""Replay into a pipeline that runs in this process, on its own embedded log."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from headrace.config import ModelSettings, Settings
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.telemetry.logs import configure_logging
from headrace.tools.replay.jobs import Source, Watch, now_ms
from headrace.tools.replay.marking import Marking
from headrace.tools.replay.opening import open_recording
from headrace.tools.replay.pacing import Pace
from headrace.tools.replay.replay import Outcome, Replay
from headrace.tools.replay.sinks import into_pipeline


class PipelineJob(NamedTuple):
    """Parameters of a replay into a pipeline with the models of a directory."""

    models: Path
    pace: Pace
    marking: Marking
    by_key: bool = False


async def replay_into_models(
    settings: Settings,
    source: Source,
    job: PipelineJob,
    watch: Watch,
) -> tuple[Outcome, Counter[str]]:
    """Replay into the four services with the models of a directory; no broker is written to.

    Returns the outcome, and the number of answers by `x-status`.

    Raises:
        ConfigurationError: the models cannot be served.
        Unanswered: an answer did not come.
    """
    configure_logging("warning")
    embedded = settings.model_copy(
        update={"kafka": None, "models": ModelSettings(repository=job.models)}
    )

    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(open_log(settings))
        recording = await stack.enter_async_context(
            open_recording(log, source.origin, source.selection)
        )
        memory = await stack.enter_async_context(open_log(embedded))
        await stack.enter_async_context(running(Pipeline(embedded, memory)))
        sink = await stack.enter_async_context(
            into_pipeline(memory, embedded, job.marking, now_ms, by_key=job.by_key)
        )
        outcome = await Replay(recording, job.pace, sink, advanced=watch(recording)).run()
    return outcome, sink.statuses
