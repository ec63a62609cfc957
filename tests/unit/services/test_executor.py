"""The executor: each request gets its own rows, and only the culprit of a failure fails."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import MAX_ERROR_TEXT_CHARS, Code
from headrace.models.version import ModelVersion, State
from headrace.protocol.tensors import to_array
from headrace.services.executor.trial import TrialLoads
from tests.support.conditions import eventually
from tests.support.executor_bench import (
    POISON,
    expect_long_runs,
    outcome,
    requests_of,
    running,
)
from tests.support.models import add_version, digits, settings_for
from tests.support.python_models import BEGUN, add_python_model, meeting_of, shut_gate
from tests.support.services import counted
from tests.support.work import NOW_US, make_request, receipt_of, requests_alive

LOADS_AT_THE_GATE = """
    def load(self):
        from tests.support.python_models import BEGUN, GATE
        BEGUN.set()
        while not (GATE.is_set() or self.cancelled.wait(0.01)):
            pass
"""


async def test_executor_gives_each_request_its_own_rows(tmp_path: Path) -> None:
    """Several rows of one request stay together; timings and the batch's rows are noted."""
    add_python_model(tmp_path, "")
    async with running(tmp_path) as bench:
        requests = requests_of(1, 2, 3)
        requests[1].inputs = make_request(inputs={"x": np.array([[5], [6]], np.float32)}).inputs
        requests[1].rows = 2
        bench.give(requests)
        await bench.answered(3)

    first, second, third = (to_array((one.outputs or ())[0]).ravel().tolist() for one in requests)
    assert (first, second, third) == ([2], [10, 12], [6])
    assert {one.batch.rows for one in requests} == {4}
    assert bench.answers.closed


@pytest.mark.parametrize("place", [0, 3, 7])
async def test_faulty_request_fails_alone_in_batch(tmp_path: Path, place: int) -> None:
    """A batch that fails is halved until the culprit stands alone; the others get their answers."""
    add_python_model(tmp_path, f"if {POISON} in x: raise ValueError('thirteen')")
    async with running(tmp_path) as bench:
        values = [float(number) for number in range(8)]
        values[place] = POISON
        requests = requests_of(*values)
        bench.give(requests)
        await bench.answered(8)

    assert [outcome(one) for one in requests] == [
        Code.MODEL_FAILED if value == POISON else value * 2 for value in values
    ]
    failure = requests[place].failure
    assert failure is not None
    assert failure.message == "model model version 1: ValueError: thirteen"
    assert counted(bench.instruments, "bisections_total") == 3


async def test_fresh_batches_pass_while_failed_one_is_halved(tmp_path: Path) -> None:
    """A culprit and its mates delay nobody by more than one run at a time."""
    add_python_model(tmp_path, f"if {POISON} in x: raise ValueError('thirteen')")
    async with running(tmp_path) as bench:
        bad = requests_of(*[POISON] * 8)
        fresh = [requests_of(1) for _ in range(4)]
        bench.give(bad, *fresh)
        ended = await bench.answered(12)

    # The culprits take 15 runs, of which every second lets a fresh batch pass.
    assert [ended.index(one[0]) for one in fresh] == sorted(ended.index(one[0]) for one in fresh)
    assert ended.index(fresh[3][0]) < 8
    assert [outcome(one[0]) for one in fresh] == [2.0] * 4
    assert {outcome(one) for one in bad} == {Code.MODEL_FAILED}


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise StopIteration", "StopIteration"),
        ("import asyncio; raise asyncio.CancelledError", "CancelledError"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise ValueError('\\udcff')", "ValueError: ?"),
        ("raise type('Mute', (Exception,), {'__str__': None})", "Mute"),
        ("return {'y': x[:0]}", "RowsMismatch"),
        ("return {}", "ModelFailed"),
        ("return None", "ModelFailed"),
    ],
)
async def test_any_exception_of_model_becomes_error_answer(
    tmp_path: Path, run: str, told: str
) -> None:
    """Nothing that a model does to end its thread ends the task, or the process."""
    add_python_model(tmp_path, run)
    async with running(tmp_path) as bench:
        bench.give(requests_of(1))
        (request,) = await bench.answered(1)

    assert request.failure is not None
    assert request.failure.code == Code.MODEL_FAILED
    assert told in request.failure.message


async def test_long_error_message_is_cut(tmp_path: Path) -> None:
    """An answer has room for the beginning; the whole could be too large for any topic."""
    add_python_model(tmp_path, "raise ValueError('x' * 10_000_000)")
    async with running(tmp_path) as bench:
        bench.give(requests_of(1))
        (request,) = await bench.answered(1)

    assert request.failure is not None
    assert len(request.failure.message) < MAX_ERROR_TEXT_CHARS + 100


