"""Statistics of the models at both doors, as Triton's clients read them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from google.protobuf.json_format import MessageToDict

from headrace.client import Response
from headrace.gateway.statistics import Statistics
from headrace.protocol.tensors import DATATYPES
from tests.support.gateways import add_identities, gateway_of

GOOD = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}]}
WRONG = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model for each datatype, which changes nothing."""
    add_identities(tmp_path)
    return tmp_path


async def answer_of(rows: int, batch_size: int) -> Response:
    """An answer with so many of the rows of a run of 400 µs."""
    timings = {"queue_us": 10, "batch_us": 80, "compute_us": 400, "batch_size": batch_size}
    outputs = {"y": np.zeros((rows, 2), np.float32)}
    return Response("FP32", "1", None, outputs, {**timings}, ())


async def failure() -> Response:
    raise TimeoutError


def counts_of(stats: dict[str, Any]) -> dict[str, int]:
    return {name: each["count"] for name, each in stats["inference_stats"].items()}


async def test_statistics_count_requests_rows_and_runs(repository: Path) -> None:
    """Three requests of two rows, each in a run of its own, and one that is refused."""
    async with gateway_of(repository) as served:
        statuses = [(await served.infer("FP32", body)).status for body in [GOOD] * 3 + [WRONG]]
        (stats,) = (await served.get("/v2/models/FP32/stats")).json["model_stats"]

    assert statuses == [200, 200, 200, 400]
    assert (stats["name"], stats["version"]) == ("FP32", "1")
    assert (stats["inference_count"], stats["execution_count"]) == (6, 3)
    assert counts_of(stats) == {
        "success": 3,
        "fail": 1,
        "queue": 3,
        "compute_input": 3,
        "compute_infer": 3,
        "compute_output": 3,
        "cache_hit": 0,
        "cache_miss": 0,
    }
    (batch,) = stats["batch_stats"]
    assert (batch["batch_size"], batch["compute_infer"]["count"]) == (2, 3)


def read_with_both_clients(http: str, grpc: str) -> tuple[list[Any], list[Any]]:
    """Read the statistics of a model with Triton's clients."""
    with (
        triton_http.InferenceServerClient(http) as over_http,
        triton_grpc.InferenceServerClient(grpc) as over_grpc,
    ):
        message = over_grpc.get_inference_statistics("FP32", "1")
        shown = MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        return over_http.get_inference_statistics("FP32", "1")["model_stats"], shown["model_stats"]


async def test_both_doors_show_same_statistics(repository: Path) -> None:
    """A request over HTTP is counted for both; the message of gRPC has the same figures."""
    async with gateway_of(repository, grpc_port=0) as served:
        await served.infer("FP32", GOOD)
        (over_http,), (over_grpc,) = await asyncio.to_thread(
            read_with_both_clients, served.url, served.grpc
        )

    assert int(over_grpc["execution_count"]) == over_http["execution_count"] == 1
    for name, each in over_http["inference_stats"].items():
        shown = over_grpc["inference_stats"][name]
        assert {key: int(value) for key, value in shown.items()} == each, name


async def test_statistics_of_all_models_include_those_without_requests(repository: Path) -> None:
    """They have zeros."""
    async with gateway_of(repository) as served:
        found = (await served.get("/v2/models/stats")).json["model_stats"]

    assert {each["name"] for each in found} == set(DATATYPES)
    assert {each["inference_count"] for each in found} == {0}


async def test_statistics_of_unknown_model_are_refused(repository: Path) -> None:
    """The status is that of a request for it."""
    async with gateway_of(repository) as served:
        reply = await served.get("/v2/models/letters/stats")

    assert (reply.status, reply.json["error_details"]["code"]) == (404, "UNKNOWN_MODEL")


async def test_requests_that_share_a_run_add_up_to_one_execution(repository: Path) -> None:
    """Each counts for its share of the rows, and so does the run's duration."""
    async with gateway_of(repository, stages=()) as served:
        statistics = Statistics(served.pipeline.models.catalog)
        for rows in (2, 5, 1):
            await statistics.counted("FP32", None, answer_of(rows, batch_size=8))
        (stats,) = statistics.describe("FP32")

    assert (stats["inference_count"], stats["execution_count"]) == (8, 1)
    (batch,) = stats["batch_stats"]
    assert batch["compute_infer"] == {"count": 1, "ns": 400_000}
    assert stats["inference_stats"]["compute_infer"] == {"count": 3, "ns": 1_200_000}


async def test_failed_request_for_unknown_model_is_counted_for_none(repository: Path) -> None:
    """Callers cannot make the statistics grow."""
    async with gateway_of(repository, stages=()) as served:
        statistics = Statistics(served.pipeline.models.catalog)
        with pytest.raises(TimeoutError):
            await statistics.counted("letters", None, failure())

        assert {each["name"] for each in statistics.describe()} == set(DATATYPES)
