"""A model's version changes under load while its stages run in processes of their own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from headrace.client import Client
from headrace.config import Settings
from headrace.protocol.codec import decode_response
from headrace.protocol.messages import ErrorResponse
from headrace.runtime.process import Pipeline
from headrace.topics import Stage
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.models import add_version, digits, make_model
from tests.support.pipelines import Caller, Grouping, log_for, serving, settings_of

APART: Grouping = [(Stage.INGEST,), (Stage.BATCHER,), (Stage.EXECUTOR,), (Stage.RESPONDER,)]
DOCUMENTED = (Stage.EXECUTOR, Stage.BATCHER, Stage.INGEST)
CHANGED = "digits"
AT_ONCE = 20
MOST_UNANSWERED = 200


def name_of_order(order: Sequence[Stage]) -> str:
    """The stages in their order."""
    return "-".join(order)


def keeping(settings: Settings, keep_replaced_s: float) -> Settings:
    """The settings with a replaced version kept for so long."""
    models = settings.models.model_copy(update={"keep_replaced_s": keep_replaced_s})
    return settings.model_copy(update={"models": models})


@asynccontextmanager
async def load(caller: Caller) -> AsyncIterator[None]:
    """Send requests all the time, some at once, as long as not too many wait for their answers."""
    stopping = asyncio.Event()

    async def send() -> None:
        while not stopping.is_set():
            await caller.send(AT_ONCE)
            await eventually(lambda: caller.sent - caller.answered() <= MOST_UNANSWERED)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        try:
            yield
        finally:
            stopping.set()


async def answered_more(caller: Caller, requests: int) -> None:
    """Wait until so many requests, sent from now on, are answered."""
    wanted = caller.sent + requests
    await eventually(lambda: caller.answered() >= wanted, what=f"{wanted} answers")


async def change_version(
    pipelines: Sequence[Pipeline], grouping: Grouping, order: Sequence[Stage], caller: Caller
) -> None:
    """Have the processes look at the repository one after the other, under load."""
    for stage in order:
        pipeline = next(
            each for each, stages in zip(pipelines, grouping, strict=True) if stage in stages
        )
        await pipeline.models.reload()
        await eventually(partial(serves_second, pipeline))
        await answered_more(caller, 10 * AT_ONCE)


def serves_second(pipeline: Pipeline) -> bool:
    """Whether the pipeline gives version 2 to a request that names none."""
    return pipeline.models.catalog.lookup(CHANGED).version == "2"


@pytest.mark.parametrize(
    ("order", "keep_replaced_s"),
    [
        *(
            pytest.param(order, 0.0, id=f"{name_of_order(order)}-unloaded-at-once")
            for order in itertools.permutations(DOCUMENTED)
        ),
        # A version that is kept can only help: the best and the worst order.
        pytest.param(DOCUMENTED, 60.0, id=f"{name_of_order(DOCUMENTED)}-kept"),
        pytest.param(DOCUMENTED[::-1], 60.0, id=f"{name_of_order(DOCUMENTED[::-1])}-kept"),
    ],
)
async def test_requests_without_version_are_answered_during_version_change(
    tmp_path: Path, order: Sequence[Stage], keep_replaced_s: float
) -> None:
    """Processes reload in any order, with the replaced version still present or removed."""
    settings = keeping(settings_of(tmp_path), keep_replaced_s)
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, APART) as pipelines:
        async with load(caller):
            await answered_more(caller, 10 * AT_ONCE)
            add_version(tmp_path, CHANGED, 2, digits())
            await change_version(pipelines, APART, order, caller)
        await caller.all_answered()
    assert set(await caller.check()) == set(range(caller.sent))


async def test_replaced_version_runs_until_ingest_reloads(
    tmp_path: Path,
) -> None:
    """Batcher and executor keep it, since requests that ingest has bound to it still come."""
    settings = keeping(settings_of(tmp_path), 60.0)
    log = await log_for(settings)
    caller = Caller(settings, log, version="1")
    async with serving(settings, log, APART) as pipelines:
        async with load(caller):
            add_version(tmp_path, CHANGED, 2, digits())
            await change_version(pipelines, APART, (Stage.EXECUTOR, Stage.BATCHER), caller)
        await caller.all_answered()
    assert set(await caller.check()) == set(range(caller.sent))


@pytest.mark.parametrize("stage", [Stage.EXECUTOR, Stage.BATCHER])
async def test_unloaded_version_is_refused_with_retriable_code(
    tmp_path: Path, stage: Stage
) -> None:
    """No other version may answer, and no dead letter is written: ingest knows the version yet."""
    settings = keeping(settings_of(tmp_path), 0.0)
    log = await log_for(settings)
    caller = Caller(settings, log, version="1")
    async with serving(settings, log, APART) as pipelines:
        add_version(tmp_path, CHANGED, 2, digits())
        pipeline = pipelines[APART.index((stage,))]
        await pipeline.models.reload()
        await eventually(partial(serves_second, pipeline))
        await caller.send(8)
        await caller.all_answered()
        answers = [decode_response(each.headers, each.value) for each in await caller.answers()]
    details = [each.error_details for each in answers if isinstance(each, ErrorResponse)]
    assert [(each.code, each.retriable, each.stage) for each in details] == [
        ("MODEL_NOT_READY", True, stage)
    ] * 8


def difference(*inputs: str) -> onnx.ModelProto:
    """`y` = `a` - `b`, with the inputs in this order."""
    return make_model(
        [helper.make_node("Sub", ["a", "b"], ["y"])],
        [(name, TensorProto.FLOAT, ["batch", 1]) for name in inputs],
        [("y", TensorProto.FLOAT, ["batch", 1])],
    )


async def test_inputs_keep_their_names_when_a_file_with_another_order_replaces_one(
    tmp_path: Path,
) -> None:
    """Until ingest has read the file as well, it binds requests to the former order."""
    directory = add_version(tmp_path, "difference", 1, difference("a", "b"))
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    inputs = {"a": np.array([[5]], np.float32), "b": np.array([[3]], np.float32)}
    async with (
        serving(settings, log, APART) as pipelines,
        Client(log=log, settings=settings) as client,
    ):
        executor = pipelines[APART.index((Stage.EXECUTOR,))]
        before = executor.models.catalog.lookup("difference")
        onnx.save(difference("b", "a"), directory / "model.onnx")
        await executor.models.reload()
        await eventually(lambda: executor.models.catalog.lookup("difference") is not before)
        calls = [client.infer("difference", inputs, timeout_s=DEADLINE_S) for _ in range(5)]
        responses = await asyncio.gather(*calls)
    assert [response.outputs["y"].tolist() for response in responses] == [[[2.0]]] * 5
