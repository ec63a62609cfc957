"""The executor stage: load the models, and run one worker for each of their instances.

`run` follows the registry: `_serve` loads an added version, runs a `Worker` for each of its
instances until the version is removed or the batches end, and unloads it. The path of a batch is
in `worker`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import structlog

from headrace.errors import ConfigurationError
from headrace.models.lifecycle import VersionChange
from headrace.models.load_faults import is_fault_of_model
from headrace.models.loader import BackendLoader
from headrace.models.memory import MemoryShort
from headrace.models.registry import Models
from headrace.models.repository import stamp_files
from headrace.models.version import ModelVersion, State
from headrace.primitives.worker_thread import run_on_daemon_thread
from headrace.protocol.messages import Batch, Request
from headrace.services.executor.instance import Instance
from headrace.services.executor.loading import InstanceLoader, Withdrawn, log_ready
from headrace.services.executor.postprocessing import (
    DEFAULT_OPTIONS,
    PostprocessOptions,
    Postprocessor,
)
from headrace.services.executor.safety import BatchSafetySampler
from headrace.services.executor.trial import TrialLoads
from headrace.services.executor.worker import NoQuarantine, Quarantine, Worker
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import Event
from headrace.telemetry.snapshots import DeviceSnapshot
from headrace.telemetry.watchdog import Activity
from headrace.transport.channels import BatchConsumer, BatchQueue, ModelKey, SendStream
from headrace.transport.heartbeat import ExecutorHeartbeat
from headrace.tuning import TUNING, ExecutorTuning

log = structlog.get_logger(__name__)


class _ServedVersion(NamedTuple):
    """The consumers of a version's instances, and the task that loads, runs and unloads them."""

    consumers: list[BatchConsumer[ModelKey, Batch]]
    task: asyncio.Task[None]


def _key_of(version: ModelVersion) -> ModelKey:
    return version.name, version.version


async def _is_known(version: ModelVersion) -> bool:
    """Return whether the same files were loaded before."""
    known = version.loaded_stamp
    return bool(known) and known == await run_on_daemon_thread(
        partial(stamp_files, version.directory)
    )


