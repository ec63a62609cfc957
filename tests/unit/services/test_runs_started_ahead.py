"""Runs started behind another one: other work waits for them where deadlines are checked, and they
leave nothing behind.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.crash_isolation.run_gate import RunGate
from headrace.errors import Code
from headrace.models.profiling.batch_safety import Batching, Verdict
from headrace.protocol.messages import Request
from headrace.protocol.tensors import to_array
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.executor_bench import (
    POISON,
    expect_long_runs,
    outcome,
    requests_of,
    running,
)
from tests.support.models import add_version, digits
from tests.support.python_models import add_python_model, meeting_of
from tests.support.work import NOW_US, make_request

MEET = "from tests.support import python_models; python_models.MEETING.wait(40)"
SOON_MS = NOW_US // 1000 + 10
LATER_MS = NOW_US // 1000 + 30

TUNED = replace(TUNING.executor, prefetch_min_run_us=0)
"""Batches are prefetched during every run, however short."""


@pytest.fixture
def meeting() -> Iterator[threading.Barrier]:
    """A barrier at which runs wait for the test."""
    with meeting_of(2) as barrier:
        yield barrier


async def at_the_barrier(meeting: threading.Barrier) -> None:
    """A run waits there, and the loop has done all that it can do meanwhile."""
    await eventually(lambda: meeting.n_waiting == 1)
    for _ in range(20):
        await asyncio.sleep(0)


async def test_halves_wait_for_run_started_ahead(
    tmp_path: Path, meeting: threading.Barrier
) -> None:
    """Behind it on the thread nobody would see that their deadline passes."""
    add_python_model(
        tmp_path,
        f"if len(x) == 2:\n    {MEET}\n    raise ValueError('two')\nif x[0, 0] == 5:\n    {MEET}",
    )
    async with running(tmp_path, TUNED) as bench:
        expect_long_runs(bench)
        failing, ahead = requests_of(1, 2, deadline_ms=SOON_MS), requests_of(5)
        bench.give(failing)
        await at_the_barrier(meeting)
        bench.give(ahead)
        await asyncio.to_thread(meeting.wait, 10)
        await at_the_barrier(meeting)
        bench.clock.now_us += 20_000
        await asyncio.to_thread(meeting.wait, 10)
        await bench.answered(3)

    assert [outcome(one) for one in failing + ahead] == [Code.DEADLINE_EXCEEDED] * 2 + [10.0]


async def test_partly_expired_batch_waits_for_run_started_ahead(
    tmp_path: Path, meeting: threading.Barrier
) -> None:
    """A batch that lost a request before its turn is gathered anew, behind the one after it."""
    add_python_model(tmp_path, f"if x[0, 0] in (1, 5):\n    {MEET}")
    async with running(tmp_path, TUNED) as bench:
        expect_long_runs(bench)
        bench.give(requests_of(1))
        await at_the_barrier(meeting)
        late, mate = requests_of(2, deadline_ms=SOON_MS), requests_of(3, deadline_ms=LATER_MS)
        bench.give(late + mate, requests_of(5))
        await at_the_barrier(meeting)
        bench.clock.now_us += 20_000
        await asyncio.to_thread(meeting.wait, 10)
        await at_the_barrier(meeting)
        bench.clock.now_us += 20_000
        await asyncio.to_thread(meeting.wait, 10)
        await bench.answered(4)

    assert [outcome(one) for one in late + mate] == [Code.DEADLINE_EXCEEDED] * 2


async def test_hung_run_started_ahead_is_cancelled(tmp_path: Path) -> None:
    """Its own time limit cancels it; that of the run behind it would end the process."""
    add_python_model(
        tmp_path,
        f"""if {POISON} in x:
    self.cancelled.wait(20)
    self.cancelled.clear()
    raise RuntimeError""",
        config="max_execution_s = 0.2",
    )
    async with running(tmp_path, replace(TUNED, cancel_grace_s=0.5)) as bench:
        expect_long_runs(bench)
        requests = requests_of(POISON, 1, POISON, 2)
        bench.give(requests[:2], requests[2:])
        await bench.answered(4)

    assert [outcome(one) for one in requests] == [Code.MODEL_FAILED, 2.0, Code.MODEL_FAILED, 4.0]


async def test_batch_gathered_ahead_and_split_frees_its_slot(tmp_path: Path) -> None:
    """Batches of a version on trial are run one by one, beside the ring."""
    add_version(tmp_path, "digits", 1, digits(), "ring = true")
    requests = [
        make_request(inputs={"pixels": np.full((1, 64), value, np.float32)}) for value in range(40)
    ]
    async with running(tmp_path, TUNED) as bench:
        version = bench.models.catalog.lookup("digits")
        version.batching_off = "until it is known"
        for start in range(0, 20, 2):
            bench.give(requests[start : start + 2])
            await bench.answered(start + 2)
        version.apply_verdict(Verdict(Batching.BATCHABLE, ""))
        bench.give(*([one] for one in requests[20:]))
        await bench.answered(40)

    assert [one.failure for one in requests if one.failure] == []
    scores = [to_array((one.outputs or ())[0])[0, 1] for one in requests]
    assert scores == [64.0 * value for value in range(40)]


async def test_batch_that_expires_while_it_is_marked_frees_its_slot(tmp_path: Path) -> None:
    """After unclean ends each run waits for its marker, and its batch was gathered before that.

    A request of three rows runs beside the ring, so that all of its slots are free meanwhile.
    """
    add_version(tmp_path, "digits", 1, digits(), "ring = true\nmax_batch_size = 2")
    row = {"pixels": np.ones((1, 64), np.float32)}
    batches: list[list[Request]] = []
    for place in range(5):  # the late ones are in time when they are gathered, not when marked
        deadline_ms = NOW_US // 1000 + 40 * place + 30
        late = make_request(inputs=row, deadline_ms=deadline_ms)
        large = make_request(rows=3, inputs={"pixels": np.ones((3, 64), np.float32)})
        batches += [[large], [late, make_request(inputs=row)]]

    async def write_marker() -> None:
        bench.clock.now_us += 20_000

    gate = RunGate(write_marker)
    gate.is_marking = True
    async with running(tmp_path, TUNED, gate=gate) as bench:
        bench.models.catalog.lookup("digits").latency.observe((64,), 1, 50_000)
        bench.give(*batches)
        await bench.answered(15)

    codes = [one.failure and one.failure.code for batch in batches for one in batch]
    assert codes == [None, Code.DEADLINE_EXCEEDED, None] * 5
