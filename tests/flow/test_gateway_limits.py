"""Limits of callers at both doors: who is refused, how, and that others are not."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from headrace.gateway import open_inference_pb2 as messages
from tests.support.conditions import eventually
from tests.support.gateways import HOST, Served, gateway_of
from tests.support.python_models import GATE, add_gated_model, shut_gate

SERVICE = "/inference.GRPCInferenceService/"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}
ONE_IN_1000_S: dict[str, Any] = {"caller_requests_per_second": 0.001}
"""A rate so low that no machine is slow enough for a second request."""


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Path]:
    """A repository with a model that doubles `x`, and whose runs wait for `GATE`."""
    models = tmp_path / "models"
    models.mkdir()
    add_gated_model(models)
    with shut_gate():
        yield models


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with a caller that may have one request under way, and one that may have many."""
    lines = []
    for name, limit in (("narrow", 1), ("wide", 0)):
        sha256 = hashlib.sha256(name.encode()).hexdigest()
        lines.append(f'[callers.{name}]\nsha256 = "{sha256}"\nmax_in_flight = {limit}\n')
    file = tmp_path / "keys.toml"
    file.write_text("".join(lines))
    return file


def request(**fields: Any) -> messages.ModelInferRequest:
    """A request for the gated model."""
    contents = messages.InferTensorContents(fp32_contents=[1.0])
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "contents": contents}
    return messages.ModelInferRequest(model_name="gated", inputs=[tensor], **fields)


async def infer_over_grpc(
    served: Served, key: str = "", message: messages.ModelInferRequest | None = None
) -> tuple[grpc.StatusCode, str, float]:
    """Send a request; its status, its error, and the seconds after which it may come again."""
    metadata = [("x-api-key", key)] if key else None
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        begin: Any = channel.unary_unary(f"{SERVICE}ModelInfer")
        call = begin((message or request()).SerializeToString(), metadata=metadata)
        status = await call.code()
        trailing = dict(await call.trailing_metadata() or ())
        retry = RetryInfo()
        for detail in Status.FromString(trailing.get("grpc-status-details-bin", b"")).details:
            detail.Unpack(retry)
        return status, await call.details(), retry.retry_delay.ToTimedelta().total_seconds()


def limited(served: Served, reason: str) -> float:
    """Number of requests that were refused by a limit of their callers."""
    name = "headrace_gateway_limited_requests_total"
    registry = served.pipeline.metrics.registry
    return registry.get_sample_value(name, {"reason": reason}) or 0.0


async def test_caller_over_concurrency_is_refused_and_others_are_not(
    gated: Path, keys: Path
) -> None:
    """At both doors together, by the limits that the file gives the key."""
    narrow, wide = {"X-API-Key": "narrow"}, {"X-API-Key": "wide"}
    async with (
        gateway_of(gated, grpc_port=0, keys_file=str(keys)) as served,
        asyncio.TaskGroup() as tasks,
    ):
        first = tasks.create_task(served.infer("gated", BODY, headers=narrow))
        await eventually(lambda: served.doors.snapshot().requests == 1)

        refused = await served.infer("gated", BODY, headers=narrow)
        over_grpc = await infer_over_grpc(served, "narrow")
        others = [
            tasks.create_task(served.infer("gated", BODY, headers=wide)),
            tasks.create_task(served.infer("gated", BODY, headers=wide)),
        ]
        await eventually(lambda: served.doors.snapshot().requests == 3)
        GATE.set()
        answered = [(await each).status for each in (first, *others)]
        afterwards = await served.infer("gated", BODY, headers=narrow)
        counted = limited(served, "concurrency")

    reason = "caller narrow: expected at most 1 requests under way, got one more"
    assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
    assert refused.json["error"] == reason
    assert refused.json["error_details"] == {"code": "OVERLOADED", "retriable": True}
    assert over_grpc == (grpc.StatusCode.RESOURCE_EXHAUSTED, reason, 1.0)
    assert (*answered, afterwards.status) == (200, 200, 200, 200)
    assert counted == 2


