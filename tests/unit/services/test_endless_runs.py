"""Runs that do not end by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.errors import Code, Fatal
from headrace.models.registry import Models
from headrace.models.version import State
from headrace.tuning import TUNING
from tests.support.executor_bench import POISON, outcome, requests_of, running
from tests.support.python_models import add_python_model, shut_gate
from tests.support.services import counted

AT_THE_GATE = "from tests.support.python_models import GATE\nGATE.wait()"
IMPATIENT = replace(TUNING.executor, cancel_grace_s=0.05)


async def test_hung_run_is_cancelled_and_its_request_fails(tmp_path: Path) -> None:
    """After `max_execution_s` the run is cancelled, and its request fails."""
    add_python_model(
        tmp_path,
        f"if {POISON} in x: self.cancelled.wait(30); raise RuntimeError('cancelled')",
        config="max_execution_s = 0.05",
    )
    async with running(tmp_path) as bench:
        requests = requests_of(POISON)
        bench.give(requests, requests_of(1))
        await bench.answered(2)

    assert requests[0].failure is not None
    assert requests[0].failure.code == Code.MODEL_FAILED
    assert "max_execution_s = 0.05" in requests[0].failure.message


async def test_request_that_hangs_in_batch_hangs_once_more_alone(tmp_path: Path) -> None:
    """Each half with it would take `max_execution_s` as well; the others get their answers."""
    add_python_model(
        tmp_path,
        f"if {POISON} in x: self.cancelled.wait(30); raise RuntimeError('cancelled')",
        config="max_execution_s = 0.05",
    )
    async with running(tmp_path) as bench:
        requests = requests_of(0, 1, 2, 3, 4, POISON, 6, 7)
        bench.give(requests)
        await bench.answered(8)

    assert [outcome(one) for one in requests] == [0, 2, 4, 6, 8, Code.MODEL_FAILED, 12, 14]
    assert counted(bench.instruments, "bisections_total") == 1


async def test_run_that_ignores_cancelling_ends_process(tmp_path: Path) -> None:
    """Its instance is lost; the work is uncommitted and runs elsewhere."""
    add_python_model(tmp_path, AT_THE_GATE, config="max_execution_s = 0.05")

    async def serve() -> None:
        async with running(tmp_path, IMPATIENT) as bench:
            bench.give(requests_of(1))
            await bench.answered(1)

    with shut_gate(), pytest.raises(ExceptionGroup) as raised:
        await serve()

    assert raised.value.subgroup(Fatal) is not None


async def test_load_that_does_not_end_fails_only_its_version(tmp_path: Path) -> None:
    """It is told that it took too long, and other models serve."""
    add_python_model(tmp_path, "")
    add_python_model(tmp_path, "", name="endless", config="max_load_s = 0.05")
    file = tmp_path / "endless" / "1" / "model.py"
    waiting = AT_THE_GATE.replace("\n", "\n        ")
    file.write_text(
        file.read_text().replace("def warm_up(self):", f"def warm_up(self):\n        {waiting}")
    )
    with shut_gate():
        await _serve_beside_it(tmp_path)


async def _serve_beside_it(repository: Path) -> None:
    async with running(repository, IMPATIENT) as bench:
        requests = requests_of(3)
        bench.give(requests)
        await bench.answered(1)
        states = states_of(bench.models)

    assert states["model"] == (State.READY, "")
    assert states["endless"][0] == State.FAILED
    assert "max_load_s = 0.05 s" in states["endless"][1]


def states_of(models: Models) -> dict[str, tuple[str, str]]:
    """Each model's state, and why it is in it."""
    return {one["name"]: (one["state"], one.get("reason", "")) for one in models.catalog.status()}
