"""An instance: its thread, and when it does without."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import structlog
from msgspec.structs import replace

from headrace.errors import ConfigurationError
from headrace.models.backends.port import Arrays, Backend, ModelFailed, WarmUp
from headrace.models.signature import Signature, TensorSpec, make_signature
from headrace.services.executor.instance import (
    CutOffError,
    DeadlinePassed,
    InlinePolicy,
    InlineRuns,
    Instance,
    load_and_warm_up,
)
from headrace.tuning import TUNING, ExecutorTuning
from tests.support.conditions import DEADLINE_S, eventually

INPUTS: Arrays = {"x": np.zeros((1, 1), np.float32)}
LENIENT = replace(TUNING.executor, inline_max_run_us=20_000, inline_cut_off_s=60.0)
"""A busy machine that interrupts a short run does not make it a long one."""


class Sleeper:
    """A backend whose runs last as long as the test says, until they are cancelled."""

    signature: Signature = make_signature(
        [TensorSpec("x", "FP32", (-1, 1))], [TensorSpec("x", "FP32", (-1, 1))]
    )

    def __init__(self) -> None:
        self.run_s = 0.0
        self.fault: Exception | None = None
        self.load_fault: BaseException | None = None
        self.threads: list[str] = []
        self.cancelled = threading.Event()
        self.unloaded = False

    def load(self) -> None:
        if self.load_fault is not None:
            raise self.load_fault

    def use_signature(self, signature: Signature) -> None:
        self.signature = signature

    def warm_up(self) -> WarmUp:
        return WarmUp()

    def run(self, inputs: Arrays) -> Arrays:
        self.threads.append(threading.current_thread().name)
        self.cancelled.clear()
        if self.run_s and self.cancelled.wait(self.run_s):
            raise RuntimeError("cancelled")
        if self.fault is not None:
            raise self.fault
        return inputs

    def cancel(self) -> None:
        self.cancelled.set()

    def unload(self) -> None:
        self.unloaded = True


def make(
    backend: Sleeper,
    *,
    may_inline: bool = True,
    max_execution_s: float = 5.0,
    max_load_s: float = 60.0,
    prepare: Callable[[Backend], None] = load_and_warm_up,
    tuning: ExecutorTuning = TUNING.executor,
) -> Instance:
    """Return an instance of the backend."""
    return Instance(
        backend,
        "instance",
        max_execution_s=max_execution_s,
        max_load_s=max_load_s,
        may_inline=may_inline,
        prepare=prepare,
        tuning=tuning,
    )


async def test_outputs_are_freed_with_their_last_reference() -> None:
    """They are in no circle, which would keep them until garbage is next collected."""
    backend = Sleeper()
    gc.disable()
    try:
        async with make(backend, may_inline=False) as instance:
            outputs = [await instance.run({"x": np.zeros((1, 1), np.float32)}) for _ in range(3)]
            alive = [weakref.ref(each["x"]) for each in outputs]
            del outputs
            # The thread still has the last ones, until it is given something else to do.
            assert [each() for each in alive[:-1]] == [None, None]
    finally:
        gc.enable()


def test_short_runs_are_allowed_inline_after_full_window() -> None:
    """A median under the limit over the whole window, and no more than two far above."""
    inline = InlinePolicy(limit_us=200, window=16)
    seen = []
    for compute_us in [100] * 16:
        inline.observe(compute_us)
        seen.append(inline.allowed)
    assert seen == [False] * 15 + [True]

    for compute_us in (3000, 3000):
        inline.observe(compute_us)
    assert inline.allowed
    inline.observe(3000)
    assert not inline.allowed


def test_slow_runs_return_to_thread() -> None:
    """When half of the window is over the limit."""
    inline = InlinePolicy(limit_us=200, window=16)
    for compute_us in [100] * 16 + [500] * 9:
        inline.observe(compute_us)

    assert not inline.allowed


async def test_short_runs_move_to_event_loop() -> None:
    """The first ones are made on the thread, later ones where they are asked for."""
    backend = Sleeper()
    async with make(backend, tuning=LENIENT) as instance:
        for _ in range(20):
            await instance.run(INPUTS)

    assert backend.threads[:16] == ["instance"] * 16
    assert backend.threads[16:] == ["MainThread"] * 4
    assert backend.unloaded


async def test_thread_bound_backend_never_runs_inline() -> None:
    """However short its runs are."""
    backend = Sleeper()
    async with make(backend, may_inline=False) as instance:
        for _ in range(20):
            await instance.run(INPUTS)

    assert set(backend.threads) == {"instance"}


async def test_failed_runs_count_for_inlining() -> None:
    """A model that takes its time to fail is no model for the loop."""
    backend = Sleeper()
    async with make(backend, tuning=LENIENT) as instance:
        for _ in range(16):
            await instance.run(INPUTS)
        backend.run_s, backend.fault = 0.25, ValueError("no")
        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                await instance.run(INPUTS)
        backend.run_s, backend.fault = 0.0, None
        await instance.run(INPUTS)

    assert backend.threads[16:] == ["MainThread"] * 3 + ["instance"]


async def test_hung_inline_run_is_repeated_on_thread() -> None:
    """One value may take for ever where all others are quick: the loop does not wait for it."""

    class HangsInline(Sleeper):
        def run(self, inputs: Arrays) -> Arrays:
            self.run_s = 3600.0 if threading.current_thread() is threading.main_thread() else 0.0
            return super().run(inputs)

    backend = HangsInline()
    tuning = replace(LENIENT, inline_cut_off_s=0.05)
    async with make(backend, tuning=tuning) as instance:
        for _ in range(16):
            await instance.run(INPUTS)
        outputs = await instance.run(INPUTS)
        await instance.run(INPUTS)

    assert outputs is INPUTS
    assert backend.threads[16:] == ["MainThread", "instance", "instance"]


def test_inline_run_cut_off_makes_all_later_ones_impossible() -> None:
    """Here the run itself does what the idle thread does when the limit is over."""

    class CutOff(Sleeper):
        def run(self, inputs: Arrays) -> Arrays:
            runs.cut_off()
            assert self.cancelled.is_set()
            raise RuntimeError("cancelled")

    tuning = replace(LENIENT, inline_cut_off_s=0.0)
    runs = InlineRuns(CutOff(), "instance", tuning, is_possible=True)

    with pytest.raises(CutOffError):
        runs.run(INPUTS)
    assert not runs.is_possible
    assert runs.check_interval_s() is None


def test_cut_off_between_runs_cancels_nothing() -> None:
    """The idle thread may look after the run has ended."""
    backend = Sleeper()
    runs = InlineRuns(backend, "instance", replace(LENIENT, inline_cut_off_s=0.0), is_possible=True)

    runs.run(INPUTS)
    runs.cut_off()

    assert not backend.cancelled.is_set()
    assert runs.is_possible


@pytest.mark.parametrize(
    "fault", [SystemExit(1), MemoryError("no room"), StopIteration(), ModelFailed("no output")]
)
async def test_any_error_while_loading_is_configuration_error(fault: BaseException) -> None:
    """The process goes on with its other models."""
    backend = Sleeper()
    backend.load_fault = fault

    with pytest.raises(ConfigurationError, match=f"instance: .*{type(fault).__name__}"):
        async with make(backend):
            pass


OTHERS: Arrays = {"x": np.ones((1, 1), np.float32)}


async def test_run_started_ahead_follows_without_loop() -> None:
    """It does not wait for the loop to take the answers of the one before."""
    backend = Sleeper()
    async with make(backend) as instance:
        first = instance.submit(INPUTS)
        assert instance.submit_next(OTHERS, lambda: True)
        await eventually(lambda: len(backend.threads) == 2)
        assert await instance.wait(first) is INPUTS
        assert await instance.run(OTHERS) is OTHERS
    assert len(backend.threads) == 2


async def test_expired_run_started_ahead_is_skipped() -> None:
    """Whether it is still wanted is asked when its turn has come, and is no run to learn from."""
    backend = Sleeper()
    async with make(backend) as instance:
        for _ in range(15):
            await instance.run(INPUTS)
        first = instance.submit(INPUTS)
        instance.submit_next(OTHERS, lambda: False)
        await instance.wait(first)
        with pytest.raises(DeadlinePassed):
            await instance.run(OTHERS)
        assert await instance.run(OTHERS) is OTHERS
    assert len(backend.threads) == 17


async def test_inline_runs_are_not_started_ahead() -> None:
    """They are made on the loop, one after the other."""
    backend = Sleeper()
    async with make(backend, tuning=LENIENT) as instance:
        for _ in range(16):
            await instance.run(INPUTS)
        assert not instance.submit_next(OTHERS, lambda: True)


async def test_cancelling_hung_run_spares_next_one() -> None:
    """A cancel is for the run that took too long."""

    class Slow(Sleeper):
        def run(self, inputs: Arrays) -> Arrays:
            self.run_s = 3600.0 if inputs is INPUTS else 0.0
            return super().run(inputs)

    async with make(Slow(), max_execution_s=0.05, may_inline=False) as instance:
        first = instance.submit(INPUTS)
        instance.submit_next(OTHERS, lambda: True)
        with pytest.raises(TimeoutError, match="longer than max_execution_s"):
            await instance.wait(first)
        assert await instance.run(OTHERS) is OTHERS


async def test_instance_whose_warm_up_fails_is_unloaded() -> None:
    """An instance that never ran still frees what it has loaded."""
    backend = Sleeper()

    def prepare(each: Backend) -> None:
        each.load()
        raise ValueError("no warm-up")

    with pytest.raises(ConfigurationError, match="instance: ValueError: no warm-up"):
        async with make(backend, may_inline=False, prepare=prepare):
            pass
    assert backend.unloaded


async def test_unload_that_raises_is_logged() -> None:
    """The instance ends all the same."""

    class Clinging(Sleeper):
        def unload(self) -> None:
            raise SystemExit(3)

    with structlog.testing.capture_logs() as logs:
        async with make(Clinging()):
            pass
    assert logs == [
        {
            "event": "model.unload_failed",
            "log_level": "warning",
            "instance": "instance",
            "reason": "RuntimeError: SystemExit: 3",
        }
    ]


async def test_unload_that_hangs_is_logged() -> None:
    """Its memory stays, which nothing else tells; the instance is given up all the same."""
    ended = threading.Event()

    class Clinging(Sleeper):
        def unload(self) -> None:
            ended.wait(DEADLINE_S)

    with structlog.testing.capture_logs() as logs:
        async with make(Clinging(), tuning=replace(TUNING.executor, cancel_grace_s=0.05)):
            pass
    ended.set()
    assert logs == [
        {
            "event": "model.unload_failed",
            "log_level": "warning",
            "instance": "instance",
            "reason": "expected it to end within 0.05 s, got no end; its memory is not free",
        }
    ]


async def test_endless_load_is_interrupted() -> None:
    """A loop in Python would hold the interpreter lock, and slow every other model down."""
    ended = threading.Event()

    class Endless(Sleeper):
        def load(self) -> None:
            try:
                while True:
                    threading.Event().wait(0.001)
            finally:
                ended.set()

    with pytest.raises(ConfigurationError, match=r"max_load_s = 0\.05 s, got no end"):
        async with make(Endless(), max_load_s=0.05):
            pass
    assert ended.wait(DEADLINE_S)