class ExecutorService:
    """Load the models and run their batches.

    Args:
        batch_queue: supplies batches.
        answers: receives requests with their outputs or failures.
        heartbeat: notified of ended requests if the batcher is in another process.
        quarantine: decides how runs begin, and is notified of requests that ran alone.
        trials: tries each version before it is loaded here; None: versions are not tried.
        postprocess_options: of user code behind models.

    Attributes:
        loaded: set when every version known at the start has loaded or failed.
    """

    def __init__(
        self,
        batch_queue: BatchQueue[ModelKey, Batch],
        answers: SendStream[list[Request]],
        models: Models,
        instruments: Instruments,
        heartbeat: ExecutorHeartbeat | None = None,
        quarantine: Quarantine | None = None,
        trials: TrialLoads | None = None,
        tuning: ExecutorTuning = TUNING.executor,
        postprocess_options: PostprocessOptions = DEFAULT_OPTIONS,
    ) -> None:
        self._tuning = tuning
        self._postprocess_options = postprocess_options
        self._quarantine = quarantine or NoQuarantine()
        self._batch_queue = batch_queue
        self._answers = answers
        self._trials = trials
        self._models = models
        self._heartbeat = heartbeat
        self._instruments = instruments
        self._metrics = instruments.metrics
        self._loading: set[ModelVersion] = set()
        self._served: dict[ModelVersion, _ServedVersion] = {}
        self._load_tasks: dict[ModelVersion, asyncio.Task[None]] = {}  # until they are loaded
        self._workers: set[Worker] = set()
        self._loader = InstanceLoader(
            models.memory, self._unload_idle, self._loads_in_turn, self._is_withdrawn, tuning
        )
        self.loaded = asyncio.Event()

    def activities(self) -> list[Activity]:
        """Return the current activity of each instance."""
        return [worker.activity for worker in self._workers]

    def devices(self) -> list[DeviceSnapshot]:
        """Return the memory of each device other than the host."""
        return [seen for each in self._workers if (seen := each.device_memory()) is not None]

    async def run(self) -> None:
        """Run until the batches end; load and unload versions as they are added or removed."""
        changes = self._subscribe()
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(self._follow(changes, tasks), name="executor-models")
            await self._batch_queue.ended()
            following.cancel()
            self._end_loads()
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._answers.close()

    def _subscribe(self) -> asyncio.Queue[VersionChange]:
        """Return the queue of changes: it begins with the loads of the present versions."""
        changes: asyncio.Queue[VersionChange] = asyncio.Queue()
        self._models.lifecycle.subscribe(changes.put_nowait)
        for version in self._models.catalog.versions(State.LOADING):
            self._loading.add(version)
            changes.put_nowait(VersionChange("load", version, "added"))
        if not self._loading:
            self.loaded.set()
        return changes

    def _end_loads(self) -> None:
        """Cancel loads that no request waits for: one may take minutes, and the process stops."""
        for version, task in self._load_tasks.items():
            if not self._batch_queue.has_waiting(_key_of(version)):
                task.cancel()

    async def _follow(
        self, changes: asyncio.Queue[VersionChange], tasks: asyncio.TaskGroup
    ) -> None:
        """Apply model changes: start serving added versions, release removed ones."""
        while True:
            change = await changes.get()
            version = change.version
            served = self._served.get(version)
            if change.action == "load":
                self._served[version] = self._start(change, served, tasks)
            elif change.action == "unload":
                self._release(change, self._served.pop(version, None))

    def _release(self, change: VersionChange, served: _ServedVersion | None) -> None:
        """Let a version be unloaded after its current runs, or after all that waits for it."""
        version = change.version
        if served is None:
            self._models.lifecycle.mark_gone(version)
            return
        self._metrics.model_unloaded(version.name, version.version, change.reason)
        for consumer in served.consumers:
            if change.leaves_waiting:
                consumer.stop()
            else:
                consumer.release()

    def _start(
        self, change: VersionChange, before: _ServedVersion | None, tasks: asyncio.TaskGroup
    ) -> _ServedVersion:
        """Start to load and serve a version; `before` is its last serving, if there was one."""
        version = change.version
        consumers = [
            self._batch_queue.consumer(_key_of(version)) for _ in range(version.config.instances)
        ]
        ended = None if before is None else before.task
        work = self._serve_until_gone(version, consumers, ended, change.reason)
        task = self._load_tasks[version] = tasks.create_task(work, name=f"serve {version!r}")
        return _ServedVersion(consumers, task)

    async def _serve_until_gone(
        self,
        version: ModelVersion,
        consumers: list[BatchConsumer[ModelKey, Batch]],
        before: asyncio.Task[None] | None,
        reason: str,
    ) -> None:
        """Serve a version, and report when its memory is free.

        Args:
            version: the version.
            consumers: one for each instance.
            before: task that still serves the same version; awaited first.
            reason: why it is loaded.
        """
        try:
            if before is not None:
                await asyncio.wait([before])
            await self._serve(version, consumers, reason)
        finally:
            self._load_tasks.pop(version, None)
            served = self._served.get(version)
            if served is not None and served.task is asyncio.current_task():
                del self._served[version]
        self._models.lifecycle.mark_gone(version)

    async def _serve(
        self,
        version: ModelVersion,
        consumers: list[BatchConsumer[ModelKey, Batch]],
        reason: str,
    ) -> None:
        """Try a version, load it, run its instances, and unload it."""
        name = f"{version.name}-{version.version}"
        try:
            is_known = await _is_known(version)
            loader = BackendLoader(version, self._models.cores, is_known=is_known)
            if self._trials is not None and not is_known:
                await self._trials.try_out(version)
            stack, instances = await self._loader.load(version, loader, len(consumers))
            self._load_tasks.pop(version, None)
            async with stack:
                version.last_used_us = self._instruments.steady()
                self._metrics.model_loaded(version.name, version.version, reason)
                self._models.lifecycle.mark_ready(version, loader.verdict)
                log_ready(version)
                self._note_loaded(version)
                # Shared by the workers, and made when the first of them needs it.
                sampler = cache(partial(BatchSafetySampler, version, self._metrics, self._tuning))
                async with asyncio.TaskGroup() as tasks:
                    for instance, consumer in zip(instances, consumers, strict=True):
                        worker = self._make_worker(version, instance, consumer, sampler)
                        tasks.create_task(self._work(worker), name=name)
        except Withdrawn:
            self._note_loaded(version)
        except MemoryShort as error:
            if version.state is not State.UNLOADED:
                self._fail(version, error)
                return
            # The version is not faulty: others are busy. A later request has it loaded again.
            self._report_failed(version, error)
            self._models.lifecycle.refuse_waiting(version, str(error))
        except ConfigurationError as error:
            self._fail(version, error)

    def _fail(self, version: ModelVersion, error: ConfigurationError) -> None:
        self._report_failed(version, error)
        is_of_model = is_fault_of_model(error)
        self._models.lifecycle.mark_failed(version, str(error), is_rejected=is_of_model)
        self._note_loaded(version)

    def _report_failed(self, version: ModelVersion, error: ConfigurationError) -> None:
        name, number = version.name, version.version
        log.error(Event.MODEL_FAILED, model=name, version=number, reason=str(error))
        self._metrics.model_failed_to_load(name, number)

    def _loads_in_turn(self) -> bool:
        """Return True if versions are loaded one after the other, even if there is memory for more.

        After the start, that leaves CPU time to the versions that serve. With trials it costs
        nothing: these run one at a time, and take longer than the loads.
        """
        return self.loaded.is_set() or self._trials is not None

    def _is_withdrawn(self, version: ModelVersion) -> bool:
        """Return True for a version that was removed, and that no request waits for."""
        is_removed = version.state is State.UNLOADING
        return is_removed and not self._batch_queue.has_waiting(_key_of(version))

    async def _unload_idle(self, missing_bytes: int) -> bool:
        """Unload the versions that have been idle for the longest time; return False if all that
        may be unloaded have less than so many bytes.
        """
        held = self._models.memory.held_by()
        idle = [each for each in self._served if self._may_unload(each)]
        chosen: list[ModelVersion] = []
        for version in sorted(idle, key=lambda each: each.last_used_us):
            if missing_bytes <= 0:
                break
            chosen.append(version)
            missing_bytes -= held.get(f"{version.name}/{version.version}", 0)
        if missing_bytes > 0 or not chosen:
            return False
        for version in chosen:
            self._unload_for_memory(version)
        # They end soon: a run that has begun meanwhile has a time limit.
        await asyncio.wait([self._served[version].task for version in chosen])
        return True

    def _may_unload(self, version: ModelVersion) -> bool:
        if version.state is not State.READY or version.config.unload_idle == "never":
            return False
        is_busy = any(each.is_busy for each in self._workers if each.version is version)
        return not is_busy and not self._batch_queue.has_waiting(_key_of(version))

    def _unload_for_memory(self, version: ModelVersion) -> None:
        log.info(Event.MODEL_UNLOADED, model=version.name, version=version.version)
        self._metrics.model_unloaded(version.name, version.version, "memory")
        self._models.lifecycle.mark_unloaded(
            version, "unloaded while idle; a request has it loaded again"
        )
        # After the state, so that whatever comes from now on has it loaded again.
        for consumer in self._served[version].consumers:
            consumer.stop()

    def _note_loaded(self, version: ModelVersion) -> None:
        """Note that a version has loaded or failed; set `loaded` after the last initial one."""
        self._loading.discard(version)
        if not self._loading:
            self.loaded.set()

    def _make_worker(
        self,
        version: ModelVersion,
        instance: Instance,
        consumer: BatchConsumer[ModelKey, Batch],
        sampler: Callable[[], BatchSafetySampler],
    ) -> Worker:
        return Worker(
            version,
            instance,
            consumer,
            self._answers,
            self._models,
            self._instruments,
            self._quarantine,
            sampler,
            self._heartbeat,
            self._tuning,
            self._make_postprocessor(version),
        )

    def _make_postprocessor(self, version: ModelVersion) -> Postprocessor | None:
        if version.postprocess is None:
            return None
        return Postprocessor(version, self._postprocess_options, self._instruments.metrics)

    async def _work(self, worker: Worker) -> None:
        """Run a worker, and list it meanwhile."""
        self._workers.add(worker)
        try:
            await worker.run()
        finally:
            self._workers.discard(worker)