async def test_address_over_rate_is_refused_with_time_to_return(gated: Path) -> None:
    """Callers without a login are told apart by their addresses; health has no limit."""
    GATE.set()
    async with gateway_of(gated, grpc_port=0, **ONE_IN_1000_S) as served:
        taken = await served.infer("gated", BODY)
        refused = await served.infer("gated", BODY)
        predicted = await served.post("/v1/models/gated:predict", b'{"instances": [[1.0]]}')
        status, error, retry_after_s = await infer_over_grpc(served)
        health = (await served.get("/v2/health/ready")).status
        counted, callers = limited(served, "rate"), served.doors.snapshot().callers

    assert (taken.status, refused.status, predicted.status, health) == (200, 429, 429, 200)
    assert 900 < int(refused.headers["Retry-After"]) <= 1000
    assert refused.json["error"].startswith(
        f"address {HOST}: expected at most 0.001 requests per second, got more; "
    )
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.startswith(f"address {HOST}: expected at most 0.001 requests per second")
    assert 900 < retry_after_s <= 1000
    assert (counted, callers) == (3, 1)


async def test_each_request_of_stream_counts_and_stream_stays_open(gated: Path) -> None:
    """The second one is refused in its own answer."""
    GATE.set()
    async with (
        gateway_of(gated, grpc_port=0, **ONE_IN_1000_S) as served,
        grpc.aio.insecure_channel(served.grpc) as channel,
    ):
        begin: Any = channel.stream_stream(
            f"{SERVICE}ModelStreamInfer",
            messages.ModelInferRequest.SerializeToString,
            messages.ModelStreamInferResponse.FromString,
        )
        stream = begin()
        answers = []
        for _ in range(3):
            await stream.write(request())
            answers.append(await stream.read())
        await stream.done_writing()

        assert await stream.code() is grpc.StatusCode.OK
    errors = [answer.error_message for answer in answers]
    assert [bool(error) for error in errors] == [False, True, True]
    assert "at most 0.001 requests per second" in errors[1]


@pytest.mark.parametrize("limit", ["max_body_bytes", "caller_max_in_flight_bytes"])
async def test_body_whose_head_names_too_many_bytes_takes_no_token(gated: Path, limit: str) -> None:
    """The only token is there for the next request."""
    GATE.set()
    limits = {**ONE_IN_1000_S, limit: 2000}
    async with gateway_of(gated, **limits) as served:
        refused = [
            (await served.post(path, b" " * 2001)).status
            for path in ("/v2/models/gated/infer", "/v1/models/gated:predict")
        ]
        answered = (await served.infer("gated", BODY)).status

    assert (*refused, answered) == (413, 413, 200)


async def test_refused_message_over_bytes_of_caller_takes_no_token(gated: Path) -> None:
    """Over gRPC as well, where the whole message is there."""
    GATE.set()
    size = len(request().SerializeToString())
    limits = {**ONE_IN_1000_S, "caller_max_in_flight_bytes": size}
    async with gateway_of(gated, grpc_port=0, **limits) as served:
        large = await infer_over_grpc(served, message=request(id="a longer one"))
        fitting = await infer_over_grpc(served)

    assert "bytes in the bodies" in large[1]
    assert fitting[0] is grpc.StatusCode.OK


async def test_body_over_bytes_of_caller_is_too_large(gated: Path) -> None:
    """It could never come in; nothing of it stays counted."""
    size = len(msgspec.json.encode(BODY))
    async with gateway_of(gated, caller_max_in_flight_bytes=size) as served:
        larger = await served.infer("gated", {**BODY, "id": "a longer one"})
        GATE.set()
        fitting = [(await served.infer("gated", BODY)).status for _ in range(2)]

    assert (larger.status, *fitting) == (413, 200, 200)
    assert f"at most {size} bytes in the bodies" in larger.json["error"]
