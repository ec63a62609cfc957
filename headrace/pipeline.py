"""One process of Headrace: its stages, their models, health and signals; the composition root."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import structlog
from prometheus_client import CollectorRegistry

from headrace.clock import Clock, wall_clock_us
from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.flow.lifecycle import Stop, stop_on_signals
from headrace.log.opening import open_log
from headrace.log.port import Log
from headrace.models.registry import Models
from headrace.segment import Segment, segments
from headrace.telemetry.health import Health, Phase
from headrace.telemetry.http import HttpServer
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.topic_plan import check_topics
from headrace.topics import STAGES, Stage

log = structlog.get_logger(__name__)


class Pipeline:
    """The stages of one process.

    Attributes:
        ready: set when models are loaded and partitions assigned.
    """

    def __init__(
        self,
        settings: Settings,
        log_: Log,
        stages: Sequence[Stage] = STAGES,
        *,
        registry: CollectorRegistry | None = None,
        clock: Clock = wall_clock_us,
    ) -> None:
        self._settings = settings
        self._log = log_
        self._stages = tuple(stages)
        self.metrics = Metrics(registry or CollectorRegistry())
        self.models = Models(settings, executes=Stage.EXECUTOR in stages)
        self.health = Health()
        self.ready = asyncio.Event()
        self._segments = [
            Segment(settings, log_, part, self.models, self.metrics, clock)
            for part in segments(stages)
        ]

    async def run(self, stop: Stop) -> None:
        """Serve until asked to stop, and drain; a second request ends it at once.

        Raises:
            ConfigurationError: the topics or the models cannot be served from.
            ExceptionGroup: what ended the process, if anything but `stop` did.
        """
        serving = asyncio.create_task(self._serve(stop), name="pipeline")
        forced = asyncio.create_task(stop.forced.wait(), name="pipeline-forced")
        try:
            await asyncio.wait((serving, forced), return_when=asyncio.FIRST_COMPLETED)
        finally:
            forced.cancel()
            if not serving.done():
                serving.cancel()
            await asyncio.wait([serving])
            self.health.enter(Phase.STOPPED)
        if not serving.cancelled():
            serving.result()

    async def _serve(self, stop: Stop) -> None:
        faults = await check_topics(self._log, self._settings, self._stages)
        if faults:
            raise ConfigurationError("\n".join(faults))
        if self._stages != (Stage.RESPONDER,):
            await asyncio.to_thread(self.models.open)
        joining = len(self._segments)

        def joined() -> None:
            nonlocal joining
            joining -= 1
            if not joining:
                self.health.enter(Phase.READY)
                self.ready.set()
                log.info(Event.READY, stages=list(self._stages))

        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(segment.run(joined), name="segment") for segment in self._segments
            ]
            stopping = tasks.create_task(stop.requested.wait(), name="stop")
            await asyncio.wait((*running, stopping), return_when=asyncio.FIRST_COMPLETED)
            self.health.enter(Phase.DRAINING)
            log.info(Event.DRAINING)
            await self._drain(running)
            stopping.cancel()
        log.info(Event.STOPPED)

    async def _drain(self, running: Sequence[asyncio.Task[None]]) -> None:
        """Let the segments end; what takes too long is cut off and will run elsewhere."""
        if not self.ready.is_set():
            for task in running:
                task.cancel()
            return
        for segment in self._segments:
            segment.source.stop_reading()
        _, late = await asyncio.wait(running, timeout=self._settings.limits.drain_timeout_s)
        if late:
            for segment in self._segments:
                await segment.abandon()
            for task in late:
                task.cancel()


@asynccontextmanager
async def running(pipeline: Pipeline) -> AsyncIterator[Pipeline]:
    """Run a pipeline while the context lasts: entered when it is ready, left when it has drained.

    Raises:
        ExceptionGroup: with whatever ends the pipeline before its time.
    """
    stop = Stop()
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(pipeline.run(stop), name="pipeline-run")
        ready = tasks.create_task(pipeline.ready.wait(), name="pipeline-ready")
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        try:
            if not serving.done():
                yield pipeline
        finally:
            stop.ask()


async def run(settings: Settings, stages: Sequence[Stage]) -> int:
    """`headrace run`: serve until SIGTERM or SIGINT. Returns the exit code."""
    stop = Stop()
    async with AsyncExitStack() as stack:
        log_ = await stack.enter_async_context(open_log(settings))
        pipeline = Pipeline(settings, log_, stages)
        stack.enter_context(stop_on_signals(stop))
        telemetry = settings.telemetry
        server = HttpServer(
            (telemetry.http_host, telemetry.http_port),
            pipeline.health,
            pipeline.models,
            pipeline.metrics.registry,
        )
        await stack.enter_async_context(server)
        log.info(Event.STARTING, stages=list(stages), http_port=server.port)
        loop = asyncio.get_running_loop()
        reloads: set[asyncio.Task[None]] = set()

        def reload() -> None:
            task = loop.create_task(_reload(pipeline.models), name="reload")
            reloads.add(task)
            task.add_done_callback(reloads.discard)

        loop.add_signal_handler(signal.SIGHUP, reload)
        await pipeline.run(stop)
    return 0


async def _reload(models: Models) -> None:
    """SIGHUP: look at the repository again; a repository that is gone changes nothing."""
    try:
        reloaded = await models.reload()
    except ConfigurationError as error:
        log.error("reload_failed", reason=str(error))
        return
    log.info("reloaded", **reloaded._asdict())
