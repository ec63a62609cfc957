"""One instance of a model version: a backend and the thread that makes all its calls.

A run that is quicker than the hand-off to the thread is made inline, on the event loop: the
hand-off costs 20 to 60 microseconds, and more while the loop is busy, since the thread has to
regain the interpreter lock. `InlinePolicy` decides by recent run times, so that a model whose runs
become slow returns to its thread.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, NamedTuple, Self

import structlog

from headrace.errors import Fatal, NotLoadableHere, describe_error
from headrace.models.backends.port import Arrays, Backend
from headrace.models.user_code import Interruptible
from headrace.primitives.worker_thread import Call, WorkerThread
from headrace.protocol.messages import Request
from headrace.services.executor.buffers import HostBlock, gather
from headrace.telemetry.logs import Event
from headrace.telemetry.snapshots import DeviceSnapshot
from headrace.tuning import TUNING, ExecutorTuning

log = structlog.get_logger(__name__)


class InlinePolicy:
    """Decide whether a model's runs are short enough for the event loop.

    Of the last `window` runs (an even number) the median must be below the limit, and all but two
    (other work on the machine delays some) must be at most ten times the limit.
    """

    def __init__(self, limit_us: int, window: int) -> None:
        self._limit_us = limit_us
        self._window = window
        self._recent_us: deque[int] = deque()
        self._ordered_us: list[int] = []
        self.allowed = False

    def observe(self, compute_us: int) -> None:
        """Record a run's duration and update `allowed`."""
        recent_us, ordered_us, window = self._recent_us, self._ordered_us, self._window
        if len(recent_us) == window:
            del ordered_us[bisect_left(ordered_us, recent_us.popleft())]
        recent_us.append(compute_us)
        insort(ordered_us, compute_us)
        self.allowed = (
            len(recent_us) == window
            and ordered_us[window // 2 - 1] + ordered_us[window // 2] < 2 * self._limit_us
            and ordered_us[-3] <= 10 * self._limit_us
        )


class InlineRuns:
    """Runs of a backend on the event loop's thread, as long as they are short.

    Nothing on the event loop could end a run that takes too long there. The instance's own thread,
    which is idle meanwhile, calls `cut_off` at an interval.

    Args:
        backend: the backend, which must not be used by another thread during a run.
        name: name of the instance.

    Attributes:
        is_possible: False if all runs need the instance's thread, or since a run was cut off.
        policy: decides by the durations of all runs.
        compute_us: duration of the last run.
    """

    def __init__(
        self, backend: Backend, name: str, tuning: ExecutorTuning, *, is_possible: bool
    ) -> None:
        self._backend = backend
        self._name = name
        self._limit_s = tuning.inline_cut_off_s
        self.is_possible = is_possible
        self._since_s = 0.0
        self._is_cut_off = False
        self.policy = InlinePolicy(tuning.inline_max_run_us, tuning.inline_window_runs)
        self.compute_us = 0

    def run(self, inputs: Arrays) -> Arrays:
        """Run now; call it only while `is_possible` and the policy allows it.

        Raises:
            CutOffError: the run took too long and was cancelled; later ones must use the thread.
            Exception: any exception of the backend.
        """
        self._since_s = time.monotonic()
        began = time.perf_counter_ns()
        try:
            return self._backend.run(inputs)
        except Exception as error:
            if not self._is_cut_off:
                raise
            log.warning(Event.INLINE_RUN_CUT_OFF, instance=self._name)
            self.is_possible = False
            raise CutOffError from error
        finally:
            self.compute_us = (time.perf_counter_ns() - began) // 1000
            self._since_s = 0.0
            self._is_cut_off = False
            self.policy.observe(self.compute_us)

    # --- on the instance's thread, while it is idle ----------------------------------------------

    def check_interval_s(self) -> float | None:
        """Return how often to call `cut_off`; None if no run is inline."""
        return self._limit_s if self.is_possible else None

    def cut_off(self) -> None:
        """Cancel the current run if it takes too long."""
        since_s = self._since_s
        if since_s and time.monotonic() - since_s >= self._limit_s:
            self._is_cut_off = True
            self._backend.cancel()


class HostBlockSize(NamedTuple):
    """Memory for the inputs of a batch: enough for `rows`, and at most `limit_bytes`."""

    rows: int
    limit_bytes: int


def load_and_warm_up(backend: Backend) -> None:
    """Load a backend and warm it up, as needed before its first run."""
    backend.load()
    backend.warm_up()


class Instance:
    """A backend on its thread. Entering loads and warms it up; leaving unloads it.

    Args:
        backend: the backend, not yet loaded.
        name: name of the thread.
        max_execution_s: a longer run is considered hung and cancelled.
        max_load_s: time limit to load and warm up.
        may_inline: True if the backend may also run on the event loop's thread.
        prepare: prepares the backend, on its thread.
        block_size: size of the blocks that batches are gathered into; None: new memory for each
            batch.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        *,
        max_execution_s: float,
        max_load_s: float,
        may_inline: bool,
        prepare: Callable[[Backend], None] = load_and_warm_up,
        block_size: HostBlockSize | None = None,
        tuning: ExecutorTuning = TUNING.executor,
    ) -> None:
        self._backend = backend
        self._tuning = tuning
        self._max_load_s = max_load_s
        self._max_execution_s = max_execution_s
        self._prepare = prepare
        self._block_size = block_size
        self._blocks: cycle[HostBlock | None] = cycle((None,))
        self._inline = InlineRuns(backend, name, tuning, is_possible=may_inline)
        self._worker = WorkerThread(
            name, idle_timeout_s=self._inline.check_interval_s, on_idle=self._inline.cut_off
        )
        self._loading = Interruptible()
        self._hangs = False
        self._ahead: tuple[Arrays, Call] | None = None
        self._current: Call | None = None
        self.compute_us = 0

    @property
    def name(self) -> str:
        """Name of the thread: model, version and number."""
        return self._worker.name

    def device_memory(self) -> DeviceSnapshot | None:
        """Return the memory of the instance's device; None if that is the host."""
        return None

    def device_growth(self) -> dict[str, int]:
        """Return the bytes that loading has taken of a device other than the host, by its name."""
        return {}

    async def __aenter__(self) -> Self:
        try:
            self._worker.start()
            await self._wait_loaded()
            signature = self._backend.signature
            if self._block_size is not None and HostBlock.fits(signature):
                # One holds the batch that runs; the next batch is gathered into the other.
                blocks = [HostBlock(signature, *self._block_size, self._tuning) for _ in range(2)]
                self._blocks = cycle(blocks)
        except BaseException as error:
            await self._end()
            if isinstance(error, Fatal) or not isinstance(error, Exception):
                raise
            raise NotLoadableHere(f"{self._worker.name}: {describe_error(error)}") from error
        return self

    async def _wait_loaded(self) -> None:
        loading = self._loading
        call = self._call(lambda: loading.run(lambda: self._prepare(self._backend)))
        done, _ = await asyncio.wait([call.done], timeout=self._max_load_s)
        if not done:
            self._backend.cancel()
            # Also interrupt Python code, which would otherwise keep using the interpreter lock.
            loading.interrupt(self._worker.thread)
            done, _ = await asyncio.wait([call.done], timeout=self._tuning.cancel_grace_s)
            self._hangs = not done
            raise NotLoadableHere(
                f"{self._worker.name}: expected it to load and warm up within max_load_s = "
                f"{self._max_load_s:g} s, got no end"
            )
        call.done.result()

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _end(self) -> None:
        """Cancel the current run, unload, and join the thread. The interpreter must not end
        before the thread: native code still running then would abort the process.
        """
        if not self._worker.is_started:  # it could not even be started
            return
        # Cancel before `unload` is queued, since `unload` must not be cancelled.
        self._backend.cancel()
        self._call(self._unload).done.add_done_callback(self._log_unload)
        self._worker.close()
        if self._hangs:
            return
        if not self._loading.is_done:
            # Its load was cancelled. Most loads end soon, but Python code may run forever.
            await self._worker.join(self._tuning.cancel_grace_s / 2)
            self._loading.interrupt(self._worker.thread)
        await self._worker.join(self._tuning.cancel_grace_s)
        if self._worker.thread.is_alive():
            log.warning(
                Event.MODEL_UNLOAD_FAILED,
                instance=self._worker.name,
                reason=f"expected it to end within {self._tuning.cancel_grace_s:g} s, got no end; "
                "its memory is not free",
            )

    def _unload(self) -> None:
        """Unload the backend; the last call on the thread."""
        self._backend.unload()

    def _log_unload(self, done: asyncio.Future[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            log.warning(
                Event.MODEL_UNLOAD_FAILED, instance=self._worker.name, reason=describe_error(error)
            )

    @property
    def runs_inline(self) -> bool:
        """True if the next run is made on the loop, where it cannot overlap with other work."""
        inline = self._inline
        return inline.is_possible and inline.policy.allowed and self._ahead is None

    def gather(self, requests: Sequence[Request], *, fresh: bool = True) -> Arrays:
        """Return the inputs of a run of all requests.

        Args:
            requests: requests of one shape class.
            fresh: gather into the next block, which is reused by the fresh batch after next;
                otherwise gather into new memory.
        """
        block = next(self._blocks) if fresh else None
        return gather(requests, self._backend.signature, block)

    def discard(self, inputs: Arrays) -> None:
        """Give up the result of `gather`, which is not run."""

    def submit_next(self, inputs: Arrays, is_in_time: Callable[[], bool]) -> bool:
        """Queue a run behind the current one; `run` then waits for it. False if not possible.

        Args:
            inputs: the result of `gather`.
            is_in_time: called on the thread before the run; if False, `run` raises
                `DeadlinePassed`.
        """
        if self.runs_inline:
            return False

        def work() -> Arrays:
            # Checked on the thread when its turn has come: the loop cannot know how long the run
            # before it takes.
            if not is_in_time():
                raise DeadlinePassed
            return self._backend.run(inputs)

        self._ahead = (inputs, self._call(work))
        return True

    async def run(self, inputs: Arrays) -> Arrays:
        """Run once and return the outputs; `compute_us` is then the duration.

        Raises:
            RunTimeoutError: the run took longer than `max_execution_s` and was cancelled.
            DeadlinePassed: the deadline passed before the run, which was submitted ahead, could
                begin.
            Fatal: the run did not end after it was cancelled.
            Exception: any exception of the backend.
        """
        if self._ahead is not None and self._ahead[0] is inputs:
            (_, call), self._ahead = self._ahead, None
            return await self.wait(call)
        if self.runs_inline:
            try:
                return self.run_now(inputs)
            except CutOffError:
                pass
        return await self.wait(self.submit(inputs))

    def run_now(self, inputs: Arrays) -> Arrays:
        """Run on the event loop; call it only while `runs_inline`. See `InlineRuns.run`."""
        try:
            return self._inline.run(inputs)
        finally:
            self.compute_us = self._inline.compute_us

    def submit(self, inputs: Arrays) -> Call:
        """Queue a run on the thread, behind earlier calls."""
        return self._call(lambda: self._backend.run(inputs))

    async def wait(self, call: Call) -> Arrays:
        """Wait for a queued run and return its outputs; see `run`."""
        try:
            outputs = await self._wait_bounded(call)
        except DeadlinePassed:
            raise
        except BaseException:
            self._record_duration(call)
            raise
        self._record_duration(call)
        return outputs

    def _record_duration(self, call: Call) -> None:
        self.compute_us = call.compute_us
        self._inline.policy.observe(call.compute_us)

    async def _wait_bounded(self, call: Call) -> Arrays:
        done, _ = await asyncio.wait([call.done], timeout=self._max_execution_s)
        if done:
            return call.done.result()  # type: ignore[no-any-return]  # a future of anything
        # Cancelling works from another thread; whether the backend obeys shows only when the
        # call ends. Until then the thread can take no other call.
        self._cancel(call)
        done, _ = await asyncio.wait([call.done], timeout=self._tuning.cancel_grace_s)
        if not done:
            # A thread cannot be ended from outside: only a new process has an instance again.
            self._hangs = True
            raise Fatal(
                f"{self._worker.name}: a run did not end {self._tuning.cancel_grace_s} s after it "
                "was cancelled"
            )
        raise RunTimeoutError(f"the run took longer than max_execution_s = {self._max_execution_s}")

    def _cancel(self, call: Call) -> None:
        """Cancel a call, unless it has ended and the thread runs another one."""
        if self._current is call:
            self._backend.cancel()

    def _call(self, work: Callable[[], Any]) -> Call:
        def begin() -> Any:
            self._current = call
            try:
                return work()
            finally:
                self._current = None  # which would hold the outputs until the next run

        # `begin` needs `call`, so it is assigned before the thread can take it.
        call = Call(begin)
        self._worker.put(call)
        return call


class DeadlinePassed(Exception):
    """Raised for a run that was submitted ahead, if its deadline has passed when it would begin."""


class RunTimeoutError(TimeoutError):
    """A run took longer than `max_execution_s` and was cancelled."""


class CutOffError(Exception):
    """A run on the event loop was cancelled because it took too long."""
