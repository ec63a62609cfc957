"""The client and the four services, on the embedded log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from headrace.client import Client, InferenceError
from headrace.config import make_settings
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from tests.support.models import digits


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    """A client of services that have one model, `digits`."""
    version = tmp_path / "digits" / "1"
    version.mkdir(parents=True)
    onnx.save(digits(), version / "model.onnx")
    settings = make_settings({"models": {"repository": str(tmp_path)}})
    async with open_log(settings) as log, asyncio.TaskGroup() as tasks:
        # In a task of its own: a fixture is set up and torn down in different ones.
        opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        done = asyncio.Event()

        async def serve() -> None:
            async with (
                running(Pipeline(settings, log)),
                Client(log=log, settings=settings) as client,
            ):
                opened.set_result(client)
                await done.wait()

        tasks.create_task(serve(), name="services")
        yield await opened
        done.set()


async def test_concurrent_calls_get_their_own_answers(client: Client) -> None:
    """Batched together or not, each call gets the result of its own rows."""
    weights = np.arange(10, dtype=np.float32)

    async def ask(number: int) -> None:
        rows = np.full((1 + number % 3, 64), number, np.float32)
        response = await client.infer("digits", {"pixels": rows}, id=str(number))
        assert response.id == str(number)
        np.testing.assert_allclose(
            response.outputs["scores"], rows.sum(axis=1, keepdims=True) * weights, rtol=1e-4
        )

    async with asyncio.TaskGroup() as tasks:
        for number in range(300):
            tasks.create_task(ask(number), name=f"call {number}")


async def test_answers_carry_timings(client: Client) -> None:
    """Timings and the size of the batch come with the answer."""
    response = await client.infer("digits", {"pixels": np.ones((2, 64), np.float32)})
    assert set(response.parameters) == {"queue_us", "batch_us", "compute_us", "batch_size"}
    assert response.parameters["batch_size"] == 2


@pytest.mark.parametrize(
    ("model", "version", "pixels", "code"),
    [
        ("digits", None, np.ones((1, 63), np.float32), "INVALID_TENSOR"),
        ("digits", None, np.ones((0, 64), np.float32), "INVALID_TENSOR"),
        ("digits", "7", np.ones((1, 64), np.float32), "UNKNOWN_MODEL"),
        ("letters", None, np.ones((1, 64), np.float32), "UNKNOWN_MODEL"),
    ],
)
async def test_refused_call_raises_error_with_its_code(
    client: Client, model: str, version: str | None, pixels: np.ndarray, code: str
) -> None:
    """A refusal by the services is raised as an exception with the service's code."""
    with pytest.raises(InferenceError) as caught:
        await client.infer(model, {"pixels": pixels}, version=version)
    assert caught.value.code == code
