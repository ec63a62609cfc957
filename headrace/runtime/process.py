"""Composition root of one Headrace process: stages, models, health and signals."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import Protocol

import structlog
from prometheus_client import CollectorRegistry

from headrace.config import Settings
from headrace.control.announced import AnnouncedVersions
from headrace.control.changing import Followed
from headrace.control.following import ControlFollower
from headrace.control.repository_api import ControlledRepository
from headrace.control.topic import ControlTopic
from headrace.errors import ConfigurationError, describe_error
from headrace.log.port import Log, TopicPartition
from headrace.models.catalog import ModelCatalog
from headrace.models.index import RepositoryIndex
from headrace.models.registry import Models, Reloaded
from headrace.models.schema_registry import SchemaRegistry
from headrace.primitives.worker_thread import run_on_daemon_thread
from headrace.protocol.events import ExecutorEvent, UnreadyVersion
from headrace.runtime.heap import trimming
from headrace.runtime.log_factory import open_log
from headrace.runtime.polling import RepositoryPoller
from headrace.runtime.shutdown import (
    DrainDeadline,
    Stop,
    stop_on_signals,
    until_requested,
)
from headrace.runtime.stage_group import StageGroup, group_stages
from headrace.runtime.topic_plan import check_topics, is_controlled
from headrace.services.executor.trial import make_trials
from headrace.telemetry.collector import open_tracing
from headrace.telemetry.file_refresh import read_first
from headrace.telemetry.health import Health, Phase
from headrace.telemetry.http import HttpServer
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import Event, LogRateLimiter
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.model_spans import ModelSpans
from headrace.telemetry.snapshots import (
    GatewaySnapshot,
    ModelMemorySnapshot,
    QueueSnapshot,
    WantedSnapshot,
)
from headrace.telemetry.status import (
    ProcessIdentity,
    ProcessState,
    register_gauges,
    register_interpreter_metrics,
)
from headrace.telemetry.watchdog import FaulthandlerWatchdog
from headrace.topics import STAGES, Stage, Topic
from headrace.transport.heartbeat import ControlHeartbeat, ExecutorEventReader
from headrace.tuning import TUNING, Tuning

log = structlog.get_logger(__name__)


class Announcements:
    """Versions that processes announce on `events`: those that each has ready, and those it needs.

    Args:
        stages: of this process.
    """

    def __init__(
        self, log_: Log, settings: Settings, stages: tuple[Stage, ...], tuning: Tuning
    ) -> None:
        self._log = log_
        self._topic = settings.topic(Topic.EVENTS)
        self._stages = stages
        self._tuning = tuning.transport
        self._delivery_tuning = tuning.delivery
        self.versions = AnnouncedVersions(
            stages, settings.models.min_ready, tuning.control.silent_s
        )

    async def send(
        self, models: Models, progress: Callable[[], tuple[int, Sequence[UnreadyVersion], bool]]
    ) -> None:
        """Announce what this process has ready; never returns.

        Args:
            models: its models.
            progress: returns the generation of the control topic that it has followed, the wanted
                versions that are not ready, and whether it still follows.
        """
        topic = await self._find_topic()
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        async with self._log.producer() as producer:
            await ControlHeartbeat(
                producer,
                topic,
                name,
                models.catalog.servable,
                progress,
                self._tuning,
                self._stages,
                self._delivery_tuning,
            ).run()

    async def read(self, models: Models) -> None:
        """Learn what other processes announce; never returns."""

        def apply(events: list[ExecutorEvent]) -> None:
            self.versions.apply(events, time.monotonic())
            for model, version in self.versions.needed():
                models.catalog.note_use(model, version)
            if models.remote is not None:
                models.remote.look_at_announcements()

        # Most events say which batches are complete, which only a batcher's other reader needs.
        tuning = self._tuning
        await ExecutorEventReader(
            self._log, await self._find_topic(), tuning, tuning.announcements_pause_s
        ).run(apply)

    async def _find_topic(self) -> TopicPartition:
        """Return the name of the topic with its number of partitions."""
        info = (await self._log.describe_topics([self._topic]))[self._topic]
        partitions = 1 if info is None else info.partitions  # `check_topics` found it
        return TopicPartition(self._topic, partitions)


class Pipeline:
    """The stages of one process.

    Attributes:
        ready: set when models are loaded and partitions assigned.
        tuning: tuning values of its objects.
        repository: the models of this process, and how calls change them.
        doors: of its gateway, drained when a stop is requested; None without a gateway.
    """

    def __init__(
        self,
        settings: Settings,
        log_: Log,
        stages: Sequence[Stage] = STAGES,
        *,
        instruments: Instruments | None = None,
        tuning: Tuning = TUNING,
    ) -> None:
        self._settings = settings
        self._log = log_
        self._stages = tuple(stages)
        self.tuning = tuning
        instruments = instruments or Instruments(Metrics(CollectorRegistry(), tuning.runtime))
        self._steady = instruments.steady
        self.metrics = instruments.metrics
        self._schema_registry = (
            None
            if settings.schema_registry is None
            else SchemaRegistry(
                settings.schema_registry, tuning.schemas, self.metrics.schema_requested
            )
        )
        self._announcements = Announcements(log_, settings, self._stages, tuning)
        self._generation: Callable[[], int] = lambda: 0
        self._is_apart = is_controlled(settings) and bool(stages) and self._stages != STAGES
        sends = Stage.INGEST in stages or Stage.BATCHER in stages
        awaits = self._is_apart and sends and Stage.EXECUTOR not in stages
        trials = make_trials(settings, tuning.executor)
        self.models = Models(
            settings,
            registry=self._schema_registry,
            executes=Stage.EXECUTOR in stages,
            # With the control topic, a label may move while a request that was bound by it waits.
            keeps_replaced=Stage.INGEST not in stages or is_controlled(settings),
            binds=Stage.INGEST in stages,
            awaited=self._awaited if awaits else None,
            observer=self._make_model_spans(instruments),
            try_opening=None if trials is None else trials.try_opening,
            tuning=tuning.models,
        )
        catalog = self.models.catalog
        self.repository: RepositoryIndex = (
            ControlledRepository(log_, settings, catalog, self._followed, tuning)
            if is_controlled(settings)
            else RepositoryIndex(catalog, settings.models.mode)
        )
        self.health = Health()
        self.ready = asyncio.Event()
        self.doors: GatewayDoors | None = None
        self._has_begun = False
        """Whether the stages have begun, so that a stop lets them end."""
        self._groups = [
            StageGroup(
                settings,
                log_,
                part,
                self.models,
                instruments,
                self._has_what_is_wanted if awaits and Stage.INGEST in stages else None,
                tuning,
            )
            for part in group_stages(stages)
            if part
        ]
        limit_s = settings.limits.max_unanswered_s
        self.state = ProcessState(
            stages, self.health, self.metrics, self.models.catalog.status, limit_s, tuning.runtime
        )
        if Stage.EXECUTOR in stages and settings.models.memory_bytes:
            budget = self.models.memory
            self.state.model_memory = lambda: ModelMemorySnapshot(
                budget.limit_bytes, budget.held_bytes
            )
        broker = settings.kafka.bootstrap_servers if settings.kafka else ""
        self.state.identity = ProcessIdentity(settings.namespace, socket.gethostname(), broker)
        for group in self._groups:
            self.state.sources.append(group.source.snapshot)
            self.state.activities.append(group.activities)
            self.state.devices.append(group.devices)
        self.state.queue = self._queue
        self.state.cache = lambda: self.models.cache_size
        register_gauges(self.state)

    def _make_model_spans(self, instruments: Instruments) -> ModelSpans | None:
        """Return what makes the spans of changes; None if no traces are exported."""
        if instruments.tracing is None:
            return None
        generation = self._followed_generation if is_controlled(self._settings) else None
        write, clock, steady = instruments.tracing.write, instruments.clock, instruments.steady
        return ModelSpans(write, generation, clock, steady)

    def _followed_generation(self) -> int:
        return self._generation()

    def _followed(self) -> Followed | None:
        wanted = self.state.wanted()
        return None if wanted is None else Followed(*wanted)

    async def _has_what_is_wanted(self) -> None:
        """Wait until no wanted version is on its way to the stages behind.

        Requests wait in the log meanwhile, rather than be refused because this process has not
        heard yet what the others have.
        """
        while any(each.is_under_way for each in self._unready()):
            self.health.explain(f"waiting for {', '.join(each.line for each in self._unready())}")
            await asyncio.sleep(self.tuning.transport.assignment_check_s)

    @property
    def is_drained(self) -> bool:
        """False if the end left requests in flight, or answers whose offsets are not committed."""
        return all(group.source.is_drained for group in self._groups)

    def _queue(self) -> QueueSnapshot | None:
        return next(filter(None, (group.waiting() for group in self._groups)), None)

    async def run(self, stop: Stop) -> None:
        """Serve until a stop is requested, then drain; a second request ends it immediately, and so
        does the first one before the stages have begun.

        Raises:
            ConfigurationError: the topics or the models cannot be served from.
            ExceptionGroup: the errors that ended the process, if `stop` did not.
        """
        async with self.state.watching():
            await self._run(stop)

    async def _run(self, stop: Stop) -> None:
        serving = asyncio.create_task(self._serve(stop), name="pipeline")
        ending = asyncio.create_task(self._wait_for_end(stop), name="pipeline-ending")
        try:
            await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            if not serving.done():
                serving.cancel()
            await _wait_until_done(serving)
            error = None if serving.cancelled() else serving.exception()
            self.health.enter(Phase.STOPPED, "" if error is None else _describe_error(error))
        if error is not None:
            if not isinstance(error, ConfigurationError):  # the command line prints that one
                log.error(Event.FAILED, reason=self.health.reason)
            raise error

    async def _wait_for_end(self, stop: Stop) -> None:
        """Wait until the process is to end without a drain."""
        await stop.requested.wait()
        if self._has_begun:
            await stop.forced.wait()

    async def _serve(self, stop: Stop) -> None:
        if not is_controlled(self._settings):
            await self._serve_stages(stop, None)
            return
        self.health.explain("reading the control topic")
        topic = ControlTopic(self._log, self._settings, self.tuning.control)
        async with ControlFollower(topic, self.models, self.tuning.control) as follower:
            self._generation = lambda: follower.state.generation
            self.state.wanted = lambda: WantedSnapshot(
                follower.state.generation, self._unready(), follower.is_following
            )
            await self._serve_stages(stop, follower)

    def _unready(self) -> list[UnreadyVersion]:
        """Return the wanted versions that are not ready, as far as this process needs them."""
        return self.models.wanted.unready() if self._needs_models else []

    @property
    def _needs_models(self) -> bool:
        """Whether this process reads the models: a responder needs none, unless a gateway that
        describes them is beside it.
        """
        return self._stages != (Stage.RESPONDER,) or self.doors is not None

    def _awaited(self, model: str, version: str) -> UnreadyVersion | None:
        return self._announcements.versions.awaited(model, version, self._generation())

    async def _serve_stages(self, stop: Stop, follower: ControlFollower | None) -> None:
        async with self._schema_registry or nullcontext():
            await self._serve_with_schemas(stop, follower)

    async def _serve_with_schemas(self, stop: Stop, follower: ControlFollower | None) -> None:
        self.health.explain("checking the topics")
        faults = await check_topics(self._log, self._settings, self._stages)
        if faults:
            raise ConfigurationError("\n".join(faults))
        if self._needs_models:
            self.health.explain("reading the model repository")
            _log_faults(await run_on_daemon_thread(self.models.open))
        self._has_begun = True
        self.health.explain("loading the models and joining the group")
        joining = len(self._groups)

        def joined() -> None:
            nonlocal joining
            joining -= 1
            if joining <= 0:
                self.health.enter(Phase.READY)
                self.ready.set()
                log.info(Event.READY, stages=[str(each) for each in self._stages])

        if not self._groups:
            joined()  # a gateway alone
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(group.run(joined), name="stage-group") for group in self._groups
            ]
            stopping = tasks.create_task(stop.requested.wait(), name="stop")
            background = [
                tasks.create_task(work, name=name)
                for name, work in self._background(follower).items()
            ]
            await asyncio.wait((*running, stopping), return_when=asyncio.FIRST_COMPLETED)
            self.health.enter(Phase.DRAINING, "answering what is in flight")
            log.info(Event.DRAINING)
            doors = self.doors if stopping.done() else None
            if doors is not None:
                await doors.give_notice()
            await self._drain(running, doors, tasks)
            stopping.cancel()
            for task in background:
                task.cancel()
        log.info(Event.STOPPED)

    def _background(
        self, follower: ControlFollower | None
    ) -> dict[str, Coroutine[object, object, None]]:
        """Return what runs beside the stages until they have ended, by the names of the tasks."""
        work = {"unload-unused": self._unload_unused(), "forget-series": self._forget_series()}
        if follower is not None:
            work["follow-control"] = follower.run()
        if self._is_apart:
            work["read-announcements"] = self._announcements.read(self.models)
        if follower is not None and self._stages:  # a gateway alone serves no model
            work["announce-control"] = self._announcements.send(
                self.models,
                lambda: (follower.state.generation, self._unready(), follower.is_following),
            )
        models = self._settings.models
        if models.mode != "explicit" and self._needs_models:
            after_outage = models.mode == "all"
            interval_s = models.poll_interval_ms / 1e3
            poller = RepositoryPoller(self.models, interval_s, after_outage=after_outage)
            work["poll-models"] = poller.run()
        return work

    async def _unload_unused(self) -> None:
        """Unload replaced versions once they have been unused for a while; never returns."""
        while True:
            await asyncio.sleep(self.tuning.runtime.unload_check_interval_s)
            self.models.lifecycle.unload_unused(self._is_waited_for)

    def _is_waited_for(self, model: str, version: str) -> bool:
        """Return whether requests wait for a version in a batcher of this process, and an executor
        of another one can run them.
        """
        return self._announcements.versions.has_executor(model, version) and any(
            group.has_waiting((model, version)) for group in self._groups
        )

    async def _forget_series(self) -> None:
        """Remove the metrics of versions that are no longer loaded; never returns."""
        tuning = self.tuning.runtime
        while True:
            await asyncio.sleep(
                tuning.series_kept_s if self._needs_models else tuning.series_kept_without_models_s
            )
            loaded = {(each.name, each.version) for each in self.models.catalog.versions()}
            self.metrics.forget_versions(loaded.__contains__)

    async def _drain(
        self,
        running: Sequence[asyncio.Task[None]],
        doors: GatewayDoors | None,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Let the doors and the stage groups end, within one deadline; cancel groups that take too
        long: others repeat their work.
        """
        timeout_s = self._settings.limits.drain_timeout_s
        deadline = DrainDeadline(self._steady(), timeout_s)
        if doors is not None:
            # The stages read on, since callers wait for answers, but leave time for their own end.
            draining = tasks.create_task(doors.drain(timeout_s), name="drain-doors")
            await asyncio.wait((draining,), timeout=timeout_s / 2 if running else None)
        if not self.ready.is_set():
            for task in running:
                task.cancel()
            return
        for group in self._groups:
            group.source.stop_reading()
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=deadline.remaining_s(self._steady()))
        if late:
            limit_s = self.tuning.runtime.last_commit_timeout_s
            try:
                # Commit before cancelling: what is acknowledged by now need not be repeated.
                async with asyncio.timeout(limit_s), asyncio.TaskGroup() as abandoning:
                    for group in self._groups:
                        abandoning.create_task(group.abandon(limit_s / 2), name="abandon-group")
            except TimeoutError:
                pass  # each source reports what it leaves when it ends
            for task in late:
                task.cancel()


