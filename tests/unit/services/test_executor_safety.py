"""The executor: what it makes of verdicts, of rows that are not finite, and of cores."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import Code
from headrace.models.profiling.batch_safety import Batching, Verdict
from headrace.models.version import State
from headrace.protocol.messages import Request
from headrace.tuning import TUNING
from tests.support.executor_bench import POISON, ExecutorHarness, outcome, requests_of, running
from tests.support.python_models import add_python_model
from tests.support.services import counted

MEET = "from tests.support import python_models; python_models.MEETING.wait(40)"
UNDECIDED = Verdict(Batching.UNDECIDED, "all alike")


async def decided_by_requests(
    repository: Path, rule: str, *, batches: int = TUNING.executor.comparison_batches
) -> tuple[ExecutorHarness, list[Request]]:
    """An undecided model, after so many batches of three requests."""
    add_python_model(repository, rule)
    async with running(repository) as bench:
        [version] = bench.models.catalog.versions(State.READY)
        version.apply_verdict(UNDECIDED)
        requests = [requests_of(n + 1, n + 2, n + 3) for n in range(batches)]
        bench.give(*requests)
        answered = await bench.answered(3 * batches)
    return bench, answered


def outcomes(bench: ExecutorHarness) -> dict[str, float]:
    """How many batches have shown what."""
    return {
        outcome: counted(
            bench.instruments,
            "batch_comparisons_total",
            model="model",
            version="1",
            outcome=outcome,
        )
        for outcome in ("agreed", "differed", "inconclusive")
    }


async def test_agreeing_requests_make_model_batchable(tmp_path: Path) -> None:
    """After enough batches that were run together and alone, they share runs."""
    bench, _ = await decided_by_requests(tmp_path, "")
    [version] = bench.models.catalog.versions(State.READY)
    assert version.verdict is not None
    assert version.verdict.batching is Batching.BATCHABLE
    assert (version.max_batch_size, version.batching_off) == (32, "")
    assert outcomes(bench) == {"agreed": 16, "differed": 0, "inconclusive": 0}


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("x = x * (1 + 0.01 * (len(x) > 1))", "rounding: y of a request alone and in a batch"),
        (
            "x = x + np.float32(1e-5) * x.max() if len(x) > 1 else x",
            "rows leak: y of a request changes with what runs beside it",
        ),
        (
            "if len(x) > 1: raise ValueError('one')",
            "requests that succeed alone fail together: ValueError: one",
        ),
    ],
)
async def test_differing_requests_turn_batching_off(tmp_path: Path, rule: str, reason: str) -> None:
    """The first batch that does not agree is enough, and none of its answers is from it."""
    bench, answered = await decided_by_requests(tmp_path, rule, batches=2)
    [version] = bench.models.catalog.versions(State.READY)
    assert version.batching_off.startswith(reason)
    assert outcomes(bench) == {"agreed": 0, "differed": 1, "inconclusive": 0}
    assert {one.batch.rows for one in answered} == {1}


@pytest.mark.parametrize("rule", ["x = x * 0", f"if {POISON} in x: raise ValueError('thirteen')"])
async def test_inconclusive_requests_leave_model_undecided(tmp_path: Path, rule: str) -> None:
    """The same answer to all, or a request that fails alone as well, is no evidence."""
    add_python_model(tmp_path, rule)
    async with running(tmp_path) as bench:
        [version] = bench.models.catalog.versions(State.READY)
        version.apply_verdict(UNDECIDED)
        bench.give(requests_of(1, POISON, 3))
        await bench.answered(3)
    assert version.is_undecided
    assert outcomes(bench) == {"agreed": 0, "differed": 0, "inconclusive": 1}


async def test_batch_for_unbatchable_model_is_split(tmp_path: Path) -> None:
    """A batcher of another process does not know what the executor has found out."""
    add_python_model(tmp_path, "x = x + x.sum() - x", config="probe = true")
    async with running(tmp_path) as bench:
        [version] = bench.models.catalog.versions(State.READY)
        assert version.batching_off.startswith("rows leak")
        requests = requests_of(1, 2, 3)
        bench.give(requests)
        await bench.answered(3)
    assert [outcome(one) for one in requests] == [2.0, 4.0, 6.0]


async def test_nonfinite_rows_fail_only_their_request(tmp_path: Path) -> None:
    """Rows that are not finite fail their request where the model asks for the check."""
    add_python_model(
        tmp_path, f"x = np.where(x == {POISON}, np.nan, x)", config="finite_outputs = true"
    )
    async with running(tmp_path) as bench:
        requests = requests_of(1, POISON, 3)
        bench.give(requests)
        await bench.answered(3)
    assert [outcome(one) for one in requests] == [2.0, Code.MODEL_FAILED, 6.0]
    assert requests[1].failure is not None
    assert requests[1].failure.message.endswith("got NaN or infinities in 1 of 1 rows: 0")


async def test_nonfinite_rows_pass_when_not_checked(tmp_path: Path) -> None:
    """NaN may be an answer."""
    add_python_model(tmp_path, f"x = np.where(x == {POISON}, np.nan, x)")
    async with running(tmp_path) as bench:
        requests = requests_of(1, POISON)
        bench.give(requests)
        await bench.answered(2)
    assert np.isnan(outcome(requests[1]))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to tell them apart")
async def test_pinned_instances_run_on_separate_cores(tmp_path: Path) -> None:
    """Each answers with its core, and they differ."""
    rule = "import os; return {'y': x * 0 + sum(2**core for core in os.sched_getaffinity(0))}"
    config = "instances = 2\npinned = true\nintra_op_threads = 1"
    add_python_model(tmp_path, f"{MEET}; {rule}", config=config)
    async with running(tmp_path) as bench:
        requests = requests_of(1, 2)
        bench.give([requests[0]], [requests[1]])
        await bench.answered(2)
    first, second = (int(outcome(one)) for one in requests)
    assert first.bit_count() == second.bit_count() == 1
    assert first != second


async def test_more_pinned_instances_than_cores_are_refused(tmp_path: Path) -> None:
    """The version fails to load, and says how many cores there are."""
    config = "instances = 2\npinned = true\nintra_op_threads = 256"
    add_python_model(tmp_path, "", config=config)
    async with running(tmp_path) as bench:
        [version] = bench.models.catalog.versions()
    assert version.state is State.FAILED
    assert version.reason.startswith("pinned: expected 256 cores for each instance")