async def test_late_or_revoked_request_is_not_run(tmp_path: Path) -> None:
    """Neither costs the model anything, and both are passed on to the responder."""
    add_python_model(tmp_path, f"if {POISON} in x: raise ValueError('it ran')")
    async with running(tmp_path) as bench:
        late = requests_of(POISON, deadline_ms=NOW_US // 1000)
        revoked, good = requests_of(POISON, 1)
        receipt_of(revoked).revoked = True
        bench.give([*late, revoked, good])
        await bench.answered(3)

    assert outcome(late[0]) == Code.DEADLINE_EXCEEDED
    assert outcome(good) == 2.0
    assert revoked.failure is not None
    assert counted(bench.instruments, "bisections_total") == 0


async def test_model_that_does_not_load_delays_no_other(tmp_path: Path) -> None:
    """The others are served; the registry tells why that one is not."""
    add_python_model(tmp_path, "")
    add_python_model(tmp_path, "", name="broken")
    path = tmp_path / "broken" / "1" / "model.py"
    path.write_text(path.read_text() + "\n    def load(self):\n        raise SystemExit(1)\n")
    async with running(tmp_path) as bench:
        bench.give(requests_of(1))
        (request,) = await bench.answered(1)
        states = {version.name: version.state for version in bench.models.catalog.versions()}

    assert outcome(request) == 2.0
    assert states == {"model": State.READY, "broken": State.FAILED}


async def test_version_that_failed_is_not_kept_when_it_is_tried_again(tmp_path: Path) -> None:
    """A process may see any number of versions that do not load."""
    add_python_model(tmp_path, "")
    path = tmp_path / "model" / "1" / "model.py"
    path.write_text(path.read_text() + "\n    def load(self):\n        raise SystemExit(1)\n")
    async with running(tmp_path) as bench:
        (failed,) = bench.models.catalog.versions(State.FAILED)
        first = weakref.ref(failed)
        del failed
        await bench.models.reload()
        await eventually(lambda: gc.collect() >= 0 and first() is None)


class PassedTrials(TrialLoads):
    """Trials that every version has passed, at the same time as the others."""

    async def try_out(self, version: ModelVersion) -> None:
        """Return at once."""


async def test_versions_from_trials_are_measured_at_start(tmp_path: Path) -> None:
    """Each is loaded alone, so that the growth of the process is its own; no budget is needed."""
    for name in ("a", "b", "c"):
        add_python_model(tmp_path, "", name=name)
        path = tmp_path / name / "1" / "model.py"
        path.write_text(path.read_text() + "\n    def load(self):\n        time.sleep(0.1)\n")
    async with running(tmp_path, trials=PassedTrials(settings_for(tmp_path))) as bench:
        measured = {each.name: [*each.memory_bytes] for each in bench.models.catalog.versions()}

    assert measured == {"a": ["host"], "b": ["host"], "c": ["host"]}


async def test_new_version_takes_over_while_serving(tmp_path: Path) -> None:
    """After a reload the new version runs; what waits for the old one is still run by it."""
    add_python_model(tmp_path, "")
    async with running(tmp_path) as bench:
        add_python_model(tmp_path, "x = x * 10", version=2)
        old = requests_of(1)
        await bench.models.reload()
        bench.give(old)
        await eventually(lambda: bench.models.catalog.lookup("model").version == "2")
        new = requests_of(1)
        new[0].version = "2"
        bench.give(new)
        await bench.answered(2)

    assert (outcome(old[0]), outcome(new[0])) == (2.0, 20.0)


async def test_stop_does_not_wait_for_version_that_loads(tmp_path: Path) -> None:
    """No request waits for it, and its load may take minutes."""
    add_python_model(tmp_path, "")
    with shut_gate():
        async with running(tmp_path) as bench:
            add_python_model(tmp_path, "", version=2)
            path = tmp_path / "model" / "2" / "model.py"
            path.write_text(path.read_text() + LOADS_AT_THE_GATE)
            await bench.models.reload()
            await eventually(BEGUN.is_set)
            (loading,) = bench.models.catalog.versions(State.LOADING)
        assert loading.state is State.LOADING


async def test_model_may_use_its_output_array_again(tmp_path: Path) -> None:
    """An answer that is still to be written does not change when the next batch runs."""
    add_python_model(
        tmp_path,
        """
        if not hasattr(self, 'buffer'):
            self.buffer = np.empty((8, 1), np.float32)
        self.buffer[:len(x)] = x
        return {'y': self.buffer[:len(x)]}
        """,
    )
    async with running(tmp_path) as bench:
        requests = requests_of(1, 2, 3)
        bench.give(*[[request] for request in requests])
        await bench.answered(3)

    assert [outcome(one) for one in requests] == [1.0, 2.0, 3.0]


async def test_idle_instance_keeps_nothing_of_its_last_batch(tmp_path: Path) -> None:
    """A process may have many models that are idle for hours; no budget counts that memory."""
    add_python_model(tmp_path, "pass")
    async with running(tmp_path) as bench:
        before = requests_alive()
        bench.give(requests_of(1, 2))
        await bench.answered(2)
        bench.answers.requests.clear()
        await eventually(lambda: requests_alive() == before)


async def test_instances_run_beside_each_other(tmp_path: Path) -> None:
    """Two instances of a model have two runs under way."""
    add_python_model(
        tmp_path,
        "from tests.support.python_models import MEETING; MEETING.wait(40)",
        config="instances = 2",
    )
    async with running(tmp_path) as bench:
        bench.give(requests_of(1), requests_of(2))
        ended = await bench.answered(2)

    assert sorted(str(outcome(one)) for one in ended) == ["2.0", "4.0"]


@pytest.fixture
def meeting() -> Iterator[threading.Barrier]:
    """A barrier at which a run waits for the test."""
    with meeting_of(2) as barrier:
        yield barrier


MEET = "from tests.support import python_models; python_models.MEETING.wait(40)"


async def test_single_instance_pulls_next_batch_during_run(
    tmp_path: Path, meeting: threading.Barrier
) -> None:
    """Its rows are ready when the instance is."""
    add_python_model(tmp_path, MEET)
    async with running(tmp_path) as bench:
        expect_long_runs(bench)
        first, second = requests_of(1), requests_of(2)
        bench.give(first)
        await eventually(lambda: meeting.n_waiting == 1)
        bench.give(second)
        taken = bench.waits() == 0
        for _ in range(2):
            await asyncio.to_thread(meeting.wait, 10)
        await bench.answered(2)

    assert taken
    assert [outcome(one) for one in first + second] == [2.0, 4.0]


async def test_expired_batch_pulled_ahead_is_not_run(
    tmp_path: Path, meeting: threading.Barrier
) -> None:
    """A deadline that passes between gathering and running counts; its mate runs."""
    add_python_model(tmp_path, MEET)
    async with running(tmp_path) as bench:
        expect_long_runs(bench)
        bench.give(requests_of(1))
        await eventually(lambda: meeting.n_waiting == 1)
        late = requests_of(2, deadline_ms=NOW_US // 1000 + 10)
        mate = requests_of(3)
        bench.give(late + mate)
        await asyncio.sleep(0)
        bench.clock.now_us += 20_000
        for _ in range(2):
            await asyncio.to_thread(meeting.wait, 10)
        await bench.answered(3)

    assert [outcome(one) for one in late + mate] == [Code.DEADLINE_EXCEEDED, 6.0]


async def test_ring_gives_each_request_its_own_rows(tmp_path: Path) -> None:
    """With the next batch on the device before the one that computes has ended."""
    add_version(tmp_path, "digits", 1, digits(), "ring = true")
    requests = [
        make_request(inputs={"pixels": np.full((1, 64), value, np.float32)}) for value in range(40)
    ]
    async with running(tmp_path) as bench:
        bench.models.catalog.lookup("digits").latency.observe((64,), 1, 50_000)
        bench.give(*(requests[start : start + 3] for start in range(0, 40, 3)))
        await bench.answered(40)

    scores = [to_array((one.outputs or ())[0])[0, 1] for one in requests]
    assert scores == [64.0 * value for value in range(40)]


async def test_several_instances_do_not_pull_ahead(tmp_path: Path) -> None:
    """A batch that waited behind a slow run could have gone to another instance."""
    add_python_model(tmp_path, f"if x[0, 0] < 3:\n    {MEET}", config="instances = 2")
    with meeting_of(3) as meeting:
        async with running(tmp_path) as bench:
            expect_long_runs(bench)
            bench.give(requests_of(1), requests_of(2))
            await eventually(lambda: meeting.n_waiting == 2)
            bench.give(requests_of(3))
            waiting = bench.waits()
            await asyncio.to_thread(meeting.wait, 10)
            await bench.answered(3)

    assert waiting == 1
