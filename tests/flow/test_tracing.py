"""Traces of requests through the services, on the embedded log, together and apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest
from prometheus_client import CollectorRegistry

from headrace.client import Client, InferenceError, Response
from headrace.config import Settings, make_settings
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.tracing import Tracing
from headrace.topics import STAGES, Stage
from tests.support.models import digits
from tests.support.python_models import add_python_model
from tests.support.spans import Spans, id_of, parent_of, role_of, tracing_spans

TOGETHER = (STAGES,)
THREE = ((Stage.INGEST,), (Stage.BATCHER, Stage.EXECUTOR), (Stage.RESPONDER,))
APART = tuple((stage,) for stage in STAGES)
REQUESTS = 40

Shape = tuple[tuple[Stage, ...], ...]


class CallerSpan(NamedTuple):
    """A caller's span: the trace and the id in its `traceparent`."""

    trace_id: int
    span_id: int

    def header(self, flags: str = "01") -> tuple[str, bytes]:
        return "traceparent", f"00-{self.trace_id:032x}-{self.span_id:016x}-{flags}".encode()


CALLERS = [CallerSpan(0xABC000 + number, 0xDEF000 + number) for number in range(REQUESTS)]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """One model, `digits`; a root is never sampled, all that callers sample are."""
    version = tmp_path / "digits" / "1"
    version.mkdir(parents=True)
    onnx.save(digits(), version / "model.onnx")
    telemetry = {"sample_ratio": 0.0, "caller_traces_per_second": 2 * REQUESTS}
    return make_settings({"models": {"repository": str(tmp_path)}, "telemetry": telemetry})


@asynccontextmanager
async def _served(settings: Settings, shape: Shape, tracing: Tracing) -> AsyncIterator[Client]:
    async with open_log(settings) as log, AsyncExitStack() as stack:
        for stages in shape:
            instruments = Instruments(Metrics(CollectorRegistry()), tracing)
            pipeline = Pipeline(settings, log, stages, instruments=instruments)
            await stack.enter_async_context(running(pipeline))
        yield await stack.enter_async_context(Client(log=log, settings=settings))


async def _ask(client: Client, header: tuple[str, bytes], width: int = 64) -> Response:
    return await client.infer(
        "digits", {"pixels": np.ones((1, width), np.float32)}, headers=[header]
    )


def _of(
    spans: Spans, caller: CallerSpan
) -> dict[str, tuple[tuple[int, int], tuple[int, int] | None]]:
    """Each of its spans' id and parent, by stage."""
    return {
        role_of(span): (id_of(span), parent_of(span))
        for span in spans.all
        if id_of(span)[0] == caller.trace_id
    }


@pytest.fixture(params=[TOGETHER, THREE, APART], ids=["together", "three", "apart"])
def shape(request: pytest.FixtureRequest) -> Iterator[Shape]:
    """Return the stages that share a process."""
    return request.param  # type: ignore[no-any-return]  # a fixture's parameter is anything


async def test_trace_of_request_spans_all_stages_to_answer(
    settings: Settings, shape: Shape
) -> None:
    """Forty callers have traces of their own: each path is in order and ends in the answer."""
    with tracing_spans(settings) as (tracing, spans):
        async with _served(settings, shape, tracing) as client:
            answers = await asyncio.gather(*[_ask(client, each.header()) for each in CALLERS])

    for caller, answer in zip(CALLERS, answers, strict=True):
        path = _of(spans, caller)
        chain = [path[role] for role in (*STAGES, "send")]
        assert [parent for _, parent in chain] == [tuple(caller), *(id_ for id_, _ in chain[:-1])]
        _, trace_id, span_id, _ = (dict(answer.headers)["traceparent"] or b"").split(b"-")
        assert (int(trace_id, 16), int(span_id, 16)) == path["send"][0]


async def test_run_and_its_requests_link_to_each_other(settings: Settings, shape: Shape) -> None:
    """All requests are linked from exactly one run each, and link back to that one."""
    with tracing_spans(settings) as (tracing, spans):
        async with _served(settings, shape, tracing) as client:
            await asyncio.gather(*[_ask(client, each.header()) for each in CALLERS])

    forth = {
        (link.context.trace_id, link.context.span_id): id_of(run)
        for run in spans.of("run")
        for link in run.links
    }
    back = {
        id_of(span): (link.context.trace_id, link.context.span_id)
        for span in spans.of("executor")
        for link in span.links
    }
    assert len(forth) == REQUESTS
    assert forth == back


async def test_unsampled_failure_is_traced_and_unsampled_success_is_not(
    settings: Settings, shape: Shape
) -> None:
    """Its caller's trace gets its path, and its answer's context is that of the sending."""
    good, bad = CALLERS[:2]
    with tracing_spans(settings) as (tracing, spans):
        async with _served(settings, shape, tracing) as client:
            await _ask(client, good.header("00"))
            with pytest.raises(InferenceError, match="INVALID_TENSOR"):
                await _ask(client, bad.header("00"), width=63)

    assert {id_of(span)[0] for span in spans.of_requests()} == {bad.trace_id}
    path = _of(spans, bad)
    assert set(path) == {"ingest", "responder", "send"}
    assert [path[role][1] for role in ("ingest", "responder")] == [tuple(bad), path["ingest"][0]]


async def _double(client: Client, caller: CallerSpan, value: float) -> object:
    """The answer, or the error that it was."""
    x = np.full((1, 1), value, np.float32)
    try:
        return await client.infer("model", {"x": x}, headers=[caller.header()])
    except InferenceError as error:
        return error


async def test_bisected_batch_trace_shows_faulty_request(settings: Settings) -> None:
    """A failing batch of eight is run as 8, 4, 2 and 1; the faulty request's span has the error."""
    add_python_model(
        settings.models.directory,
        "if (x == 13).any(): raise ValueError('thirteen')",
        config="max_batch_size = 8\nmax_queue_delay_ms = 5000",
    )
    values = [1, 2, 13, 4, 5, 6, 7, 8]
    with tracing_spans(settings) as (tracing, spans):
        async with _served(settings, TOGETHER, tracing) as client:
            await asyncio.gather(*map(_double, [client] * 8, CALLERS, values))

    executors = {id_of(span)[0]: span for span in spans.of("executor")}
    guilty = executors.pop(CALLERS[values.index(13)].trace_id)
    assert (guilty.attributes or {})["error.type"] == "MODEL_FAILED"
    assert all(span.status.is_ok for span in executors.values())
    runs = {id_of(span): span for span in spans.of("run")}
    of_guilty = [runs[link.context.trace_id, link.context.span_id] for link in guilty.links]
    assert [len(run.links) for run in of_guilty] == [8, 4, 2, 1]
    assert [(run.attributes or {})["headrace.batch.reason"] for run in of_guilty] == [
        "full",
        "bisected",
        "bisected",
        "bisected",
    ]
    assert {span.status.is_ok for span in of_guilty} == {False}


async def test_retried_run_span_counts_its_retries(settings: Settings) -> None:
    """The attempts stand on the run's span and on the request's."""
    add_python_model(
        settings.models.directory, "if len(self.calls) == 1: raise Retriable('in a moment')"
    )
    with tracing_spans(settings) as (tracing, spans):
        async with _served(settings, TOGETHER, tracing) as client:
            await _double(client, CALLERS[0], 1)

    for role in ("run", "executor"):
        assert (spans.one(role).attributes or {})["headrace.run.attempts"] == 2
