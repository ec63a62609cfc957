"""Inputs and outputs that are bound to ONNX Runtime by address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from headrace.models.backends.onnx_runtime import UNBOUND, Binding, OnnxBackend
from headrace.models.backends.port import ReusedInputs
from headrace.models.config import make_model_config
from headrace.models.signature import read_onnx_signature, without_batching
from headrace.protocol.tensors import DATATYPES
from tests.support import models


def load(tmp_path: Path, model: onnx.ModelProto, **config: Any) -> OnnxBackend:
    """A backend of a model; keywords are lines of `model.toml`."""
    directory = models.add_version(tmp_path, "model", 1, model)
    settings = models.settings_for(tmp_path)
    signature = read_onnx_signature(directory / "model.onnx")
    backend = OnnxBackend(directory, make_model_config(config, settings), signature)
    backend.load()
    return backend


def placed(**arrays: np.ndarray[Any, Any]) -> ReusedInputs:
    """Inputs in memory that stays."""
    inputs = ReusedInputs()
    inputs.update(arrays)
    return inputs


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
def test_bound_run_equals_plain_run(tmp_path: Path, datatype: str) -> None:
    """For every datatype whose elements have a size."""
    backend = load(tmp_path, models.identity(datatype))
    inputs = placed(x=np.array([[0, 1], [1, 0]]).astype(DATATYPES[datatype].dtype))
    plain = backend.run(inputs)
    bound = backend.run(inputs)
    assert isinstance(inputs.bound, Binding)
    assert bound["y"].dtype == plain["y"].dtype
    assert bound["y"].tobytes() == plain["y"].tobytes() == inputs["x"].tobytes()


def test_bound_run_reads_current_values(tmp_path: Path) -> None:
    """The addresses are bound, not the values."""
    backend = load(tmp_path, models.digits())
    inputs = placed(pixels=np.ones((2, 64), np.float32))
    for _ in range(2):
        backend.run(inputs)
    inputs["pixels"][:] = 2
    assert backend.run(inputs)["scores"][0, 1] == 128


def test_bound_outputs_are_not_overwritten_by_next_run(tmp_path: Path) -> None:
    """Answers are written after other batches have run."""
    backend = load(tmp_path, models.digits())
    inputs = placed(pixels=np.ones((2, 64), np.float32))
    backend.run(inputs)
    earlier = backend.run(inputs)
    inputs["pixels"][:] = 2
    backend.run(inputs)
    assert earlier["scores"][0, 1] == 64


@pytest.mark.parametrize("config", [{"io_binding": True}, {"io_binding": False}])
def test_bound_outputs_of_in_place_model_are_not_overwritten(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """Outputs stay as they are even if the output of the model is its input."""
    backend = load(tmp_path, models.identity("FP32"), **config)
    inputs = placed(x=np.ones((2, 2), np.float32))
    earlier = backend.run(inputs)
    inputs["x"][:] = 2
    assert earlier["y"].tolist() == [[1, 1], [1, 1]]


def test_bound_batch_sizes_share_output_memory(tmp_path: Path) -> None:
    """A smaller batch after a larger one gives its own rows."""
    backend = load(tmp_path, models.digits())
    for rows in (1, 8, 3, 1):
        inputs = placed(pixels=np.full((rows, 64), rows, np.float32))
        for _ in range(2):
            scores = backend.run(inputs)["scores"]
            np.testing.assert_array_equal(scores[:, 1], np.full(rows, 64 * rows))


def test_output_of_free_shape_is_not_bound(tmp_path: Path) -> None:
    """How large it becomes is known only after the run."""
    backend = load(tmp_path, models.tokens())
    ids = np.ones((2, 3), np.int64)
    inputs = placed(input_ids=ids, attention_mask=ids)
    for _ in range(2):
        assert backend.run(inputs)["masked"].shape == (2, 3)
    assert inputs.bound is UNBOUND


@pytest.mark.parametrize("size", [4, "n"])
def test_output_whose_rows_follow_values_is_not_bound(tmp_path: Path, size: int | str) -> None:
    """Dimension 0 has one size for all runs of the same inputs only where it is the batch."""
    model = models.make_model(
        [
            helper.make_node("Cast", ["x"], ["kept"], to=TensorProto.BOOL),
            helper.make_node("Compress", ["x", "kept"], ["y"], axis=0),
        ],
        [("x", TensorProto.FLOAT, [size])],
        [("y", TensorProto.FLOAT, ["found"])],
    )
    backend = load(tmp_path, model)
    backend.use_signature(without_batching(backend.signature, "the probe found it"))
    inputs = placed(x=np.ones(4, np.float32))
    for values in ([1, 2, 3, 4], [0, 0, 0, 5], [0, 6, 0, 7]):
        inputs["x"][:] = values
        assert backend.run(inputs)["y"].tolist() == [value for value in values if value]


def test_output_that_is_not_as_declared_is_not_bound(tmp_path: Path) -> None:
    """A plain run gives what came, and says what is wrong with it if that matters."""
    model = models.make_model(
        [helper.make_node("Concat", ["x", "x"], ["y"], axis=1)],
        [("x", TensorProto.FLOAT, ["batch", None])],
        [("y", TensorProto.FLOAT, ["batch", 2])],
    )
    backend = load(tmp_path, model)
    inputs = placed(x=np.ones((1, 3), np.float32))
    for _ in range(2):
        assert backend.run(inputs)["y"].shape == (1, 6)


def test_backend_without_io_binding_binds_nothing(tmp_path: Path) -> None:
    """`io_binding = false` is one line away."""
    backend = load(tmp_path, models.digits(), io_binding=False)
    inputs = placed(pixels=np.ones((2, 64), np.float32))
    for _ in range(2):
        backend.run(inputs)
    assert inputs.bound is None