async def _wait_until_done(task: asyncio.Task[None]) -> None:
    """Wait until a task has ended. If the caller is cancelled meanwhile, cancel the task again.

    The cancellation is raised in the end, and an error of the task is then only logged.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            task.cancel()
    if cancelled is not None:
        # Retrieved here: otherwise asyncio reports the error whenever the task is collected.
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            log.error(Event.FAILED, reason=_describe_error(failure))
        raise cancelled


def _describe_error(error: BaseException) -> str:
    """Return the error that ended the process, in one line."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(_describe_error, error.exceptions))
    return describe_error(error)


@asynccontextmanager
async def running(pipeline: Pipeline) -> AsyncIterator[Pipeline]:
    """Run a pipeline while the context lasts: entered when it is ready, left when it has drained.

    Raises:
        ExceptionGroup: with the errors that end the pipeline early.
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
            stop.request()


class GatewayDoors(Protocol):
    """An open gateway; implemented by `headrace.gateway.doors.Doors`."""

    @property
    def ports(self) -> Mapping[str, int]: ...
    def snapshot(self) -> GatewaySnapshot: ...
    async def give_notice(self) -> None: ...
    async def drain(self, timeout_s: float) -> None: ...


class OpenDoors(Protocol):
    """Opens a gateway while its context lasts: `headrace.gateway.open_gateway`."""

    def __call__(
        self,
        settings: Settings,
        log: Log,
        models: ModelCatalog,
        health: Health,
        instruments: Instruments,
        repository: RepositoryIndex,
    ) -> AbstractAsyncContextManager[GatewayDoors]: ...


async def run(
    settings: Settings,
    stages: Sequence[Stage],
    log_rate_limiter: LogRateLimiter,
    announce: Callable[[int, Mapping[str, int]], None] | None = None,
    tuning: Tuning = TUNING,
    open_doors: OpenDoors | None = None,
    on_forced: Callable[[], None] = lambda: None,
) -> bool:
    """Run `headrace run`: serve until SIGTERM or SIGINT; return `Pipeline.is_drained`.

    Args:
        settings: settings of the process.
        stages: adjacent stages; none for a gateway alone.
        log_rate_limiter: from `configure_logging`.
        announce: called with the port of `telemetry`, and those of the gateway's doors by protocol,
            once they are bound.
        open_doors: opens the gateway; None for a process without one.
        tuning: tuning values of the process.
        on_forced: called at the second signal.
    """
    stop = Stop(on_forced)
    async with AsyncExitStack() as stack:
        metrics = Metrics(CollectorRegistry(), tuning.runtime)
        log_ = await stack.enter_async_context(
            open_log(settings, tuning, on_request=metrics.sent_to_broker)
        )
        tracing = await stack.enter_async_context(
            open_tracing(settings, stages, metrics, tuning.runtime)
        )
        instruments = Instruments(metrics, tracing)
        pipeline = Pipeline(settings, log_, stages, instruments=instruments, tuning=tuning)
        pipeline.state.log_lines_suppressed = log_rate_limiter.suppressed
        register_interpreter_metrics(metrics.registry)
        stack.enter_context(stop_on_signals(stop))
        stack.enter_context(
            FaulthandlerWatchdog(settings.limits.max_stall_s, tuning.runtime.stall_rearms_per_limit)
        )
        telemetry = settings.telemetry
        make_server = partial(
            HttpServer,
            (telemetry.http_host, telemetry.http_port),
            pipeline.health,
            pipeline.models.catalog,
            pipeline.metrics.registry,
            pipeline.state.status,
            tuning.runtime,
            telemetry,
            pipeline.repository,
        )
        async with until_requested(stop):
            limit_s = tuning.runtime.http_access.first_read_timeout_s
            server = await read_first(make_server, limit_s)
        if stop.requested.is_set():
            return pipeline.is_drained
        if server.certificates is not None:
            metrics.show_expiry(telemetry.section, server.certificates)
        await stack.enter_async_context(server)
        log.info(Event.STARTING, stages=[str(each) for each in stages], http_port=server.port)
        doors: GatewayDoors | None = None
        if open_doors is not None:
            async with until_requested(stop):
                doors = await stack.enter_async_context(
                    open_doors(
                        settings,
                        log_,
                        pipeline.models.catalog,
                        pipeline.health,
                        instruments,
                        pipeline.repository,
                    )
                )
            if stop.requested.is_set():
                return pipeline.is_drained
            pipeline.state.gateway = doors.snapshot
            pipeline.doors = doors
        if announce is not None:
            announce(server.port, {} if doors is None else doors.ports)
        await stack.enter_async_context(_reloading(pipeline))
        in_flight_bytes = partial(_in_flight_bytes, pipeline.state)
        trimmed = partial(_count_trimmed, pipeline.models, metrics)
        await stack.enter_async_context(trimming(in_flight_bytes, trimmed, tuning.runtime))
        await pipeline.run(stop)
    return pipeline.is_drained


def _count_trimmed(models: Models, metrics: Metrics, size_bytes: int) -> None:
    metrics.heap_trimmed.inc(size_bytes)
    models.memory.growth.add_trimmed(size_bytes)


def _in_flight_bytes(state: ProcessState) -> int:
    return sum(snapshot().in_flight_bytes for snapshot in state.sources)


@asynccontextmanager
async def _reloading(pipeline: Pipeline) -> AsyncIterator[None]:
    """Reload the models on SIGHUP while the context lasts."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGHUP)
    async with asyncio.TaskGroup() as tasks:
        loop.add_signal_handler(
            signal.SIGHUP,
            lambda: tasks.create_task(_reload(pipeline), name="reload"),
        )
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)
            signal.signal(signal.SIGHUP, before)


