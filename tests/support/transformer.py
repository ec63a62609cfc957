"""A text encoder in ONNX, small enough for tests and a transformer all the same.

`input_ids` and `attention_mask`, INT64 [batch, sequence], and `shift`, FP32 [batch, 1], which is
added to the summary, give `hidden`, FP32 [batch, sequence, width], and `summary`, FP32
[batch, width]. `rounds`, INT64 [batch, 1], is work to waste: as many turns of a loop as its largest
value says. A token id beyond the vocabulary makes the run fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tests.support.models import Value, make_model

VOCABULARY = 100
LONGEST = 64
WIDTH = 32
HEADS = 4
_MASKED = -1e4


class _Graph:
    """Nodes and weights as they are added."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(seed)

    def op(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """A node; the name of its output."""
        output = output or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def constant(self, value: NDArray[Any]) -> str:
        name = f"constant_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def number(self, value: float) -> str:
        return self.constant(np.array(value, np.float32))

    def random(self, *shape: int, spread: float) -> str:
        values = self._random.standard_normal(shape, dtype=np.float32)
        return self.constant(values * np.float32(spread))

    def linear(self, x: str, wide: int, narrow: int) -> str:
        product = self.op("MatMul", x, self.random(wide, narrow, spread=1 / np.sqrt(wide)))
        return self.op("Add", product, self.random(narrow, spread=0.1))

    def norm(self, x: str) -> str:
        scale = self.constant(np.ones(WIDTH, np.float32))
        return self.op("LayerNormalization", x, scale, axis=-1)

    def heads(self, x: str, order: Sequence[int]) -> str:
        """[batch, sequence, width] to [batch, heads, …] in this order."""
        split = self.op("Reshape", x, self.integers(0, 0, HEADS, WIDTH // HEADS))
        return self.op("Transpose", split, perm=list(order))

    def attention(self, x: str, mask: str) -> str:
        query = self.heads(self.linear(x, WIDTH, WIDTH), (0, 2, 1, 3))
        key = self.heads(self.linear(x, WIDTH, WIDTH), (0, 2, 3, 1))
        value = self.heads(self.linear(x, WIDTH, WIDTH), (0, 2, 1, 3))
        scores = self.op("MatMul", query, key)
        scores = self.op("Mul", scores, self.number(1 / np.sqrt(WIDTH // HEADS)))
        weights = self.op("Softmax", self.op("Add", scores, mask), axis=-1)
        mixed = self.op("Transpose", self.op("MatMul", weights, value), perm=[0, 2, 1, 3])
        joined = self.op("Reshape", mixed, self.integers(0, 0, WIDTH))
        return self.linear(joined, WIDTH, WIDTH)

    def layer(self, x: str, mask: str) -> str:
        x = self.norm(self.op("Add", x, self.attention(x, mask)))
        inner = self.linear(x, WIDTH, 4 * WIDTH)
        gelu = self.op("Mul", inner, self.op("Sigmoid", inner))
        return self.norm(self.op("Add", x, self.linear(gelu, 4 * WIDTH, WIDTH)))

    def wasted(self, rounds: str, x: str) -> str:
        """`x`, after as many turns of a loop as the largest of `rounds` says."""
        turns = self.op("ReduceMax", rounds, keepdims=0)
        state = self.random(WIDTH, spread=1.0)
        last = self.op("Loop", turns, "", state, body=_turn())
        nothing = self.op("Mul", last, self.number(0.0))
        return self.op("Add", x, nothing)


def transformer() -> onnx.ModelProto:
    """The encoder, with weights from a fixed seed."""
    g = _Graph(7)
    words = g.op("Gather", g.random(VOCABULARY, WIDTH, spread=1.0), "input_ids")
    length = g.op("Gather", g.op("Shape", "input_ids"), g.integers(1))
    table, start = g.random(LONGEST, WIDTH, spread=0.3), g.integers(0)
    x = g.norm(g.op("Add", words, g.op("Slice", table, start, length, start)))
    unmasked = g.op("Cast", "attention_mask", to=TensorProto.FLOAT)
    scores = g.op("Mul", g.op("Sub", g.number(1.0), unmasked), g.number(_MASKED))
    mask = g.op("Unsqueeze", scores, g.integers(1, 2))
    for _ in range(2):
        x = g.layer(x, mask)
    g.op("Identity", g.wasted("rounds", x), output="hidden")
    first = g.op("Gather", "hidden", g.constant(np.array(0, np.int64)), axis=1)
    summary = g.op("Tanh", g.linear(first, WIDTH, WIDTH))
    g.op("Add", summary, "shift", output="summary")
    ids: list[int | str | None] = ["batch", "sequence"]
    inputs: list[Value] = [
        ("input_ids", TensorProto.INT64, ids),
        ("attention_mask", TensorProto.INT64, ids),
    ]
    inputs += [
        ("shift", TensorProto.FLOAT, ["batch", 1]),
        ("rounds", TensorProto.INT64, ["batch", 1]),
    ]
    outputs: list[Value] = [
        ("hidden", TensorProto.FLOAT, [*ids, WIDTH]),
        ("summary", TensorProto.FLOAT, ["batch", WIDTH]),
    ]
    return make_model(g.nodes, inputs, outputs, g.weights)


def quantised(model: onnx.ModelProto, scratch: Path) -> onnx.ModelProto:
    """The model with weights and activations quantised dynamically, by ONNX Runtime's own tool.

    Args:
        model: in FP32.
        scratch: a directory for two files.
    """
    from onnxruntime.quantization import quantize_dynamic

    source, target = scratch / "fp32.onnx", scratch / "quantised.onnx"
    onnx.save(model, source)
    quantize_dynamic(source, target, extra_options={"DefaultTensorType": TensorProto.FLOAT})
    return onnx.load(target)


def _turn() -> onnx.GraphProto:
    """One turn of the loop that wastes time."""
    values = {
        name: helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (
            ("turn", TensorProto.INT64, []),
            ("go", TensorProto.BOOL, []),
            ("go_on", TensorProto.BOOL, []),
            ("state", TensorProto.FLOAT, [WIDTH]),
            ("next", TensorProto.FLOAT, [WIDTH]),
        )
    }
    nodes = [
        helper.make_node("Identity", ["go"], ["go_on"]),
        helper.make_node("Sin", ["state"], ["next"]),
    ]
    return helper.make_graph(
        nodes,
        "turn",
        [values["turn"], values["go"], values["state"]],
        [values["go_on"], values["next"]],
    )
