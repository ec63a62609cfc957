"""Tiny ONNX models, and repositories of them, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from headrace.config import Settings, make_settings
from headrace.protocol.tensors import DATATYPES

Shape = Sequence[int | str | None]
Value = tuple[str, int, Shape]

# What every release of ONNX Runtime that is supported can read.
_OPSET = 17
_IR_VERSION = 9


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    constants: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    """A model of some nodes; values are `(name, element type, shape)`."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        list(constants),
    )
    opset = helper.make_opsetid("", _OPSET)
    return helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION)


def digits(weight: float = 1.0) -> onnx.ModelProto:
    """`pixels` FP32 [batch, 64] to `scores` FP32 [batch, 10]: sums of the pixels, weighted."""
    weights = np.outer(np.ones(64), np.arange(10)).astype(np.float32) * np.float32(weight)
    return make_model(
        [helper.make_node("MatMul", ["pixels", "weights"], ["scores"])],
        [("pixels", TensorProto.FLOAT, ["batch", 64])],
        [("scores", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(weights, "weights")],
    )


def tokens() -> onnx.ModelProto:
    """`input_ids`, `attention_mask` INT64 [batch, sequence] to `masked` of the same shape."""
    shape = ["batch", "sequence"]
    return make_model(
        [helper.make_node("Mul", ["input_ids", "attention_mask"], ["masked"])],
        [("input_ids", TensorProto.INT64, shape), ("attention_mask", TensorProto.INT64, shape)],
        [("masked", TensorProto.INT64, shape)],
    )


def embedding(rows: int = 8) -> onnx.ModelProto:
    """`index` INT64 [batch, 1] to `vector` FP32 [batch, 1, 4]; fails on an index out of range."""
    table = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    return make_model(
        [helper.make_node("Gather", ["table", "index"], ["vector"], axis=0)],
        [("index", TensorProto.INT64, ["batch", 1])],
        [("vector", TensorProto.FLOAT, ["batch", 1, 4])],
        [numpy_helper.from_array(table, "table")],
    )


def unbatched() -> onnx.ModelProto:
    """`x` FP32 [4, n] to `y` of the same shape, doubled: dimension 0 is not a batch."""
    return make_model(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        [("x", TensorProto.FLOAT, [4, "n"])],
        [("y", TensorProto.FLOAT, [4, "n"])],
    )


def falsely_batched() -> onnx.ModelProto:
    """`x` FP32 [batch, 2] to `y`, said to be [batch, 2], but always one row: a sum over rows."""
    axes = numpy_helper.from_array(np.array([0], dtype=np.int64), "axes")
    return make_model(
        [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=1)],
        [("x", TensorProto.FLOAT, ["batch", 2])],
        [("y", TensorProto.FLOAT, ["batch", 2])],
        [axes],
    )


def identity(datatype: str, shape: Shape = ("batch", 2)) -> onnx.ModelProto:
    """`x` to `y`, unchanged, of any datatype of the protocol."""
    element_type = DATATYPES[datatype].onnx
    return make_model(
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", element_type, shape)],
        [("y", element_type, shape)],
    )


def linear_classifier() -> onnx.ModelProto:
    """`X` FP32 [n, 4] to `label` BYTES [n] and `probabilities` FP32 [n, 3].

    The graph is the one that skl2onnx makes of a `LogisticRegression` with string labels and the
    option `zipmap=False`.
    """
    return _classifier(
        [
            helper.make_node(
                "LinearClassifier",
                ["X"],
                ["label", "scores"],
                domain="ai.onnx.ml",
                classlabels_strings=["setosa", "versicolor", "virginica"],
                coefficients=[1.0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0, 1.0, 0],
                intercepts=[0.0, 0.0, 0.0],
                multi_class=1,
                post_transform="SOFTMAX",
            ),
            helper.make_node(
                "Normalizer", ["scores"], ["probabilities"], domain="ai.onnx.ml", norm="L1"
            ),
        ]
    )


