"""A process that is stopped before it has begun to serve."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from headrace.config import AccessSettings, GatewaySettings, Settings, TelemetrySettings
from headrace.errors import ConfigurationError
from headrace.gateway import open_gateway
from headrace.log.memory.log import MemoryLog
from headrace.log.port import Log, TopicInfo
from headrace.models.catalog import ModelCatalog
from headrace.models.index import RepositoryIndex
from headrace.runtime.process import GatewayDoors, Pipeline, run
from headrace.runtime.shutdown import Stop
from headrace.telemetry.health import Health, Phase
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import LogRateLimiter
from headrace.topics import STAGES
from headrace.tuning import TUNING, AccessTuning
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.models import settings_for
from tests.support.pipelines import log_for, settings_of
from tests.support.python_models import GATE


class Silent(MemoryLog):
    """A log that never describes its topics, as while no broker answers."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = False

    async def describe_topics(self, topics: Sequence[str]) -> Mapping[str, TopicInfo | None]:
        self.is_asked = True
        await asyncio.Event().wait()
        return {}


async def test_first_stop_ends_process_that_waits_for_brokers(tmp_path: Path) -> None:
    """It has read nothing, so nothing is left to answer, and its end is no failure."""
    log = Silent()
    pipeline, stop = Pipeline(settings_for(tmp_path), log, STAGES), Stop()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(pipeline.run(stop))
        await eventually(lambda: log.is_asked)
        stop.request()

    assert (pipeline.health.phase, pipeline.health.reason) == (Phase.STOPPED, "")
    assert pipeline.is_drained


async def test_first_stop_ends_process_that_reads_its_models(tmp_path: Path) -> None:
    """The import of a model may take minutes; the reason says what the process does."""
    version = tmp_path / "slow" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text("from tests.support.python_models import GATE; GATE.wait()")
    (tmp_path / "slow" / "model.toml").write_text('backend = "python"')
    settings = settings_of(tmp_path)
    pipeline, stop = Pipeline(settings, await log_for(settings), STAGES), Stop()
    GATE.clear()
    try:
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(pipeline.run(stop))
            await eventually(lambda: pipeline.health.reason == "reading the model repository")
            stop.request()
    finally:
        GATE.set()  # ends the thread that imports
    assert pipeline.health.phase is Phase.STOPPED


@pytest.mark.parametrize("server", [TelemetrySettings, GatewaySettings])
async def test_first_signal_ends_process_that_reads_keys_of_callers(
    tmp_path: Path, server: type[AccessSettings]
) -> None:
    """The file may be on a mount that hangs; here it is a pipe that nobody writes."""
    pipe = tmp_path / "keys.toml"
    os.mkfifo(pipe)
    sections = {
        each.section: each(http_port=0, keys_file=pipe if each is server else None)
        for each in (TelemetrySettings, GatewaySettings)
    }
    settings = settings_for(tmp_path).model_copy(update=sections)
    has_ended = threading.Event()

    def signal_reader() -> None:
        with pipe.open("wb"):  # waits for a reader
            os.kill(os.getpid(), signal.SIGTERM)
            has_ended.wait(DEADLINE_S)

    signalling = threading.Thread(target=signal_reader)
    signalling.start()

    is_drained = await run(settings, STAGES, LogRateLimiter(), open_doors=open_gateway)

    has_ended.set()
    signalling.join()
    assert is_drained


async def test_keys_that_are_not_read_in_time_end_process(tmp_path: Path) -> None:
    """A supervisor starts it again; otherwise it would wait without a port for probes."""
    pipe = tmp_path / "keys.toml"
    os.mkfifo(pipe)
    telemetry = TelemetrySettings(http_port=0, keys_file=pipe)
    settings = settings_for(tmp_path).model_copy(update={"telemetry": telemetry})
    access = AccessTuning(first_read_timeout_s=0.01)
    runtime = replace(TUNING.runtime, http_access=access)

    with pytest.raises(ConfigurationError, match=r"keys_file and such\) within 0.01 s"):
        await run(settings, STAGES, LogRateLimiter(), tuning=replace(TUNING, runtime=runtime))

    pipe.write_bytes(b"")  # ends the thread that reads


async def test_first_signal_ends_process_whose_gateway_opens(tmp_path: Path) -> None:
    """Opening it waits for brokers, too, which the signal ends."""
    telemetry = TelemetrySettings(http_port=0)
    settings = settings_for(tmp_path).model_copy(update={"telemetry": telemetry})

    @asynccontextmanager
    async def open_doors(
        settings: Settings,
        log: Log,
        models: ModelCatalog,
        health: Health,
        instruments: Instruments,
        repository: RepositoryIndex,
    ) -> AsyncIterator[GatewayDoors]:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        yield cast("GatewayDoors", None)  # never reached

    async with asyncio.timeout(DEADLINE_S):
        assert await run(settings, STAGES, LogRateLimiter(), open_doors=open_doors)
