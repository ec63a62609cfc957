"""Server spans of a gateway: one trace from the caller through the door and the stages."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
from opentelemetry.trace import StatusCode
from tritonclient.utils import InferenceServerException

from headrace.topics import STAGES
from tests.support.gateways import Served, gateway_of
from tests.support.models import add_version, digits
from tests.support.spans import (
    CALLER,
    TRACE_ID,
    Spans,
    id_of,
    parent_of,
    traceparent,
    tracing_settings,
    tracing_spans,
)
from tests.support.tree import ROOT

UNLIMITED = dict.fromkeys(
    ("traces_per_second", "caller_traces_per_second", "failure_traces_per_second"), 1e6
)
Ask = Callable[[Served, int, str | None], Awaitable[None]]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with `digits`."""
    add_version(tmp_path, "digits", 1, digits())
    return tmp_path


async def ask_over_http(served: Served, width: int, flags: str | None) -> None:
    """Send a row of so many pixels, with a caller's trace context if it has flags."""
    headers = {} if flags is None else {"traceparent": traceparent(flags).decode()}
    async with triton_http.InferenceServerClient(served.url) as client:
        pixels = triton_http.InferInput("pixels", [1, width], "FP32")
        pixels.set_data_from_numpy(np.ones((1, width), np.float32))
        await client.infer("digits", [pixels], headers=headers)


async def ask_over_grpc(served: Served, width: int, flags: str | None) -> None:
    """The same over gRPC."""
    headers = {} if flags is None else {"traceparent": traceparent(flags).decode()}
    async with triton_grpc.InferenceServerClient(served.grpc) as client:
        pixels = triton_grpc.InferInput("pixels", [1, width], "FP32")
        pixels.set_data_from_numpy(np.ones((1, width), np.float32))
        await client.infer("digits", [pixels], headers=headers)


DOORS: dict[str, tuple[Ask, str]] = {
    "http": (ask_over_http, "POST /v2/models/{model}/infer"),
    "grpc": (ask_over_grpc, "inference.GRPCInferenceService/ModelInfer"),
}


async def traced(
    repository: Path, ask: Ask, flags: str | None, *, width: int = 64, ratio: float = 1.0
) -> Spans:
    """Return the spans of one call; the call may fail."""
    telemetry = {"sample_ratio": ratio, **UNLIMITED}
    with tracing_spans(tracing_settings(ratio)) as (tracing, spans):
        options: dict[str, Any] = {"tracing": tracing, "telemetry": telemetry, "grpc_port": 0}
        async with gateway_of(repository, **options) as served:
            try:
                await ask(served, width, flags)
            except InferenceServerException:
                assert width != 64
    return spans


@pytest.mark.parametrize("door", DOORS)
async def test_trace_of_caller_shows_door_and_stages(repository: Path, door: str) -> None:
    """The door's span is the caller's child, the first stage's is the door's, and so on."""
    ask, name = DOORS[door]
    spans = await traced(repository, ask, "01", ratio=0.0)

    span = spans.one("server")
    assert span.name == name
    assert parent_of(span) == (TRACE_ID, CALLER)
    chain = [span, *(spans.one(stage) for stage in STAGES)]
    assert [parent_of(each) for each in chain[1:]] == [id_of(each) for each in chain[:-1]]
    assert spans.one("run").links[0].context.span_id == id_of(spans.one("executor"))[1]
    assert span.attributes is not None
    assert span.attributes["headrace.model.version"] == "1"


@pytest.mark.parametrize("door", DOORS)
async def test_call_without_context_begins_trace_at_door(repository: Path, door: str) -> None:
    """The sampling ratio decides whether it is recorded, and the stages follow the decision."""
    spans = await traced(repository, DOORS[door][0], None)

    assert parent_of(spans.one("server")) is None
    assert {id_of(span)[0] for span in spans.of_requests() if span not in spans.of("run")} == {
        id_of(spans.one("server"))[0]
    }


@pytest.mark.parametrize("flags", [None, "00"])
async def test_call_that_is_not_sampled_has_no_span(repository: Path, flags: str | None) -> None:
    """Neither at the door nor in the stages."""
    spans = await traced(repository, ask_over_http, flags, ratio=0.0)

    assert spans.of_requests() == []


@pytest.mark.parametrize("door", DOORS)
async def test_refused_call_is_traced_without_being_sampled(repository: Path, door: str) -> None:
    """The stages' spans are below the door's, which has the code; it is the caller's fault."""
    spans = await traced(repository, DOORS[door][0], None, width=63, ratio=0.0)

    span = spans.one("server")
    assert parent_of(spans.one("ingest")) == id_of(span)
    assert (span.attributes or {})["headrace.status"] == "INVALID_TENSOR"
    assert span.status.status_code is StatusCode.UNSET


async def test_server_span_of_deadline_missed_is_error(repository: Path) -> None:
    """A status of 500 or more makes it one, with the code as its type."""
    with tracing_spans(tracing_settings()) as (tracing, spans):
        # No stage runs, so that nothing answers before the deadline.
        options: dict[str, Any] = {"tracing": tracing, "telemetry": UNLIMITED}
        async with gateway_of(repository, STAGES[1:], **options) as served:
            body, headers = b'{"inputs": []}', {"X-Timeout-Ms": "1"}
            response = await served.post("/v2/models/digits/infer", body, headers=headers)
            assert response.status == 504

    span = spans.one("server")
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "DEADLINE_EXCEEDED"


async def test_tracing_page_lists_exactly_attributes_of_server_spans(repository: Path) -> None:
    """The page's table names each attribute with the doors whose spans have it."""
    page = (ROOT / "docs" / "tracing.md").read_text(encoding="utf-8")
    section = page.split("\n## Calls at a gateway\n")[1].split("\n## ")[0]
    described: dict[str, set[str]] = {"HTTP": set(), "gRPC": set()}
    for attribute, doors in re.findall(r"^\| `(.+?)` \| (.+?) \|", section, flags=re.MULTILINE):
        for door in doors.split(", "):
            described[door].add(attribute)

    seen = {}
    for label, door in (("HTTP", "http"), ("gRPC", "grpc")):
        spans = await traced(repository, DOORS[door][0], "01")
        seen[label] = set(spans.one("server").attributes or {}) | {"error.type"}
    assert seen == described
