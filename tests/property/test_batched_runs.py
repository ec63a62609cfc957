"""Batcher and executor together: whatever arrives, closes and fails, each request gets its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.delivery.failures import REVOKED
from headrace.errors import Code
from headrace.models.registry import Models
from headrace.protocol.messages import Request
from headrace.protocol.tensors import to_array
from headrace.services.batcher.service import BatcherService
from headrace.services.executor.service import ExecutorService
from tests.support.conditions import DEADLINE_S
from tests.support.models import add_version, embedding, settings_for
from tests.support.python_models import add_python_model
from tests.support.services import StillClock, make_instruments
from tests.support.work import NOW_US, Tray, make_request, receipt_of

TABLE_ROWS = 8
RAISES, LOSES_ROWS, IS_NAN, CHANGES_TYPE = 13, 17, 19, 23
SPOILED = f"""
if {RAISES} in x: raise ValueError('thirteen')
if {LOSES_ROWS} in x: return {{'y': x[:-1]}}
if {CHANGES_TYPE} in x: return {{'y': x.astype(np.float64)}}
x = np.where(x == {IS_NAN}, np.nan, x)
"""
LATE_MS = NOW_US // 1000 - 1
IN_TIME_MS = NOW_US // 1000 + 60_000


class Sent(NamedTuple):
    """A request: its values, one for each row, and whether it may still run."""

    values: tuple[int, ...]
    deadline_ms: int = 0
    revoked: bool = False

    def code(self, poisons: set[int]) -> Code | None:
        """Error code that the request has to end with; None for outputs."""
        if self.deadline_ms == LATE_MS:
            return Code.DEADLINE_EXCEEDED
        if self.revoked:
            return Code(REVOKED.code)
        return Code.MODEL_FAILED if poisons.intersection(self.values) else None


def requests(values: Sequence[int]) -> st.SearchStrategy[Sent]:
    """Mostly of one row, in time and owed an answer."""
    return st.builds(
        Sent,
        st.lists(st.sampled_from(values), min_size=1, max_size=3).map(tuple),
        st.sampled_from([0, 0, 0, IN_TIME_MS, LATE_MS]),
        st.sampled_from([False, False, False, False, True]),
    )


async def send_all(chunks: list[list[Request]], batcher: BatcherService) -> None:
    """Send chunks one by one, with turns of the event loop between them."""
    for chunk in chunks:
        for _ in range(5):
            await asyncio.sleep(0)
        await batcher.send(chunk)
    batcher.close()


async def answered(repository: Path, chunks: list[list[Request]]) -> list[Request]:
    """Return the requests that come out at the end, in that order."""
    clock = StillClock()
    instruments = make_instruments(clock)
    models = Models(settings_for(repository), executes=True)
    models.open()
    early, ran = Tray(), Tray()
    batcher = BatcherService(early, models.catalog.lookup, "b", instruments)
    executor = ExecutorService(batcher.batch_queue, ran, models, instruments)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(executor.run())
        await executor.loaded.wait()
        tasks.create_task(batcher.run())
        tasks.create_task(send_all(chunks, batcher))
    return early.requests + ran.requests


def check(repository: Path, chunks: list[list[Sent]], row: Any, poisons: set[int]) -> None:
    """Send the chunks through, and hold each end to what the request deserves.

    Args:
        repository: with one model.
        chunks: of what arrives together.
        row: makes a request's inputs and expected outputs of its values.
        poisons: values that make the model fail.
    """
    made: list[tuple[Sent, Request, Any]] = []
    arriving: list[list[Request]] = []
    for chunk in chunks:
        arriving.append([])
        for sent in chunk:
            inputs, expected = row(sent.values)
            request = make_request(
                "model", rows=len(sent.values), deadline_ms=sent.deadline_ms, inputs=inputs
            )
            receipt_of(request).revoked = sent.revoked
            made.append((sent, request, expected))
            arriving[-1].append(request)

    ended = asyncio.run(answered(repository, arriving))

    assert sorted(id(one) for one in ended) == sorted(id(request) for _, request, _ in made)
    for sent, request, expected in made:
        code = sent.code(poisons)
        if code is not None:
            assert request.failure is not None, sent
            assert request.failure.code == code, (sent, request.failure)
        else:
            assert request.failure is None, (sent, request.failure)
            assert request.outputs is not None
            np.testing.assert_array_equal(to_array(request.outputs[0]), expected)


def doubled(values: tuple[int, ...]) -> tuple[dict[str, Any], Any]:
    """Return inputs of the model in Python, and the expected outputs."""
    x = np.array(values, np.float32).reshape(-1, 1)
    return {"x": x}, x * 2


def looked_up(values: tuple[int, ...]) -> tuple[dict[str, Any], Any]:
    """Return inputs of the embedding in ONNX, and the expected outputs."""
    index = np.array(values, np.int64).reshape(-1, 1)
    table = np.arange(TABLE_ROWS * 4, dtype=np.float32).reshape(TABLE_ROWS, 4)
    return {"index": index}, table[np.minimum(index, TABLE_ROWS - 1)]


@pytest.fixture(scope="module", params=[1, 2], ids=["one instance", "two instances"])
def instances(request: pytest.FixtureRequest) -> int:
    """How many loaded copies there are."""
    return int(request.param)


@pytest.fixture(scope="module")
def in_python(tmp_path_factory: pytest.TempPathFactory, instances: int) -> Path:
    """A repository with a model that fails in four ways."""
    repository = tmp_path_factory.mktemp("python")
    config = f"max_batch_size = 6\nfinite_outputs = true\ninstances = {instances}"
    add_python_model(repository, SPOILED, config=config)
    return repository


@pytest.fixture(scope="module")
def in_onnx(tmp_path_factory: pytest.TempPathFactory, instances: int) -> Path:
    """A repository with an embedding, which fails on an index beyond its table."""
    repository = tmp_path_factory.mktemp("onnx")
    config = f"max_batch_size = 6\ninstances = {instances}\nintra_op_threads = 1"
    add_version(repository, "model", 1, embedding(TABLE_ROWS), config)
    return repository


FEW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FEW
@given(chunks=st.lists(st.lists(requests([1, 2, 3, 4, 13, 17, 19, 23]), max_size=8), max_size=5))
def test_batched_runs_end_each_request_once_with_its_own_rows(
    in_python: Path, chunks: list[list[Sent]]
) -> None:
    """Each ends once: with its own outputs, or with the code that it alone deserves."""
    poisons = {RAISES, LOSES_ROWS, IS_NAN, CHANGES_TYPE}
    check(in_python, chunks, doubled, poisons)


@FEW
@given(chunks=st.lists(st.lists(requests([0, 1, 5, 7, 7, 99]), max_size=8), max_size=5))
def test_batched_onnx_runs_equal_single_runs(in_onnx: Path, chunks: list[list[Sent]]) -> None:
    """Batches gathered into reused blocks, with poison among them, equal single runs."""
    check(in_onnx, chunks, looked_up, {99})
