"""A repository in Triton's layout, served as it is, and asked by Triton's clients."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from tests.support.gateways import Served, gateway_of
from tests.support.models import Shape, digits, identity, make_model, tokens

X, Y = np.array([[1.0, 2.0]], np.float32), np.array([[3.0, 5.0]], np.float32)
PAIR = """
input [
  { name: "a" data_type: TYPE_FP32 dims: [2] },
  { name: "b" data_type: TYPE_FP32 dims: [2] }
]
output [
  { name: "sum" data_type: TYPE_FP32 dims: [2] },
  { name: "rest" data_type: TYPE_FP32 dims: [2] }
]
"""
ONE = """
input [ { name: "x" data_type: TYPE_FP32 dims: [2] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [2] } ]
"""
PIXELS = 'input [ { name: "pixels" data_type: TYPE_FP32 dims: [64] } ]\n'


class Model(NamedTuple):
    """A model, its versions, its configuration, inputs to try, and the versions to be served."""

    graph: onnx.ModelProto
    config: str
    inputs: dict[str, np.ndarray[Any, Any]]
    versions: tuple[int, ...] = (1,)
    served: tuple[int, ...] = (1,)


def add_sub() -> onnx.ModelProto:
    """Sum and difference of `a` and `b`."""
    shape: Shape = ["batch", 2]
    return make_model(
        [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", "ab", ["rest"])],
        [(name, TensorProto.FLOAT, shape) for name in "ab"],
        [(name, TensorProto.FLOAT, shape) for name in ("sum", "rest")],
    )


IMAGE = {"pixels": np.ones((1, 64), np.float32)}
TEXTS = {"x": np.array([["é", ""]], dtype=object)}
MODELS = {
    "identity": Model(
        identity("FP32"), f'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n{ONE}', {"x": X}
    ),
    "add_sub": Model(
        add_sub(), f'backend: "onnxruntime"\nmax_batch_size: 8\n{PAIR}', {"a": X, "b": Y}
    ),
    "whole": Model(
        identity("FP32", (2, 2)),
        'backend: "onnxruntime"\ninput [ { name: "x" data_type: TYPE_FP32 dims: [2, 2] } ]',
        {"x": np.array([[1, 2], [3, 4]], np.float32)},
    ),
    "texts": Model(identity("BYTES"), ONE.replace("FP32", "STRING") + "max_batch_size: 4", TEXTS),
    "free": Model(
        tokens(),
        """max_batch_size: 4
        input [
          { name: "input_ids" data_type: TYPE_INT64 dims: [-1] },
          { name: "attention_mask" data_type: TYPE_INT64 dims: [-1] }
        ]""",
        {name: np.ones((1, 5), np.int64) for name in ("input_ids", "attention_mask")},
    ),
    "instances": Model(
        digits(),
        f"max_batch_size: 8 {PIXELS} instance_group [ {{ count: 2 kind: KIND_CPU }} ]",
        IMAGE,
    ),
    "delayed": Model(
        digits(),
        f"""max_batch_size: 8 {PIXELS}
        dynamic_batching {{ preferred_batch_size: [4, 8] max_queue_delay_microseconds: 500 }}""",
        IMAGE,
    ),
    "warmed": Model(
        digits(),
        f"""max_batch_size: 8 {PIXELS}
        model_warmup [ {{ name: "one" batch_size: 1 inputs {{ key: "pixels"
          value: {{ data_type: TYPE_FP32 dims: [64] random_data: true }} }} }} ]""",
        IMAGE,
    ),
    "labelled": Model(
        digits(),
        f"""max_batch_size: 8 {PIXELS}
        output [
          {{ name: "scores" data_type: TYPE_FP32 dims: [10] label_filename: "labels.txt" }}
        ]""",
        IMAGE,
    ),
    "all_versions": Model(
        digits(),
        f"max_batch_size: 8 {PIXELS} version_policy: {{ all {{}} }}",
        IMAGE,
        (1, 3),
        (1, 3),
    ),
    "two_latest": Model(
        digits(),
        f"max_batch_size: 8 {PIXELS} version_policy: {{ latest {{ num_versions: 2 }} }}",
        IMAGE,
        (1, 2, 10),
        (2, 10),
    ),
    "chosen": Model(
        digits(),
        f"max_batch_size: 8 {PIXELS} version_policy: {{ specific {{ versions: [2] }} }}",
        IMAGE,
        (1, 2, 3),
        (2,),
    ),
}
"""By name; each is served as its configuration says."""


def write(repository: Path) -> None:
    """Write all models, and one that asks for what Headrace does not have."""
    for name, model in MODELS.items():
        for version in model.versions:
            directory = repository / name / str(version)
            directory.mkdir(parents=True)
            onnx.save(model.graph, directory / "model.onnx")
        (repository / name / "config.pbtxt").write_text(f'name: "{name}"\n{model.config}')
    (repository / "labelled" / "labels.txt").write_text("\n".join("abcdefghij"))
    refused = repository / "refused" / "1"
    refused.mkdir(parents=True)
    onnx.save(digits(), refused / "model.onnx")
    (refused.parent / "config.pbtxt").write_text("sequence_batching { }")


def ask(address: str, *, ready_only: bool = False) -> None:
    """Ask every version of every model for what ONNX Runtime gives without Headrace."""
    with triton.InferenceServerClient(address) as client:
        index = client.get_model_repository_index(as_json=True)["models"]
        for name, model in MODELS.items():
            ready = {
                each["version"]
                for each in index
                if each["name"] == name and (each["state"] == "READY" or not ready_only)
            }
            assert ready == {str(each) for each in model.served}, name
            session = onnxruntime.InferenceSession(model.graph.SerializeToString())
            expected = session.run(None, model.inputs)
            for version in ready:
                found = client.infer(name, inputs_of(model), model_version=version)
                for output, values in zip(session.get_outputs(), expected, strict=True):
                    got = found.as_numpy(output.name)
                    if got.dtype == object:
                        got = np.array([each.decode() for each in got.flat]).reshape(got.shape)
                    np.testing.assert_array_equal(got, values, err_msg=name)


def inputs_of(model: Model) -> list[triton.InferInput]:
    """The model's inputs as Triton's client sends them."""
    tensors = []
    for name, values in model.inputs.items():
        datatype = {"float32": "FP32", "int64": "INT64", "object": "BYTES"}[str(values.dtype)]
        tensor = triton.InferInput(name, list(values.shape), datatype)
        tensor.set_data_from_numpy(values)
        tensors.append(tensor)
    return tensors


async def load_all(address: str) -> None:
    """Load all models at once; before, none is ready."""
    async with triton_aio.InferenceServerClient(address) as client:
        index = await client.get_model_repository_index(as_json=True)
        assert {each["name"] for each in index["models"]} == {*MODELS, "refused"}
        assert {each["state"] for each in index["models"]} == {"UNAVAILABLE"}
        async with asyncio.TaskGroup() as tasks:
            for name in MODELS:
                tasks.create_task(client.load_model(name), name=name)
        with pytest.raises(InferenceServerException, match="sequence_batching: has no counterpart"):
            await client.load_model("refused")


async def unload_all(address: str) -> None:
    """Unload all models at once; then none is ready."""
    async with triton_aio.InferenceServerClient(address) as client:
        async with asyncio.TaskGroup() as tasks:
            for name in MODELS:
                tasks.create_task(client.unload_model(name), name=name)
        index = await client.get_model_repository_index(as_json=True)
        assert "READY" not in {each["state"] for each in index["models"]}
        assert not await client.is_model_ready("identity")


def show_configurations(address: str) -> dict[str, Any]:
    """Return the `ModelConfig` of each model."""
    with triton.InferenceServerClient(address) as client:
        return {name: client.get_model_config(name).config for name in MODELS}


async def reason_of(served: Served, model: str) -> str:
    """Why a model is not served, as the index says."""
    reply = await served.post("/v2/repository/index", b"{}")
    return next(str(each["reason"]) for each in reply.json if each["name"] == model)


async def test_models_of_triton_repository_answer_as_runtime(tmp_path: Path) -> None:
    """Twelve layouts; the versions that the policies select are served, and no others."""
    write(tmp_path)
    async with gateway_of(tmp_path, grpc_port=0) as served:
        await asyncio.to_thread(ask, served.grpc)


async def test_models_of_triton_repository_are_loaded_and_unloaded_by_its_client(
    tmp_path: Path,
) -> None:
    """Each with the versions that its policy selects; calls at once do not disturb each other."""
    write(tmp_path)
    async with gateway_of(tmp_path, mode="explicit", grpc_port=0, model_changes="anyone") as served:
        await load_all(served.grpc)
        await asyncio.to_thread(ask, served.grpc, ready_only=True)
        await unload_all(served.grpc)


async def test_configuration_is_shown_as_triton_has_it(tmp_path: Path) -> None:
    """Sizes, dimensions without the batch, and labels."""
    write(tmp_path)
    async with gateway_of(tmp_path, grpc_port=0) as served:
        found = await asyncio.to_thread(show_configurations, served.grpc)

    assert (found["identity"].max_batch_size, list(found["identity"].input[0].dims)) == (8, [2])
    assert (found["whole"].max_batch_size, list(found["whole"].input[0].dims)) == (0, [2, 2])
    assert found["labelled"].output[0].label_filename == "labels.txt"
    assert {each.platform for each in found.values()} == {"onnxruntime_onnx"}


async def test_model_with_refused_field_shows_it_and_harms_no_other(tmp_path: Path) -> None:
    """In the index of the repository, where Triton's tools look."""
    write(tmp_path)
    async with gateway_of(tmp_path) as served:
        reason = await reason_of(served, "refused")

    assert reason == "refused/config.pbtxt: sequence_batching: has no counterpart"
