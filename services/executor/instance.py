"""One instance of a model version: a backend and the thread that all its calls are made on.

A run that is quicker than the way to the thread and back is made inline, on the event loop: the
hand-off costs 20 to 60 microseconds, and more while the loop is busy, since the thread has to win
the interpreter lock back. `Inline` decides by what runs took lately, and lets a model whose runs
have become slow go back to its thread after one of them.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, NamedTuple, Self

import structlog

from headrace.errors import ConfigurationError, Fatal, HeadraceError
from headrace.models.backend import Arrays, Backend
from headrace.models.user_code import describe, interrupt
from headrace.protocol.messages import Request
from headrace.services.executor.blocks import TURNS, HostBlock
from headrace.services.executor.gather import gather
from headrace.telemetry.logs import Event
from headrace.telemetry.snapshots import DeviceSnapshot

INLINE_BELOW_US = 200
INLINE_CUT_OFF_S = 1.0
"""A run on the event loop that takes longer is ended, and made again on the thread."""
CANCEL_GRACE_S = 5.0
MAX_LOAD_S = 600.0

log = structlog.get_logger(__name__)


class Inline:
    """Whether runs of a model are short enough for the event loop.

    Judged by the last `window` runs, an even number: their median is below the limit, and all but
    two of them (a machine that is busy otherwise stretches some) are not far above it.
    """

    def __init__(self, limit_us: int = INLINE_BELOW_US, window: int = 16) -> None:
        self._limit_us = limit_us
        self._window = window
        self._recent_us: deque[int] = deque()
        self._ordered_us: list[int] = []
        self.allowed = False

    def observe(self, compute_us: int) -> None:
        """Learn from a run."""
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


class Room(NamedTuple):
    """How much memory the inputs of a batch may have: for so many rows, and never more bytes."""

    rows: int
    limit_bytes: int


class Call:
    """Something for the thread to do, after what it was given before.

    Attributes:
        done: its result, on the loop.
        compute_us: how long it took, when it is done, unless it says so itself.
    """

    __slots__ = ("compute_us", "done", "loop", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self.loop.create_future()
        self.compute_us = 0
        # A failure that nobody waits for any more, of a run cut short, is no news to anyone.
        self.done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


def load_and_warm_up(backend: Backend) -> None:
    """What every backend needs before its first run."""
    backend.load()
    backend.warm_up()


class Instance:
    """A backend in its thread. Entering loads and warms it up; leaving unloads it.

    Args:
        backend: not yet loaded.
        name: of the thread.
        max_execution_s: a run that takes longer is taken for hung and ended.
        may_inline: the backend may run on the event loop's thread as well.
        prepare: makes the backend ready, on its thread.
        room: of the blocks that batches are gathered into; None: of each batch's own.

    Attributes:
        max_load_s: what has not loaded and warmed up by then has failed; to be set before.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        *,
        max_execution_s: float,
        may_inline: bool,
        prepare: Callable[[Backend], None] = load_and_warm_up,
        room: Room | None = None,
    ) -> None:
        self._backend = backend
        self._max_execution_s = max_execution_s
        self._may_inline = may_inline
        self._prepare = prepare
        self._room = room
        self._blocks: cycle[HostBlock | None] = cycle((None,))
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=serve_calls, args=(self._next_call,), name=name, daemon=True
        )
        self._inline = Inline()
        self._inline_since_s = 0.0
        self._cut_off = False
        self._hangs = False
        self.max_load_s = MAX_LOAD_S
        self._ahead: tuple[Arrays, Call] | None = None
        self._current: Call | None = None
        self.compute_us = 0

    @property
    def name(self) -> str:
        """Of its model, version and number."""
        return self._thread.name

    def device_memory(self) -> DeviceSnapshot | None:
        """Of the device that it runs on, unless that is the host."""
        return None

    async def __aenter__(self) -> Self:
        try:
            self._thread.start()
            await self._loaded(self._call(lambda: self._prepare(self._backend)))
            signature = self._backend.signature
            if self._room is not None and HostBlock.fits(signature):
                blocks = [HostBlock(signature, *self._room) for _ in range(TURNS)]
                self._blocks = cycle(blocks)
        except BaseException as error:
            await self._end()
            if isinstance(error, HeadraceError) or not isinstance(error, Exception):
                raise
            raise ConfigurationError(f"{self._thread.name}: {describe(error)}") from error
        return self

    async def _loaded(self, call: Call) -> None:
        done, _ = await asyncio.wait([call.done], timeout=self.max_load_s)
        if not done:
            self._backend.cancel()
            # What is written in Python would otherwise hold the interpreter lock from now on.
            interrupt(self._thread)
            done, _ = await asyncio.wait([call.done], timeout=CANCEL_GRACE_S)
            self._hangs = not done
            raise ConfigurationError(
                f"{self._thread.name}: expected it to load and warm up within max_load_s = "
                f"{self.max_load_s:g} s, got no end"
            )
        call.done.result()

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _end(self) -> None:
        """Cut short what runs, unload, and wait for the thread. The interpreter must not end
        before it does: native code that is still running then would abort the process.
        """
        if self._thread.ident is None:  # it could not even be started
            return
        # Before `unload` is begun, which is not to be cut short.
        self._backend.cancel()
        self._call(self._unload).done.add_done_callback(self._log_unload)
        self._calls.put(None)
        if not self._hangs:
            await asyncio.to_thread(self._thread.join, CANCEL_GRACE_S)

    def _unload(self) -> None:
        """Free everything; the last call on the thread."""
        self._backend.unload()

    def _log_unload(self, done: asyncio.Future[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            log.warning(
                Event.MODEL_UNLOAD_FAILED, instance=self._thread.name, reason=describe(error)
            )

    @property
    def is_quick(self) -> bool:
        """The next run is made on the loop: it would not go on while another one computes."""
        return self._may_inline and self._inline.allowed and self._ahead is None

    def gather(self, requests: Sequence[Request], *, fresh: bool = True) -> Arrays:
        """The inputs of a run of them together.

        Args:
            requests: of one shape class.
            fresh: into the block whose turn it is, where they hold until the fresh batch after
                next is gathered; otherwise into memory of their own.
        """
        block = next(self._blocks) if fresh else None
        return gather(requests, self._backend.signature, block)

    def start_ahead(self, inputs: Arrays, wanted: Callable[[], bool]) -> bool:
        """Begin a run behind the one that is under way, if that can be; `run` then waits for it.

        Args:
            inputs: from `gather`.
            wanted: asked on the thread, before the run; if not, `run` raises `TooLate`.
        """
        if self.is_quick:
            return False

        def work() -> Arrays:
            if not wanted():
                raise TooLate
            return self._backend.run(inputs)

        self._ahead = (inputs, self._call(work))
        return True

    async def run(self, inputs: Arrays) -> Arrays:
        """Run once; `compute_us` tells afterwards how long it took.

        Raises:
            TimeoutError: it took longer than `max_execution_s` and was ended.
            TooLate: it was begun ahead, and is not wanted any more.
            Fatal: it did not even end when told to.
            Exception: whatever the backend raises.
        """
        if self._ahead is not None and self._ahead[0] is inputs:
            (_, call), self._ahead = self._ahead, None
            return await self.finish(call)
        if self.is_quick:
            try:
                return self._on_the_loop(inputs)
            except _CutOffError:
                log.warning(Event.INLINE_RUN_CUT_OFF, instance=self._thread.name)
                self._may_inline = False
            finally:
                self._inline.observe(self.compute_us)
        return await self.finish(self.begin(inputs))

    def begin(self, inputs: Arrays) -> Call:
        """Begin a run on the thread, behind what that was given before."""
        return self._call(lambda: self._backend.run(inputs))

    async def finish(self, call: Call) -> Arrays:
        """Wait for a run that was begun. See `run`."""
        try:
            outputs = await self._bounded(call)
        except TooLate:
            raise
        except BaseException:
            self._learn(call)
            raise
        self._learn(call)
        return outputs

    def _learn(self, call: Call) -> None:
        self.compute_us = call.compute_us
        self._inline.observe(call.compute_us)

    def _on_the_loop(self, inputs: Arrays) -> Arrays:
        """Run here and now; the thread, which is idle meanwhile, watches how long it takes."""
        self._inline_since_s = time.monotonic()
        began = time.perf_counter_ns()
        try:
            return self._backend.run(inputs)
        except Exception as error:
            if self._cut_off:
                raise _CutOffError from error
            raise
        finally:
            self.compute_us = (time.perf_counter_ns() - began) // 1000
            self._inline_since_s = 0.0
            self._cut_off = False

    async def _bounded(self, call: Call) -> Arrays:
        done, _ = await asyncio.wait([call.done], timeout=self._max_execution_s)
        if done:
            return call.done.result()  # type: ignore[no-any-return]  # a future of anything
        self._cancel(call)
        done, _ = await asyncio.wait([call.done], timeout=CANCEL_GRACE_S)
        if not done:
            self._hangs = True
            raise Fatal(
                f"{self._thread.name}: a run did not end {CANCEL_GRACE_S} s after it was cancelled"
            )
        raise TimeoutError(f"the run took longer than max_execution_s = {self._max_execution_s}")

    def _cancel(self, call: Call) -> None:
        """End a call, unless it has ended by itself meanwhile and another one is under way."""
        if self._current is call:
            self._backend.cancel()

    def _call(self, work: Callable[[], Any]) -> Call:
        def begin() -> Any:
            self._current = call
            return work()

        call = Call(begin)
        self._calls.put(call)
        return call

    def _next_call(self) -> Call | None:
        if not self._may_inline:
            return self._calls.get()
        while True:
            try:
                return self._calls.get(timeout=INLINE_CUT_OFF_S)
            except queue.Empty:
                since_s = self._inline_since_s
                if since_s and time.monotonic() - since_s >= INLINE_CUT_OFF_S:
                    self._cut_off = True
                    self._backend.cancel()


def serve_calls(next_call: Callable[[], Call | None]) -> None:
    """What a thread does: calls, one after the other, until there is none."""
    while (call := next_call()) is not None:
        result: Any = None
        error: Exception | None = None
        began = time.perf_counter_ns()
        try:
            result = call.work()
        except StopIteration as raised:  # which no future takes
            error = _as_error(raised)
        except Exception as raised:  # noqa: BLE001 - it is raised again by who awaits
            error = raised
        except BaseException as raised:  # noqa: BLE001 - a model must not end the process
            error = _as_error(raised)
        # The work knows its call, and through it the outputs: all of them would live in a circle.
        call.work = _nothing
        call.compute_us = call.compute_us or (time.perf_counter_ns() - began) // 1000
        try:
            call.loop.call_soon_threadsafe(_resolve, call.done, result, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return


class TooLate(Exception):
    """A run that was begun ahead is not wanted any more by the time that its turn has come."""


class _CutOffError(Exception):
    """A run on the event loop took so long that it was ended."""


def _nothing() -> None:
    """What is left of the work of a call that was served."""


def _as_error(raised: BaseException) -> RuntimeError:
    """What a model raised to end a thread, a task or the process, as an error of the model's."""
    error = RuntimeError(describe(raised))
    error.__cause__ = raised
    return error


def _resolve(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
