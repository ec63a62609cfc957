"""Runs that are repeated after a transient error of the backend."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace
from structlog.testing import capture_logs

from headrace.errors import Code
from headrace.primitives.backoff import Backoff
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.executor_bench import POISON, outcome, requests_of, running
from tests.support.python_models import add_python_model
from tests.support.services import counted
from tests.support.work import NOW_US


async def test_transient_error_is_retried_before_batch_is_halved(tmp_path: Path) -> None:
    """A `Retriable` error is tried again before anything is halved."""
    add_python_model(tmp_path, "if len(self.calls) < 3: raise Retriable('busy')")
    async with running(tmp_path) as bench:
        requests = requests_of(1, 2)
        bench.give(requests)
        await bench.answered(2)

    assert [outcome(one) for one in requests] == [2, 4]
    assert counted(bench.instruments, "bisections_total") == 0


async def test_retried_run_is_logged_without_error_text(tmp_path: Path) -> None:
    """They may quote a caller; the warning has the model and the code."""
    add_python_model(tmp_path, "if len(self.calls) < 2: raise Retriable('got a secret')")
    async with running(tmp_path) as bench:
        bench.give(requests_of(1))
        with capture_logs() as lines:
            await bench.answered(1)

    warnings = [line for line in lines if line["log_level"] == "warning"]
    assert [(line["event"], line["code"]) for line in warnings] == [("run.retried", "INTERNAL")]
    assert "secret" not in repr(warnings)


async def test_other_batches_run_during_retry_pause(tmp_path: Path) -> None:
    """The instance is free meanwhile, and what waits for it passes."""
    add_python_model(tmp_path, f"if {POISON} in x and len(self.calls) < 3: raise Retriable('busy')")
    tuning = replace(TUNING.executor, run_backoff=Backoff(0.2, 1.0))
    async with running(tmp_path, tuning) as bench:
        first, others = requests_of(POISON), [requests_of(value) for value in (1, 2, 3)]
        bench.give(first, *others)
        answers = await bench.answered(4)

    assert [outcome(one) for one in answers] == [2, 4, 6, 2 * POISON]


async def test_request_due_before_retry_fails_at_once(tmp_path: Path) -> None:
    """A request whose deadline is before the retry fails at once; the others are retried."""
    add_python_model(tmp_path, "if len(self.calls) < 2: raise Retriable('busy')")
    tuning = replace(TUNING.executor, run_backoff=Backoff(0.2, 1.0))
    async with running(tmp_path, tuning) as bench:
        hurried = requests_of(1, deadline_ms=NOW_US // 1000 + 150)
        patient = requests_of(2, deadline_ms=NOW_US // 1000 + 5000)
        bench.give([*hurried, *patient])
        answers = await bench.answered(2)

    assert answers == [*hurried, *patient]
    assert [outcome(one) for one in answers] == [Code.INTERNAL, 4]


async def test_lasting_transient_error_fails_each_request(tmp_path: Path) -> None:
    """After the last attempt each request runs alone, and fails with a code that invites a retry
    of the caller's.
    """
    add_python_model(tmp_path, "raise Retriable('busy')")
    tuning = replace(TUNING.executor, run_backoff=Backoff(0.001, 0.001))
    async with running(tmp_path, tuning) as bench:
        bench.give(requests_of(1, 2))
        answers = await bench.answered(2)

    assert [outcome(one) for one in answers] == [Code.INTERNAL, Code.INTERNAL]


async def test_part_of_batch_with_faulty_request_is_retried_as_long_as_others(
    tmp_path: Path,
) -> None:
    """A request that fails by itself takes no attempts from those that shared its batch."""
    run = f"""
        if {POISON} in x:
            raise ValueError('thirteen')
        if len(self.calls) < TUNED:
            raise Retriable('busy')
    """.replace("TUNED", str(TUNING.executor.max_half_attempts + 5))
    add_python_model(tmp_path, run)
    tuning = replace(TUNING.executor, run_backoff=Backoff(0.001, 0.001))
    async with running(tmp_path, tuning) as bench:
        requests = requests_of(1, POISON)
        bench.give(requests)
        await bench.answered(2)

    assert [outcome(one) for one in requests] == [2, Code.MODEL_FAILED]


async def test_pending_retry_is_run_before_drain_ends(tmp_path: Path) -> None:
    """A drain loses nothing: when no more batches come, the pause is still waited for."""
    add_python_model(tmp_path, "if len(self.calls) < 2: raise Retriable('busy')")
    tuning = replace(TUNING.executor, run_backoff=Backoff(0.1, 1.0))
    async with running(tmp_path, tuning) as bench:
        requests = requests_of(1)
        bench.give(requests)
        await eventually(lambda: counted(bench.instruments, "retries_total", operation="run"))

    assert [outcome(one) for one in requests] == [2]
