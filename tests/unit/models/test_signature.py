"""Signatures read from ONNX files, and the rule for when dimension 0 is the batch."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from headrace.errors import ConfigurationError
from headrace.models.signature import Signature, TensorSpec, make_signature, read_onnx_signature
from headrace.protocol.tensors import DATATYPES
from tests.support import models
from tests.unit.models.requests import spec


def read(directory: Path, model: onnx.ModelProto) -> Signature:
    """The signature of a model by way of its file."""
    path = directory / "model.onnx"
    onnx.save(model, path)
    return read_onnx_signature(path)


def with_values(*values: onnx.ValueInfoProto) -> onnx.ModelProto:
    """A model that is only a signature: one input `x` beside these, one output `y`."""
    model = models.identity("FP32")
    model.graph.input.extend(values)
    return model


def test_signature_has_inputs_and_outputs_of_model(tmp_path: Path) -> None:
    """Names, datatypes, fixed sizes and names of free dimensions come from the graph."""
    signature = read(tmp_path, models.digits())
    assert signature.inputs == (spec("pixels", "FP32", [-1, 64], ["batch", ""]),)
    assert signature.outputs == (spec("scores", "FP32", [-1, 10], ["batch", ""]),)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_signature_names_datatypes_by_protocol(tmp_path: Path, datatype: str) -> None:
    """An element type of ONNX becomes the Open Inference Protocol's datatype."""
    assert read(tmp_path, models.identity(datatype)).inputs[0].datatype == datatype


def test_constants_are_not_inputs_of_signature(tmp_path: Path) -> None:
    """Old exporters list weights among the inputs; a request need not bring them."""
    model = models.digits()
    model.graph.input.append(helper.make_tensor_value_info("weights", TensorProto.FLOAT, [64, 10]))
    assert [each.name for each in read(tmp_path, model).inputs] == ["pixels"]


def test_strings_of_onnx_are_utf8(tmp_path: Path) -> None:
    """ONNX's strings are UTF-8, so elements of `BYTES` have to be."""
    assert read(tmp_path, models.identity("BYTES")).utf8


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            helper.make_tensor_value_info("bad", TensorProto.COMPLEX64, [1]),
            "input bad: expected one of .*BYTES, got COMPLEX64",
        ),
        (
            helper.make_tensor_value_info("bad", TensorProto.FLOAT8E4M3FN, [1]),
            "input bad: expected one of .*, got FLOAT8E4M3FN",
        ),
        (
            helper.make_tensor_sequence_value_info("bad", TensorProto.FLOAT, [1]),
            "input bad: expected a dense tensor, got sequence",
        ),
        (
            helper.make_sparse_tensor_value_info("bad", TensorProto.FLOAT, [1]),
            "input bad: expected a dense tensor, got sparse_tensor",
        ),
        (
            helper.make_value_info(
                "bad", helper.make_optional_type_proto(helper.make_tensor_type_proto(1, [1]))
            ),
            "input bad: expected a dense tensor, got optional",
        ),
        (
            helper.make_value_info(
                "bad", helper.make_map_type_proto(7, helper.make_tensor_type_proto(1, [1]))
            ),
            "input bad: expected a dense tensor, got map",
        ),
        (
            helper.make_tensor_value_info("bad", TensorProto.FLOAT, None),
            "input bad: expected a shape, got a tensor of unknown rank",
        ),
    ],
    ids=["complex", "float8", "sequence", "sparse", "optional", "map", "rank"],
)
def test_type_without_protocol_name_is_refused_by_name(
    tmp_path: Path, value: onnx.ValueInfoProto, message: str
) -> None:
    """A type without a name in the protocol is refused, and the input is named."""
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path, with_values(value))


def test_broken_model_file_is_refused(tmp_path: Path) -> None:
    """A file that is no ONNX model is refused with its path."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\xff\xff\xff no model")
    with pytest.raises(ConfigurationError, match=r"model\.onnx: expected an ONNX model"):
        read_onnx_signature(path)


def test_missing_model_file_is_refused(tmp_path: Path) -> None:
    """A file that is not there is refused with its path."""
    with pytest.raises(ConfigurationError, match=r"model\.onnx: No such file"):
        read_onnx_signature(tmp_path / "model.onnx")


def test_model_without_outputs_is_refused() -> None:
    """A signature needs an input and an output."""
    with pytest.raises(ConfigurationError, match="outputs: expected at least one, got none"):
        make_signature([spec("x", "FP32", [-1])], [])


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ([spec("x", "FP32", [-1, 4])], [spec("y", "FP32", [-1])]),
        ([spec("x", "FP32", [-1, 4], ["n", ""])], [spec("y", "FP32", [-1], ["n"])]),
        ([spec("x", "FP32", [-1, 4], ["n", ""])], [spec("y", "FP32", [-1])]),
        ([spec("x", "FP32", [-1, 4], ["n", ""])], [spec("y", "FP32", [-1], ["Gemm_dim_0"])]),
    ],
    ids=["nameless", "same name", "output nameless", "output named by an exporter"],
)
def test_free_dimension_0_is_batch_dimension(inputs: list, outputs: list) -> None:  # type: ignore[type-arg]  # specs
    """A model is batched when dimension 0 is free everywhere and no name speaks against it."""
    assert make_signature(inputs, outputs).batched


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        ([spec("x", "FP32", [1, 4])], [spec("y", "FP32", [-1])], "dimension 0 of x is fixed at 1"),
        ([spec("x", "FP32", [-1])], [spec("y", "FP32", [2])], "dimension 0 of y is fixed at 2"),
        ([spec("x", "FP32", [-1])], [spec("y", "FP32", [])], "y is a scalar"),
        (
            [spec("x", "FP32", [-1], ["n"]), spec("z", "FP32", [-1], ["m"])],
            [spec("y", "FP32", [-1])],
            "dimension 0 has different names: n of x, m of z",
        ),
        (
            [spec("x", "FP32", [-1, -1], ["n", "m"])],
            [spec("y", "FP32", [-1], ["m"])],
            "dimension 0 of y is m, which is not the inputs' dimension 0",
        ),
        (
            [spec("x", "FP32", [-1, -1], ["n", "n"])],
            [spec("y", "FP32", [-1], ["n"])],
            "n is dimension 0 and another dimension as well",
        ),
    ],
    ids=["fixed input", "fixed output", "scalar", "two names", "other dimension", "square"],
)
def test_signature_without_batch_dimension_has_reason(
    inputs: list[TensorSpec], outputs: list[TensorSpec], reason: str
) -> None:
    """The signature gives the reason why dimension 0 cannot be the batch."""
    signature = make_signature(inputs, outputs)
    assert (signature.batched, signature.unbatched_reason) == (False, reason)


def test_numbered_names_of_tf2onnx_say_nothing(tmp_path: Path) -> None:
    """tf2onnx numbers nameless dimensions apart; that does not make them different."""
    model = models.make_model(
        [helper.make_node("Add", ["a", "b"], ["y"])],
        [("a", 1, ["unk__1", 2]), ("b", 1, ["unk__2", 2])],
        [("y", 1, ["unk__3", 2])],
    )
    assert read(tmp_path, model).batched


def test_graph_with_unknown_operator_is_refused(tmp_path: Path) -> None:
    """Every process finds that, also one that has no ONNX Runtime."""
    model = models.digits()
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(
        ConfigurationError, match="expected a valid ONNX model: No Op registered for NoSuchOperator"
    ):
        read(tmp_path, model)
