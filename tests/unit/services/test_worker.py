"""An instance's loop, where it runs a batch in the turn in which the batcher closes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from headrace.errors import Code
from headrace.protocol.messages import Request
from headrace.tuning import TUNING
from tests.support.executor_bench import ExecutorHarness, running
from tests.support.models import add_version, embedding
from tests.support.work import make_request, receipt_of

QUICK = replace(TUNING.executor, inline_max_run_us=10**9)
"""Every run counts as quick, however busy the machine is."""
WINDOW = TUNING.executor.inline_window_runs
OUT_OF_RANGE = 1000


def requests_of(*indexes: int) -> list[Request]:
    """Requests for rows of the table of `embedding`."""
    inputs = [{"index": np.full((1, 1), index, np.int64)} for index in indexes]
    return [make_request("model", shape_class=(1,), inputs=each) for each in inputs]


@asynccontextmanager
async def quick(repository: Path) -> AsyncIterator[ExecutorHarness]:
    """An executor whose instance waits, after enough quick runs."""
    add_version(repository, "model", 1, embedding())
    async with running(repository, QUICK) as bench:
        for number in range(WINDOW):
            bench.give(requests_of(1))
            await bench.answered(number + 1)
        for _ in range(5):
            await asyncio.sleep(0)
        bench.answers.requests.clear()
        yield bench


async def test_batch_for_idle_quick_instance_is_answered_in_same_turn(
    tmp_path: Path,
) -> None:
    """Between the supply and the answer no other task runs."""
    async with quick(tmp_path) as bench:
        bench.give(requests_of(1, 2))

        assert [one.failure for one in bench.answers.requests] == [None, None]
        assert {one.batch.rows for one in bench.answers.requests} == {2}


async def test_only_first_of_several_batches_runs_in_same_turn(tmp_path: Path) -> None:
    """The others run in the worker's own task: the supplier's turn stays short."""
    async with quick(tmp_path) as bench:
        bench.give(requests_of(1), requests_of(2), requests_of(3))
        assert len(bench.answers.requests) == 1

        assert len(await bench.answered(3)) == 3


async def test_failed_batch_is_halved_until_faulty_request_is_alone(tmp_path: Path) -> None:
    """A run that fails in the supplier's turn raises nothing there."""
    async with quick(tmp_path) as bench:
        faulty = requests_of(OUT_OF_RANGE)
        good = requests_of(1, 2, 3)
        bench.give(good[:1] + faulty + good[1:])
        await bench.answered(4)

    assert faulty[0].failure is not None
    assert faulty[0].failure.code == Code.MODEL_FAILED
    assert [one.failure for one in good] == [None, None, None]
    assert len(bench.answers.requests) == 4


async def test_full_responder_leaves_batch_to_worker(tmp_path: Path) -> None:
    """It is answered once the responder takes it."""
    async with quick(tmp_path) as bench:
        bench.answers.full = True
        bench.give(requests_of(1))
        assert not bench.answers.requests

        bench.answers.full = False
        assert len(await bench.answered(1)) == 1


async def test_revoked_request_is_not_run(tmp_path: Path) -> None:
    """It ends, beside those that run."""
    async with quick(tmp_path) as bench:
        revoked, wanted = requests_of(OUT_OF_RANGE, 1)
        receipt_of(revoked).revoked = True
        bench.give([revoked, wanted])

        assert {id(one) for one in bench.answers.requests} == {id(revoked), id(wanted)}
        assert wanted.failure is None
        assert revoked.outputs is None