async def _reload(pipeline: Pipeline) -> None:
    """Read the repository again; if it is gone, keep the current models."""
    if not pipeline.ready.is_set():
        log.warning(
            Event.MODELS_RELOAD_REFUSED, reason="the models are being read for the first time"
        )
        return
    after_s = pipeline.tuning.runtime.reload_notice_after_s
    notice = asyncio.get_running_loop().call_later(after_s, _log_slow_reload, after_s)
    try:
        reloaded = await pipeline.models.reload()
    except ConfigurationError as error:
        log.error(Event.MODELS_RELOAD_FAILED, reason=str(error))
        return
    finally:
        notice.cancel()
    _log_faults(reloaded)
    log.info(Event.MODELS_RELOADED, **reloaded._asdict())


def _log_faults(reloaded: Reloaded) -> None:
    for fault in reloaded.faults:
        log.error(Event.MODEL_FAILED, reason=fault)
    for reason in reloaded.outages:
        log.warning(Event.STORE_UNAVAILABLE, reason=reason)
    for name in reloaded.emptied:
        log.warning(Event.REPOSITORY_EMPTIED, repository=name)


def _log_slow_reload(after_s: float) -> None:
    log.warning(
        Event.MODELS_RELOAD_SLOW,
        reason=f"the repository has been read for {after_s:g} s; importing model.py and "
        "transform.py may take max_load_s each, and other reloads wait meanwhile",
    )
