"""ResNet-50 v1.5 as an ONNX file, with random weights, since only its computing time matters.

The architecture is that of "Deep Residual Learning for Image Recognition" (He et al., 2015) with
the stride in the 3x3 convolutions; batch normalisation is folded into the convolutions, as every
exporter does for inference. The input is UINT8 [N, 3, 224, 224]; the graph widens and normalises
it, so that a request carries a quarter of the bytes.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BLOCKS = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Inner channels, number of blocks, and stride of the first block, for each stage."""
EXPANSION = 4
CLASSES = 1000
IMAGE = 224
OPSET = 17


class _Graph:
    """Nodes and weights of a graph, added one after the other."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(50)

    def add(self, kind: str, inputs: list[str], **attributes: object) -> str:
        """Add a node; returns the name of its output."""
        output = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def weight(self, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> str:
        """Add a constant; returns its name."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def convolution(self, x: str, shape: tuple[int, int, int], stride: int) -> str:
        """Add a convolution with its bias; `shape` is output channels, input channels and kernel
        side.
        """
        out, into, side = shape
        # Half of He's variance: the sums with the shortcuts stay finite over sixteen blocks.
        scale = math.sqrt(1.0 / (into * side * side))
        kernel = self._random.normal(0, scale, (out, into, side, side)).astype(np.float32)
        bias = np.zeros(out, np.float32)
        return self.add(
            "Conv",
            [x, self.weight(kernel), self.weight(bias)],
            kernel_shape=[side, side],
            strides=[stride, stride],
            pads=[side // 2] * 4,
        )

    def block(self, x: str, into: int, inner: int, stride: int) -> str:
        """Add a bottleneck: 1x1, 3x3, 1x1, and the shortcut."""
        out = inner * EXPANSION
        y = self.add("Relu", [self.convolution(x, (inner, into, 1), 1)])
        y = self.add("Relu", [self.convolution(y, (inner, inner, 3), stride)])
        y = self.convolution(y, (out, inner, 1), 1)
        if stride != 1 or into != out:
            x = self.convolution(x, (out, into, 1), stride)
        return self.add("Relu", [self.add("Add", [x, y])])


def write_resnet50(path: Path) -> None:
    """Write the model, about 100 MB."""
    graph = _Graph()
    x = graph.add("Cast", ["image"], to=TensorProto.FLOAT)
    mean = np.array([123.675, 116.28, 103.53], np.float32).reshape(1, 3, 1, 1)
    deviation = np.array([58.395, 57.12, 57.375], np.float32).reshape(1, 3, 1, 1)
    x = graph.add("Sub", [x, graph.weight(mean)])
    x = graph.add("Div", [x, graph.weight(deviation)])
    x = graph.add("Relu", [graph.convolution(x, (64, 3, 7), 2)])
    x = graph.add("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    into = 64
    for inner, blocks, stride in BLOCKS:
        for number in range(blocks):
            x = graph.block(x, into, inner, stride if number == 0 else 1)
            into = inner * EXPANSION
    x = graph.add("Flatten", [graph.add("GlobalAveragePool", [x])])
    random = np.random.default_rng(1)
    dense = random.normal(0, 0.02, (into, CLASSES)).astype(np.float32)
    x = graph.add("MatMul", [x, graph.weight(dense)])
    graph.nodes.append(helper.make_node("Softmax", [x], ["probabilities"], axis=1))
    made = helper.make_graph(
        graph.nodes,
        "resnet50",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, ["n", 3, IMAGE, IMAGE])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["n", CLASSES])],
        graph.weights,
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    onnx.save(model, unfinished)
    unfinished.replace(path)
