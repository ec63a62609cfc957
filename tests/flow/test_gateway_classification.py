"""The top classes of an output, by Triton's clients over both doors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry

from headrace.config import make_settings
from headrace.gateway import open_gateway
from headrace.models.registry import Models
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.metrics import Metrics
from headrace.topics import STAGES
from tests.support.gateways import gateway_of
from tests.support.models import add_version, digits, unbatched

LABELS = "\n".join(f"class {number}" for number in range(10))
PIXELS = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": [1.0] * 64}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """`digits`, whose scores for 64 ones are 64 times 0 to 9, with labels."""
    add_version(tmp_path, "digits", 1, digits(), '[output_labels]\nscores = "labels.txt"\n')
    (tmp_path / "digits" / "labels.txt").write_text(LABELS, encoding="utf-8")
    return tmp_path


def ask_for_classes(module: Any, url: str, **form: bool) -> np.ndarray[Any, Any]:
    """Ask for the three best classes of two rows."""
    tensor = module.InferInput("pixels", [2, 64], "FP32")
    tensor.set_data_from_numpy(np.ones((2, 64), np.float32))
    output = module.InferRequestedOutput("scores", class_count=3, **form)
    with module.InferenceServerClient(url) as client:
        answer = client.infer("digits", [tensor], outputs=[output])
    found: np.ndarray[Any, Any] = answer.as_numpy("scores")
    return found


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
async def test_http_client_gets_best_classes_with_labels(repository: Path, binary: bool) -> None:
    """One row of strings for each row of the batch, best first."""
    async with gateway_of(repository) as served:
        found = await asyncio.to_thread(
            ask_for_classes, triton_http, served.url, binary_data=binary
        )

    best = ["576.0:9:class 9", "512.0:8:class 8", "448.0:7:class 7"]
    expected = [each.encode() for each in best] if binary else best
    assert found.tolist() == [expected] * 2


async def test_grpc_client_gets_best_classes_with_labels(repository: Path) -> None:
    """The same over gRPC."""
    async with gateway_of(repository, grpc_port=0) as served:
        found = await asyncio.to_thread(ask_for_classes, triton_grpc, served.grpc)

    assert found.tolist() == [[b"576.0:9:class 9", b"512.0:8:class 8", b"448.0:7:class 7"]] * 2


async def test_model_without_batch_is_classified_as_one_row(tmp_path: Path) -> None:
    """All elements are one list, and the answer has one dimension."""
    add_version(tmp_path, "whole", 1, unbatched())
    tensor = {"name": "x", "datatype": "FP32", "shape": [4, 1], "data": [1, 4, 3, 2]}
    wanted = {"name": "y", "parameters": {"classification": 2}}
    async with gateway_of(tmp_path) as served:
        answer = await served.infer("whole", {"inputs": [tensor], "outputs": [wanted]})

    (output,) = answer.json["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [2])
    assert output["data"] == ["8.0:1", "6.0:2"]


async def test_large_output_is_classified_like_small_one(repository: Path) -> None:
    """Off the event loop, so that other callers need not wait."""
    rows = {**PIXELS, "shape": [500, 64], "data": [1.0] * 64 * 500}
    wanted = {"name": "scores", "parameters": {"classification": 1}}
    async with gateway_of(repository) as served:
        answer = await served.infer("digits", {"inputs": [rows], "outputs": [wanted]})

    (output,) = answer.json["outputs"]
    assert output["shape"] == [500, 1]
    assert output["data"] == ["576.0:9:class 9"] * 500


async def test_answer_of_version_that_gateway_lacks_is_retriable(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A gateway reads the repository itself, and may do so later than the stages."""
    empty = make_settings({"models": {"repository": str(tmp_path_factory.mktemp("empty"))}})
    settings = make_settings(
        {
            "models": {"repository": str(repository)},
            "gateway": {"http_port": 0, "grpc_port": "off"},
        }
    )
    wanted = {"name": "scores", "parameters": {"classification": 1}}
    body = {"inputs": [PIXELS], "outputs": [wanted]}
    instruments = Instruments(Metrics(CollectorRegistry()))
    async with open_log(settings) as log:
        pipeline = Pipeline(settings, log, STAGES, instruments=instruments)
        models, health = Models(empty).catalog, pipeline.health
        async with (
            open_gateway(settings, log, models, health, instruments) as doors,
            running(pipeline),
            ClientSession(f"http://127.0.0.1:{doors.ports['http']}") as http,
            http.post("/v2/models/digits/infer", json=body) as response,
        ):
            refused = await response.json()

    assert response.status == 503
    assert refused["error"].startswith("gateway: does not know digits/1, which answered")
    assert refused["error_details"]["retriable"]


async def test_bad_number_of_classes_is_refused(repository: Path) -> None:
    """The sentence names the parameter."""
    wanted = {"name": "scores", "parameters": {"classification": "many"}}
    async with gateway_of(repository) as served:
        refused = await served.infer("digits", {"inputs": [PIXELS], "outputs": [wanted]})

    assert refused.status == 400
    assert "outputs[0].parameters.classification: expected an integer" in refused.json["error"]


async def test_configuration_and_metadata_show_classification(repository: Path) -> None:
    """The file of the labels is in the configuration, over both doors, as Triton has it."""
    async with gateway_of(repository, grpc_port=0) as served:
        server = (await served.get("/v2")).json
        config = (await served.get("/v2/models/digits/config")).json
        with triton_grpc.InferenceServerClient(served.grpc) as client:
            over_grpc = await asyncio.to_thread(client.get_model_config, "digits")

    assert "classification" in server["extensions"]
    assert config["output"][0]["label_filename"] == "labels.txt"
    assert over_grpc.config.output[0].label_filename == "labels.txt"
