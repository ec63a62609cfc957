"""The executor stage: pull a batch → gather → run → scatter its outputs to the requests.

The path of a batch, in one task for each instance of a ready model version: `_take_turns` takes
the next batch, `_run` drops expired requests, `_compute` gathers, runs and scatters, `_conclude`
finishes the requests. When a run fails, the batch is halved, and halves alternate with fresh
batches until the faulty request runs alone: only that request fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

import structlog

from headrace.delivery.failures import VOID, any_void, deadline_passed, rejection
from headrace.errors import Code, ConfigurationError, Fatal, Rejected, Retriable, describe_error
from headrace.models.backends.port import Arrays
from headrace.models.loader import BackendLoader, Cores
from headrace.models.registry import Change, Models
from headrace.models.version import ModelVersion, State
from headrace.protocol.messages import Batch, Failure, Request
from headrace.services.executor.buffers import scatter
from headrace.services.executor.entering import Isolating, NotIsolating, enter_and_run
from headrace.services.executor.instance import Instance, TooLate
from headrace.services.executor.loading import make_instance, tell_ready
from headrace.services.executor.prefetch import Prefetch, PreparedBatch, apart, divide, pause_after
from headrace.services.executor.safety import Comparison, refuse_nonfinite
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import Event
from headrace.telemetry.snapshots import DeviceSnapshot
from headrace.telemetry.span_attributes import Run
from headrace.telemetry.watchdog import Activity
from headrace.topics import Stage
from headrace.transport.channels import BatchConsumer, BatchQueue, Outlet
from headrace.transport.heartbeat import ExecutorHeartbeat
from headrace.tuning import TUNING, ExecutorTuning

log = structlog.get_logger(__name__)

ModelKey = tuple[str, str]


class ExecutorService:
    """Load the models and run their batches.

    Args:
        pulls: supplies batches.
        answers: receives requests with their outputs or failures.
        announcer: notified of ended requests if the batcher is in another process.
        isolating: decides how runs begin, and is notified of requests that ran alone.

    Attributes:
        loaded: set when every version known at the start has loaded or failed.
    """

    def __init__(
        self,
        pulls: BatchQueue[ModelKey, Batch],
        answers: Outlet[list[Request]],
        models: Models,
        instruments: Instruments,
        announcer: ExecutorHeartbeat | None = None,
        isolating: Isolating | None = None,
        tuning: ExecutorTuning = TUNING.executor,
    ) -> None:
        self._tuning = tuning
        self._isolating = isolating or NotIsolating()
        self._gate = self._isolating.gate
        self._pulls = pulls
        self._answers = answers
        self._models = models
        self._announcer = announcer
        self._metrics, self._tracing = instruments.metrics, instruments.tracing
        self._clock, self._steady = instruments.clock, instruments.steady
        self._anchored = instruments.anchored
        self._loading: set[ModelVersion] = set()
        self._activities: dict[Instance, Activity] = {}
        self._comparisons: dict[ModelVersion, Comparison] = {}
        self._cores = Cores.of_process()
        self.loaded = asyncio.Event()

    def activities(self) -> list[Activity]:
        """Return the current activity of each instance."""
        return list(self._activities.values())

    def devices(self) -> list[DeviceSnapshot]:
        """Return the memory of each device other than the host."""
        return [seen for each in self._activities if (seen := each.device_memory()) is not None]

    async def run(self) -> None:
        """Run until the batches end; load and unload versions as they are added or removed."""
        changes: asyncio.Queue[Change] = asyncio.Queue()
        self._models.subscribe(changes.put_nowait)
        self._loading.update(self._models.catalog.versions(State.LOADING))
        for version in self._loading:
            changes.put_nowait(Change("load", version))
        self._acked(None)
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(self._follow(changes, tasks), name="executor-models")
            await self._pulls.ended()
            following.cancel()
        if self._announcer is not None:
            self._announcer.close()
        self._answers.close()

    async def _follow(self, changes: asyncio.Queue[Change], tasks: asyncio.TaskGroup) -> None:
        """Apply model changes: start serving added versions, release removed ones."""
        serving: dict[ModelVersion, list[BatchConsumer[ModelKey, Batch]]] = {}
        while True:
            change = await changes.get()
            version = change.version
            if change.action == "load":
                key = (version.name, version.version)
                pullers = [self._pulls.puller(key) for _ in range(version.config.instances)]
                serving[version] = pullers
                tasks.create_task(self._serve(version, pullers), name=f"serve {version!r}")
            else:
                for puller in serving.pop(version, ()):
                    puller.release()

    async def _serve(
        self, version: ModelVersion, pullers: list[BatchConsumer[ModelKey, Batch]]
    ) -> None:
        """Load a version, run its instances, and unload it."""
        name = f"{version.name}-{version.version}"
        try:
            async with AsyncExitStack() as stack:
                loader = BackendLoader(version, self._cores)
                stack.callback(loader.release_cores)
                instances = [
                    await stack.enter_async_context(
                        make_instance(version, number, loader, self._tuning)
                    )
                    for number in range(len(pullers))
                ]
                self._models.mark_ready(version, loader.verdict)
                tell_ready(version)
                self._acked(version)
                async with asyncio.TaskGroup() as tasks:
                    for instance, puller in zip(instances, pullers, strict=True):
                        tasks.create_task(self._pull_and_run(version, instance, puller), name=name)
        except ConfigurationError as error:
            log.error(
                Event.MODEL_FAILED, model=version.name, version=version.version, reason=str(error)
            )
            self._models.mark_failed(version, str(error))
            self._acked(version)

    def _acked(self, version: ModelVersion | None) -> None:
        """Note that a version has loaded or failed; set `loaded` after the last initial one."""
        self._loading.discard(version)
        if not self._loading:
            self.loaded.set()

    async def _pull_and_run(
        self, version: ModelVersion, instance: Instance, puller: BatchConsumer[ModelKey, Batch]
    ) -> None:
        """Run one instance's loop; parts of failed batches alternate with fresh batches."""
        limit_s = version.config.max_execution_s + self._tuning.watchdog_grace_s
        self._activities[instance] = Activity(f"executor {instance.name}", limit_s)
        try:
            await self._take_turns(version, instance, puller)
        finally:
            del self._activities[instance]

    async def _take_turns(
        self, version: ModelVersion, instance: Instance, puller: BatchConsumer[ModelKey, Batch]
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            intake = Prefetch(
                puller,
                lambda batch: self._gather_ahead(version, instance, batch),
                tasks,
                self._tuning,
            )
            while (taken := await intake.next()) is not None:
                run = partial(self._run, version, instance, intake, taken)
                finished, halves = await enter_and_run(self._isolating, taken, run)
                intake.put_aside(halves)
                if finished:
                    if self._tracing is not None:
                        self._tracing.executed(taken.batch.batch_id, finished, self._clock())
                    if self._announcer is not None:
                        self._announcer.finished(taken.batch.batch_id, finished)
                    await self._answers.send(finished)

    def _gather_ahead(
        self, version: ModelVersion, instance: Instance, batch: Batch
    ) -> PreparedBatch:
        """Gather a batch while another one computes, and start it when that one ends."""
        clock = self._anchored()
        began_us = clock()
        ended, wanted = self._sort_out(batch.requests)
        together = len(wanted) == 1 or (bool(wanted) and not version.batching_off)
        arrays: Arrays | None = None
        try:
            arrays = instance.gather(wanted) if together else None
        except Exception:  # noqa: BLE001 - it is raised and reported again in the batch's own run
            arrays = None
        # A run that needs a crash marker, or that must be alone, is not queued behind another.
        started = (
            arrays is not None
            and not self._gate.is_marking
            and instance.start_ahead(arrays, self._while_in_time(wanted))
        )
        entry = self._gate.begin() if started else None
        return PreparedBatch(
            batch, ended, wanted, arrays, began_us, clock(), clock=clock, entry=entry
        )

    async def _run(
        self, version: ModelVersion, instance: Instance, intake: Prefetch, taken: PreparedBatch
    ) -> tuple[list[Request], list[Batch]]:
        """Run requests together; return the finished ones and the batches still to run."""
        batch = taken.batch
        # A run that has been started checks deadlines itself.
        ended, wanted = ([], taken.requests) if taken.started else self._sort_out(taken.requests)
        if taken.ended:
            ended = taken.ended + ended
        if not wanted:
            return ended, []
        if version.batching_off and len(wanted) > 1 and not taken.started:
            if version.is_undecided:
                await self._try_together(version, instance, wanted)
            return ended, apart(batch, wanted)
        if len(wanted) != len(taken.requests):
            taken = taken._replace(requests=wanted, arrays=None)
        clock = taken.clock or self._anchored()
        run = Run(batch, wanted, taken.began_us or clock(), taken.gathered_us, clock=clock)
        run.attempts = taken.attempts + 1
        try:
            run.failure = await self._compute(version, instance, intake, run, taken)
        except TooLate:
            # Another run may have been started meanwhile; it goes first.
            return ended, [Batch(batch.batch_id, wanted, batch.reason)]
        except Retriable as error:
            run.failure = Failure(Code.INTERNAL, describe_error(error), Stage.EXECUTOR)
            late = self._put_off(intake, run, run.failure)
            if late is not None:
                return ended + late, []
        run.compute_us = instance.compute_us
        done, parts = self._conclude(version, run)
        return ended + done, parts

    def _conclude(self, version: ModelVersion, run: Run) -> tuple[list[Request], list[Batch]]:
        """Finish a run; return its finished requests, or the halves of a failed batch to run."""
        batch, wanted, failure = run.batch, run.requests, run.failure
        run.ended_us, run.ended_steady_us = run.clock(), self._steady()
        if self._tracing is not None:
            self._tracing.ran(run)
        if failure is None:
            self._note(version, run)
            return wanted, []
        if len(wanted) == 1:
            wanted[0].fail(failure)
            return wanted, []
        self._metrics.bisections.inc()
        middle = len(wanted) // 2
        halves = (wanted[:middle], wanted[middle:])
        return [], [
            Batch(f"{batch.batch_id}.{place}", half, "bisected")
            for place, half in enumerate(halves)
        ]

    async def _try_together(
        self, version: ModelVersion, instance: Instance, requests: list[Request]
    ) -> None:
        """Use these requests to test whether a model without a verdict can be batched."""
        comparison = self._comparisons.setdefault(version, Comparison(version, self._tuning))
        if not comparison.takes():
            return
        outcome = await comparison.hold(
            requests,
            lambda some: instance.gather(some, fresh=False),
            lambda arrays: self._watched(instance, arrays),
        )
        self._metrics.tried_together(version.name, outcome)
        if comparison.verdict is not None and version.is_undecided:
            version.apply_verdict(comparison.verdict)
            log.info(
                Event.MODEL_BATCHING_DECIDED,
                model=version.name,
                version=version.version,
                batching=comparison.verdict.description,
            )
        if not version.is_undecided:
            self._comparisons.pop(version, None)

    async def _compute(
        self,
        version: ModelVersion,
        instance: Instance,
        intake: Prefetch,
        run: Run,
        taken: PreparedBatch,
    ) -> Failure | None:
        """Gather, run and scatter; return the failure of the whole run, or None."""
        try:
            arrays = taken.arrays
            if arrays is None:
                arrays = instance.gather(run.requests, fresh=taken.fresh)
                run.gathered_us = run.clock()
            # With several instances there is no look-ahead: a batch would wait behind this run
            # while another instance could take it.
            if version.config.instances == 1 and not instance.is_quick:
                predicted_us = version.latency.predict_us(
                    run.requests[0].shape_class, sum([request.rows for request in run.requests])
                )
                intake.look_ahead(self._steady(), predicted_us)
            outputs = await self._watched(instance, arrays)
            scatter(run.requests, version.signature, outputs)
            if version.config.finite_outputs:
                refuse_nonfinite(
                    run.requests, version.signature, outputs, self._tuning.max_rows_in_error
                )
        except (Fatal, Retriable, TooLate):
            raise
        except Rejected as error:
            return rejection(error, Stage.EXECUTOR)
        except Exception as error:  # noqa: BLE001 - a model may raise anything; it ends as an answer
            return Failure(
                Code.MODEL_FAILED,
                f"model {version.name} version {version.version}: {describe_error(error)}",
                Stage.EXECUTOR,
            )
        return None

    def _put_off(self, intake: Prefetch, run: Run, failure: Failure) -> list[Request] | None:
        """Schedule a retry after a transient error, for requests whose deadlines allow it.

        Returns:
            The requests that would be late, failed; None if there are no attempts left.
        """
        pause_s = pause_after(run.attempts, run.batch, self._tuning)
        if pause_s is None:
            return None
        self._metrics.retried("run")
        model, version = run.requests[0].model, run.requests[0].version
        log.warning(Event.RUN_RETRIED, model=model, version=version, code=str(failure.code))
        # A model's error text may quote a caller's input, so it is logged at debug level only.
        log.debug(Event.RUN_RETRIED, model=model, version=version, reason=failure.message)
        wanted, late = divide(run.requests, self._clock() + int(pause_s * 1e6))
        for request in late:
            request.fail(failure)
        if wanted:
            again = Batch(run.batch.batch_id, wanted, run.batch.reason)
            intake.put_off(again, pause_s, run.attempts)
        return late

    async def _watched(self, instance: Instance, arrays: Arrays) -> Arrays:
        activity = self._activities[instance]
        activity.begin()
        try:
            return await instance.run(arrays)
        finally:
            activity.end()

    def _while_in_time(self, requests: list[Request]) -> Callable[[], bool]:
        """Return a thread-safe check that none of the requests' deadlines has passed."""
        deadlines = [ms for request in requests if (ms := request.envelope.deadline_ms)]
        if not deadlines:
            return lambda: True
        earliest_us = min(deadlines) * 1000
        return lambda: self._clock() < earliest_us

    def _sort_out(self, requests: list[Request]) -> tuple[list[Request], list[Request]]:
        """Split into (ended, wanted): expired requests and those of revoked partitions end."""
        now_us = self._clock()
        deadlines = [ms for request in requests if (ms := request.envelope.deadline_ms)]
        in_time = not deadlines or now_us < min(deadlines) * 1000
        if in_time and not any_void(requests):
            return [], requests
        ended: list[Request] = []
        wanted: list[Request] = []
        for request in requests:
            failure = VOID if request.ack_handle.revoked else None
            if request.envelope.deadline_ms:
                failure = failure or deadline_passed(request, now_us, Stage.EXECUTOR)
            if failure is None:
                wanted.append(request)
            else:
                request.fail(failure)
                ended.append(request)
        return ended, wanted

    def _note(self, version: ModelVersion, run: Run) -> None:
        rows = sum([request.rows for request in run.requests])
        for request in run.requests:
            request.compute_us = run.compute_us
            request.batch_rows = rows
        version.latency.observe(run.requests[0].shape_class, rows, run.compute_us)
        self._models.catalog.note_use(version.name, version.version)
        if run.batch.end_us:
            version.latency.observe_lateness(run.ended_steady_us - run.batch.end_us)
        self._metrics.ran(
            (version.name, version.version),
            rows,
            wait_us=max(0, run.began_us - run.requests[0].formed_us),
            copy_us=run.gathered_us - run.began_us,
            compute_us=run.compute_us,
        )
