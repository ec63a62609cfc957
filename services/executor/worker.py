"""One instance's loop: pull a batch → gather → run → scatter its outputs → send its answers.

The path of a batch: `_next` takes it, `_run` drops expired requests, `_compute` gathers, runs and
scatters, `_finish_run` records the run. When a run fails, the batch is halved, and halves alternate
with fresh batches until the faulty request runs alone: only that request fails.

A batch for an idle instance whose runs are quick does not wait for the loop: `run_now` takes the
same steps in the turn in which the batcher has closed it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import Protocol, TypeAlias

import structlog

from headrace.crash_isolation.isolation import alone_of, is_isolated, records_of
from headrace.crash_isolation.run_gate import RunGate
from headrace.delivery.failures import rejection, split_ended
from headrace.errors import Code, Fatal, Rejected, Retriable, describe_error
from headrace.models.backends.port import Arrays
from headrace.models.registry import Models
from headrace.models.version import ModelVersion
from headrace.protocol.messages import Batch, BatchSummary, Failure, Request
from headrace.services.executor.answer_rewriting import rewrite_answers
from headrace.services.executor.buffers import scatter
from headrace.services.executor.instance import DeadlinePassed, Instance, RunTimeoutError
from headrace.services.executor.postprocessing import Postprocessor
from headrace.services.executor.prefetch import Prefetch, PreparedBatch
from headrace.services.executor.safety import BatchSafetySampler, refuse_nonfinite
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import Event
from headrace.telemetry.snapshots import DeviceSnapshot
from headrace.telemetry.span_attributes import ModelRun
from headrace.telemetry.watchdog import Activity
from headrace.topics import Stage
from headrace.transport.batch_io import split_batch
from headrace.transport.channels import BatchConsumer, ModelKey, SendStream
from headrace.transport.heartbeat import ExecutorHeartbeat
from headrace.tuning import TUNING, ExecutorTuning

log = structlog.get_logger(__name__)


RunOutcome: TypeAlias = tuple[list[Request], list[Batch]]
"""Finished requests, and batches still to run."""


class Quarantine(Protocol):
    """The part of `headrace.consumer.quarantine.QuarantineGate` that is needed here."""

    @property
    def gate(self) -> RunGate:
        """Gate that every run enters."""
        ...

    def end_isolation(self, requests: Sequence[Request]) -> None:
        """Make isolated requests that have ended ordinary ones, and let the next one run."""
        ...


class NoQuarantine:
    """Quarantine of an executor whose requests are never suspects."""

    def __init__(self) -> None:
        self.gate = RunGate()

    def end_isolation(self, requests: Sequence[Request]) -> None:
        """Do nothing."""


class AnswerBuffer:
    """Finished requests that wait a moment, so that those of several quick runs are sent together.

    A chunk costs the responder about as much as dozens of small requests.

    Args:
        answers: receives the requests.
        heartbeat: notified of ended requests if the batcher is in another process.

    Attributes:
        requests: those that wait, in the order in which they finished.
    """

    def __init__(
        self,
        answers: SendStream[list[Request]],
        instruments: Instruments,
        heartbeat: ExecutorHeartbeat | None,
        tuning: ExecutorTuning,
    ) -> None:
        self._answers = answers
        self._tracing, self._clock = instruments.tracing, instruments.clock
        self._heartbeat = heartbeat
        self._max_requests = tuning.max_buffered_answers
        self._max_wait_s = tuning.buffer_answers_s
        self._since_s = 0.0
        self.requests: list[Request] = []

    def add(self, batch: Batch, finished: list[Request]) -> None:
        """Add finished requests of a batch."""
        if self._tracing is not None:
            self._tracing.executed(batch.batch_id, finished, self._clock())
        if self._heartbeat is not None:
            self._heartbeat.finished(batch.batch_id, finished)
        if not self.requests:
            self._since_s = time.perf_counter()
        self.requests += finished

    def is_due(self) -> bool:
        """Return True if so many wait, or for so long, that they must be sent."""
        waited_s = time.perf_counter() - self._since_s
        return len(self.requests) >= self._max_requests or waited_s >= self._max_wait_s

    def is_full(self) -> bool:
        """Return True while the responder is behind."""
        return self._answers.is_full()

    async def send(self) -> None:
        """Send all; wait while the responder is behind."""
        await self._answers.send(self._clear())

    def send_nowait(self) -> None:
        """Send all without waiting; call it only while the responder is not full."""
        self._answers.send_nowait(self._clear())

    def _clear(self) -> list[Request]:
        requests, self.requests = self.requests, []
        return requests


class Worker:
    """Run the batches of one instance of a model version.

    Args:
        consumer: supplies batches.
        answers: receives requests with their outputs or failures.
        quarantine: decides how runs begin, and is notified of requests that ran alone.
        sampler: returns the sampler of the version; called while batching is undecided.
        heartbeat: see `AnswerBuffer`.
        postprocessor: runs the version's postprocess, if it has one; closed when `run` ends.

    Attributes:
        activity: the current run.
        is_busy: False while it waits for a batch and has none to retry; True before it first waits.
    """

    def __init__(
        self,
        version: ModelVersion,
        instance: Instance,
        consumer: BatchConsumer[ModelKey, Batch],
        answers: SendStream[list[Request]],
        models: Models,
        instruments: Instruments,
        quarantine: Quarantine,
        sampler: Callable[[], BatchSafetySampler],
        heartbeat: ExecutorHeartbeat | None = None,
        tuning: ExecutorTuning = TUNING.executor,
        postprocessor: Postprocessor | None = None,
    ) -> None:
        self._version = version
        self._postprocessor = postprocessor
        self._instance = instance
        self._consumer = consumer
        self._models = models
        self._quarantine = quarantine
        self._gate = quarantine.gate
        self._sampler = sampler
        self._metrics, self._tracing = instruments.metrics, instruments.tracing
        self._clock, self._steady = instruments.clock, instruments.steady
        self._anchored_clock = instruments.anchored_clock
        self._tuning = tuning
        # A batcher in another process waits for each of its batches to be completed.
        self._join_limits = version if heartbeat is None else None
        self._buffer = AnswerBuffer(answers, instruments, heartbeat, tuning)
        limit_s = version.config.max_execution_s + tuning.watchdog_grace_s
        self.activity = Activity(f"executor {instance.name}", limit_s)
        self.is_busy = True

    @property
    def version(self) -> ModelVersion:
        """The version that it runs."""
        return self._version

    def device_memory(self) -> DeviceSnapshot | None:
        """Return the memory of the instance's device; None if that is the host."""
        return self._instance.device_memory()

    async def run(self) -> None:
        """Run until there are no more batches; parts of failed ones alternate with fresh ones."""
        with nullcontext() if self._postprocessor is None else closing(self._postprocessor):
            await self._run_batches()

    async def _run_batches(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            prefetch = Prefetch(
                self._consumer,
                self._gather_ahead,
                tasks,
                self.run_now,
                self._tuning,
                self._join_limits,
            )
            while (prepared := await self._next(prefetch)) is not None:
                run = partial(self._run, prefetch, prepared)
                finished, halves = await enter_and_run(self._quarantine, prepared, run)
                prefetch.requeue_halves(halves, of_part=not prepared.is_fresh)
                if finished:
                    self._buffer.add(prepared.batch, finished)
                    if not self._instance.runs_inline:
                        await self._buffer.send()
                # Otherwise an idle instance would keep its last batch in memory, with its answers.
                del prepared, run, finished, halves

    # --- batches in, answers out --------------------------------------------------------------

    async def _next(self, prefetch: Prefetch) -> PreparedBatch | None:
        """Return the next batch; None when there will be no more.

        Buffered answers are sent before this waits. They are also sent, and other tasks get a
        turn, before quick runs that follow each other block the event loop for too long.
        """
        prepared, buffer = prefetch.next_nowait(), self._buffer
        if not buffer.requests:
            return prepared or await self._wait_next(prefetch)
        if prepared is None:
            if buffer.is_full():
                # A batch may come while this waits, so look again afterwards.
                await buffer.send()
                return prefetch.next_nowait() or await self._wait_next(prefetch)
            # No batch can have come since `next_nowait`: there is no await between the two.
            buffer.send_nowait()
            return await self._wait_next(prefetch)
        if buffer.is_due():
            await buffer.send()
            await asyncio.sleep(0)
        return prepared

    async def _wait_next(self, prefetch: Prefetch) -> PreparedBatch | None:
        self.is_busy = prefetch.has_retries
        try:
            return await prefetch.wait_next()
        finally:
            self.is_busy = True

    # --- a run -------------------------------------------------------------------------------

    def run_now(self, batch: Batch) -> bool:
        """Run a batch and send its answers in the caller's turn of the event loop.

        Called while `run` waits for a batch. Return False if the batch is left to it: because
        something would have to wait, or because the run failed. That run is then repeated there,
        where retries, halves and the run gate are handled; quick models have no side effects.
        """
        instance, version = self._instance, self._version
        if (
            not instance.runs_inline
            or self._gate.is_marking
            or version.rewrites_answers
            or is_isolated(batch.requests[0])
            or (version.batching_off and len(batch.requests) > 1)
            # Checked before the run: its answers could not wait in the caller's turn.
            or self._buffer.is_full()
        ):
            return False
        entry = self._gate.begin()
        clock = self._anchored_clock()
        began_us = clock()
        finished, remaining = split_ended(batch.requests, began_us, Stage.EXECUTOR)
        if remaining:
            run = ModelRun(batch, remaining, began_us, clock=clock, attempts=1)
            self.activity.begin()
            try:
                arrays = instance.gather(remaining)
                run.gathered_us = clock()
                self._scatter(run, instance.run_now(arrays))
            except Fatal:
                raise
            except Exception:  # noqa: BLE001 - it is raised and reported again by the repeated run
                self._gate.leave(entry)
                return False
            finally:
                self.activity.end()
            run.compute_us = instance.compute_us
            finished = finished + self._finish_run(run)[0]
        self._gate.leave(entry)
        self._buffer.add(batch, finished)
        self._buffer.send_nowait()
        return True

    async def _run(self, prefetch: Prefetch, prepared: PreparedBatch) -> RunOutcome:
        """Run requests together; return the finished ones and the batches still to run."""
        version, batch = self._version, prepared.batch
        # Deadlines are checked here and not when the batch was pulled: entering the gate may have
        # waited since then. A run that has been started checks them itself.
        ended, remaining = (
            ([], prepared.requests)
            if prepared.is_started
            else self._drop_expired(prepared.requests)
        )
        if prepared.ended:
            ended = prepared.ended + ended
        is_split = version.batching_off and len(remaining) > 1 and not prepared.is_started
        if is_split or len(remaining) != len(prepared.requests):
            if prepared.arrays is not None:
                self._instance.discard(prepared.arrays)
            prepared = prepared._replace(requests=remaining, arrays=None)
        if not remaining:
            return ended, []
        if is_split:
            if version.is_undecided:
                gather = partial(self._instance.gather, fresh=False)
                await self._sampler().sample(remaining, gather, self._run_watched)
            return ended, split_batch(batch, remaining, "apart")
        clock = prepared.clock or self._anchored_clock()
        run = ModelRun(
            batch, remaining, prepared.began_us or clock(), prepared.gathered_us, clock=clock
        )
        run.attempts = prepared.attempts + 1
        # Halves of a batch that failed with another error have not been retried as a whole.
        halved = "retried" if batch.reason == "retried" else "bisected"
        try:
            run.failure = await self._compute(prefetch, run, prepared)
        except DeadlinePassed:
            # Another run may have been started meanwhile; it goes first.
            return ended, [Batch(batch.batch_id, remaining, batch.reason)]
        except Retriable as error:
            run.failure = Failure(Code.INTERNAL, describe_error(error), Stage.EXECUTOR)
            late = prefetch.retry_later(run, run.failure, self._clock())
            if late is not None:
                self._record_retry(run.requests[0], run.failure)
                return ended + late, []
            halved = "retried"
        run.compute_us = self._instance.compute_us
        done, parts = self._finish_run(run, halved)
        return ended + done, parts

    async def _compute(
        self, prefetch: Prefetch, run: ModelRun, prepared: PreparedBatch
    ) -> Failure | None:
        """Gather, run and scatter; return the failure of the whole run, or None."""
        version, instance = self._version, self._instance
        try:
            arrays = prepared.arrays
            if arrays is None:
                arrays = instance.gather(run.requests, fresh=prepared.is_fresh)
                run.gathered_us = run.clock()
            # With several instances there is no look-ahead: a batch would wait behind this run
            # while another instance could take it.
            if version.config.instances == 1 and not instance.runs_inline:
                predicted_us = version.latency.predict_us(
                    run.requests[0].shape_class, sum([request.rows for request in run.requests])
                )
                prefetch.start_prefetch(self._steady(), predicted_us)
            self._scatter(run, await self._run_watched(arrays))
            if version.rewrites_answers:
                for request in run.requests:
                    request.restore()  # to the value, which is part of the answer
                await rewrite_answers(
                    run.requests, version, self._postprocessor, self._tuning, self._clock
                )
        except (Fatal, Retriable, DeadlinePassed):
            raise
        except Rejected as error:
            return rejection(error, Stage.EXECUTOR)
        except Exception as error:  # noqa: BLE001 - a model may raise anything; it ends as an answer
            run.has_hung = isinstance(error, RunTimeoutError)
            return Failure(
                Code.MODEL_FAILED,
                f"model {version.name} version {version.version}: {describe_error(error)}",
                Stage.EXECUTOR,
            )
        return None

    def _scatter(self, run: ModelRun, outputs: Arrays) -> None:
        """Give each request its rows of the outputs."""
        version = self._version
        scatter(run.requests, version.signature, outputs)
        # After the scatter, which would replace what the failure has cleared.
        if version.config.finite_outputs:
            refuse_nonfinite(
                run.requests, version.signature, outputs, self._tuning.max_rows_in_error
            )

    def _finish_run(self, run: ModelRun, halved: str = "bisected") -> RunOutcome:
        """Finish a run; return its finished requests, or the parts of a failed batch to run, which
        get `halved` as their reason: its halves, or each request alone if the run has hung, since
        each part with the culprit would hang as long again.
        """
        batch, requests, failure = run.batch, run.requests, run.failure
        run.ended_us, run.ended_steady_us = run.clock(), self._steady()
        if self._tracing is not None:
            self._tracing.ran(run)
        if failure is None:
            self._record_run(run)
            return requests, []
        if len(requests) == 1:
            requests[0].fail(failure)
            return requests, []
        self._metrics.bisections.inc()
        if run.has_hung:
            return [], split_batch(batch, requests, halved)
        middle = len(requests) // 2
        halves = (requests[:middle], requests[middle:])
        return [], [
            Batch(f"{batch.batch_id}.{place}", half, halved) for place, half in enumerate(halves)
        ]

    def _record_run(self, run: ModelRun) -> None:
        version = self._version
        rows = sum([request.rows for request in run.requests])
        formed_us = run.requests[0].batch.formed_us
        summary = BatchSummary(formed_us, run.compute_us, rows)
        for request in run.requests:
            request.batch = summary
        version.latency.observe(run.requests[0].shape_class, rows, run.compute_us)
        self._models.catalog.note_use(version.name, version.version)
        version.last_used_us = run.ended_steady_us
        if run.batch.end_us:
            version.latency.observe_lateness(run.ended_steady_us - run.batch.end_us)
        self._metrics.ran(
            (version.name, version.version),
            rows,
            wait_us=max(0, run.began_us - formed_us),
            copy_us=run.gathered_us - run.began_us,
            compute_us=run.compute_us,
        )

    def _record_retry(self, request: Request, failure: Failure) -> None:
        self._metrics.retried("run")
        model, version = request.model, request.version
        log.warning(Event.RUN_RETRIED, model=model, version=version, code=str(failure.code))
        # A model's error text may quote a caller's input, so it is logged at debug level only.
        log.debug(Event.RUN_RETRIED, model=model, version=version, reason=failure.message)

    async def _run_watched(self, arrays: Arrays) -> Arrays:
        self.activity.begin()
        try:
            return await self._instance.run(arrays)
        finally:
            self.activity.end()

    def _drop_expired(self, requests: list[Request]) -> tuple[list[Request], list[Request]]:
        """Split into (ended, remaining): expired requests and those of revoked partitions end."""
        return split_ended(requests, self._clock(), Stage.EXECUTOR)

    # --- before, after and beside a run ------------------------------------------------------

    def _gather_ahead(self, batch: Batch) -> PreparedBatch:
        """Gather a batch while another one computes, and start it when that one ends."""
        version, instance = self._version, self._instance
        clock = self._anchored_clock()
        began_us = clock()
        ended, remaining = self._drop_expired(batch.requests)
        runs_together = len(remaining) == 1 or (bool(remaining) and not version.batching_off)
        arrays: Arrays | None = None
        try:
            arrays = instance.gather(remaining) if runs_together else None
        except Exception:  # noqa: BLE001 - it is raised and reported again in the batch's own run
            arrays = None
        # A run that needs a crash marker, or that must be alone, is not queued behind another.
        started = (
            arrays is not None
            and not self._gate.is_marking
            and instance.submit_next(arrays, self._make_deadline_check(remaining))
        )
        entry = self._gate.begin() if started else None
        return PreparedBatch(
            batch, ended, remaining, arrays, began_us, clock(), clock=clock, entry=entry
        )

    def _make_deadline_check(self, requests: list[Request]) -> Callable[[], bool]:
        """Return a thread-safe check that none of the requests' deadlines has passed."""
        deadlines = [ms for request in requests if (ms := request.envelope.deadline_ms)]
        if not deadlines:
            return lambda: True
        earliest_us = min(deadlines) * 1000
        return lambda: self._clock() < earliest_us


async def enter_and_run(
    quarantine: Quarantine, prepared: PreparedBatch, run: Callable[[], Awaitable[RunOutcome]]
) -> RunOutcome:
    """Enter the gate, run, and leave it; a run that is cancelled or raises does not leave it."""
    gate, requests = quarantine.gate, prepared.batch.requests
    if is_isolated(requests[0]):
        await gate.enter_alone(alone_of(requests[0]))
        done = await run()
        gate.leave_alone()
        # Clear it before any other run enters: there is no await since it left the gate.
        quarantine.end_isolation(done[0])
        return done
    entry = prepared.entry
    if entry is None:
        entry = await gate.enter(records_of(requests)) if gate.is_marking else gate.begin()
    done = await run()
    # Not in a `finally`: after a failed run the next one would seem to have run alone.
    gate.leave(entry)
    return done