def tree_classifier() -> onnx.ModelProto:
    """See `linear_classifier`; as of a `DecisionTreeClassifier` that splits at X[0] = 0.5."""
    return _classifier(
        [
            helper.make_node(
                "TreeEnsembleClassifier",
                ["X"],
                ["label", "probabilities"],
                domain="ai.onnx.ml",
                class_ids=[0, 1, 2, 0, 1, 2],
                class_nodeids=[1, 1, 1, 2, 2, 2],
                class_treeids=[0] * 6,
                class_weights=[0.0, 1.0, 0.0, 0.9, 0.1, 0.0],
                classlabels_strings=["setosa", "versicolor", "virginica"],
                nodes_falsenodeids=[2, 0, 0],
                nodes_featureids=[0, 0, 0],
                nodes_hitrates=[1.0, 1.0, 1.0],
                nodes_missing_value_tracks_true=[0, 0, 0],
                nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
                nodes_nodeids=[0, 1, 2],
                nodes_treeids=[0, 0, 0],
                nodes_truenodeids=[1, 0, 0],
                nodes_values=[0.5, 0.0, 0.0],
                post_transform="NONE",
            )
        ]
    )


def _classifier(nodes: Sequence[onnx.NodeProto]) -> onnx.ModelProto:
    model = make_model(
        nodes,
        [("X", TensorProto.FLOAT, [None, 4])],
        [("label", TensorProto.STRING, [None]), ("probabilities", TensorProto.FLOAT, [None, 3])],
    )
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    return model


def slow() -> onnx.ModelProto:
    """`times` INT64 [] and `x` FP32 [batch, 64]: as many rounds of work as `times` says."""
    step = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Sin", ["state"], ["next"]),
        ],
        "step",
        [
            helper.make_tensor_value_info("round", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, [None, 64]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [None, 64]),
        ],
    )
    return make_model(
        [helper.make_node("Loop", ["times", "", "x"], ["y"], body=step)],
        [("times", TensorProto.INT64, []), ("x", TensorProto.FLOAT, ["batch", 64])],
        [("y", TensorProto.FLOAT, ["batch", 64])],
    )


def segmenter() -> onnx.ModelProto:
    """Gives each pixel of 8 x 8 the number of its column as class, whatever it is."""
    classes = np.tile(np.arange(8, dtype=np.int64), (1, 8, 1))
    constants = {"classes": classes, "at": [0], "size": [8, 8]}
    return make_model(
        [
            helper.make_node("Shape", ["x"], ["shape"]),
            helper.make_node("Gather", ["shape", "at"], ["rows"]),
            helper.make_node("Concat", ["rows", "size"], ["wanted"], axis=0),
            helper.make_node("Expand", ["classes", "wanted"], ["y"]),
        ],
        [("x", TensorProto.UINT8, ["batch", 8, 8, 3])],
        [("y", TensorProto.INT64, ["batch", 8, 8])],
        [numpy_helper.from_array(np.array(value), name) for name, value in constants.items()],
    )


def add_version(
    repository: Path, name: str, version: int, model: onnx.ModelProto, config: str = ""
) -> Path:
    """Write a version of a model, and its `model.toml` where one is given; its directory."""
    directory = repository / name / str(version)
    directory.mkdir(parents=True)
    onnx.save(model, directory / "model.onnx")
    if config:
        (repository / name / "model.toml").write_text(config, encoding="utf-8")
    return directory


NUMBERS = """
[transform.record]
[transform.record.inputs]
x = [{ path = "number" }, { path = "number" }]
[answer.python]
"""


def add_numbers(
    repository: Path, postprocess: str, *, max_execution_s: float = 2.0, answer: str = ""
) -> None:
    """Add a model that answers a record with its number, twice, which the code of `postprocess`
    then changes; `answer` is further lines of its section and those behind it.
    """
    config = f"max_execution_s = {max_execution_s}\n{NUMBERS}{answer}"
    directory = add_version(repository, "numbers", 1, identity("FP32", ("batch", 2)), config)
    (directory.parent / "postprocess.py").write_text(postprocess)


def settings_for(repository: Path) -> Settings:
    """The default settings with this repository."""
    return make_settings({"models": {"repository": repository}})
