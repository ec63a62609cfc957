"""Softmax, top-k and argmax appended to a model's graph at load, and class labels for indices.

What is appended runs where the model runs, on every execution provider, and only the small
results leave the device. Labels are looked up on the host afterwards: strings live on no device,
and as a part of the graph they would cut it in two.

Operators: https://onnx.ai/onnx/operators (Softmax, ArgMax, TopK), along the last axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigurationError
from headrace.models.signature import Signature, TensorSpec, make_signature

if TYPE_CHECKING:
    import onnx

OLDEST_OPSET = 11
"""Of the default domain: since then the operators have had the form in which they are used here."""
_FLOATS = ("FP16", "BF16", "FP32", "FP64")
_PREFIX = "headrace/"
"""Of the names of what is appended, which no exporter uses."""


class Appendix(NamedTuple):
    """What follows one output of a model.

    Attributes:
        source: the output as the model's file has it.
        steps: `softmax`, `argmax` or `top_k:N`; the outputs are those of the last one.
        labels: one for each index along the last axis; empty: none are wanted.
    """

    source: TensorSpec
    steps: tuple[str, ...]
    labels: tuple[bytes, ...] = ()

    @property
    def top_k(self) -> int:
        """Of a last step `top_k:N`; 0 otherwise."""
        name, _, number = self.steps[-1].partition(":")
        return int(number) if name == "top_k" else 0

    @property
    def indices(self) -> str:
        """The name of the output that labels belong to; empty where there are no indices."""
        if self.top_k:
            return f"{self.source.name}_indices"
        return f"{self.source.name}_argmax" if self.steps[-1] == "argmax" else ""

    @property
    def labelled(self) -> str:
        """The name of the output of labels; empty where there is none."""
        return f"{self.source.name}_labels" if self.labels else ""

    def graph_outputs(self) -> list[TensorSpec]:
        """What the graph gives in place of the source."""
        source = self.source
        if self.top_k:
            shape = (*source.shape[:-1], self.top_k)
            names = source.dimensions and (*source.dimensions[:-1], "")
            return [
                TensorSpec(f"{source.name}_top_k", source.datatype, shape, names),
                TensorSpec(self.indices, "INT64", shape, names),
            ]
        if self.indices:
            names = source.dimensions[:-1]
            return [TensorSpec(self.indices, "INT64", source.shape[:-1], names)]
        return [source._replace(name=f"{source.name}_softmax")]

    def outputs(self) -> list[TensorSpec]:
        """The same, with the labels."""
        outputs = self.graph_outputs()
        if self.labels:
            outputs.append(outputs[-1]._replace(name=self.labelled, datatype="BYTES"))
        return outputs

    def look_up(self, indices: NDArray[Any]) -> NDArray[Any]:
        """The labels of indices, of any shape, as an object array of bytes."""
        labels: NDArray[Any] = np.array(self.labels, dtype=object)
        # Indexing by a scalar would give the label itself, and not an array of it.
        return np.asarray(labels[indices], dtype=object)


def plan_appendix(
    signature: Signature, steps: Sequence[str], output: str, labels: Sequence[bytes] = ()
) -> Appendix:
    """See that steps fit an output.

    Args:
        signature: as the model's file says it.
        steps: of `model.toml`, `postprocess`.
        output: which one; empty: the only one.
        labels: see `read_labels`.

    Raises:
        ConfigurationError: there is no such output, or the steps do not fit it.
    """
    source = _find(signature, output)
    where = f"postprocess of {source.name}"
    if source.datatype not in _FLOATS:
        raise ConfigurationError(f"{where}: expected {', '.join(_FLOATS)}, got {source.datatype}")
    if len(source.shape) < 1 + signature.batched:
        raise ConfigurationError(
            f"{where}: expected a dimension of classes, got shape {list(source.shape)}"
        )
    appendix = Appendix(source, tuple(steps), tuple(labels))
    classes = source.shape[-1]
    if classes != -1 and appendix.top_k > classes:
        raise ConfigurationError(f"{where}: top_k: expected at most {classes}, got {steps[-1]}")
    if labels and not appendix.indices:
        raise ConfigurationError(f"{where}: labels: expected argmax or top_k last, got {steps[-1]}")
    if labels and classes != len(labels):
        raise ConfigurationError(f"{where}: labels: expected {classes} lines, got {len(labels)}")
    return appendix


def _find(signature: Signature, output: str) -> TensorSpec:
    names = {spec.name: spec for spec in signature.outputs}
    if not output and len(names) == 1:
        return signature.outputs[0]
    if output not in names:
        raise ConfigurationError(
            f"postprocess_output: expected one of {', '.join(names)}, got {output or 'none'}"
        )
    return names[output]


def with_appendix(signature: Signature, appendix: Appendix) -> Signature:
    """The signature of the model with what is appended: the new outputs in the source's place.

    Raises:
        ConfigurationError: a new output has the name of another one.
    """
    outputs: list[TensorSpec] = []
    for spec in signature.outputs:
        outputs.extend(appendix.outputs() if spec.name == appendix.source.name else [spec])
    return make_signature(
        signature.inputs, outputs, utf8=signature.utf8, precision=signature.precision
    )


def read_labels(directory: Path, name: str) -> tuple[bytes, ...]:
    """The lines of a file in a version's directory, or else beside its `model.toml`.

    Raises:
        ConfigurationError: it is in neither place, it lies outside of them, or it is not UTF-8.
    """
    places = (directory / name, directory.parent / name)
    for path in places:
        try:
            if not path.is_file():
                continue
        except OSError as error:
            raise ConfigurationError(f"labels: {error.strerror}: {name:.100}...") from error
        # Resolved, since a symbolic link leads out as ".." does.
        inside = (directory.resolve(), directory.parent.resolve())
        if not any(path.resolve().is_relative_to(each) for each in inside):
            raise ConfigurationError(
                f"labels: expected a file in the model's directory {inside[1]}, "
                f"got {path.resolve()}"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path}: {error}") from error
        return tuple(line.strip().encode() for line in text.splitlines())
    raise ConfigurationError(f"labels: expected a file {places[0]} or {places[1]}, got none")


def append(model: onnx.ModelProto, appendix: Appendix) -> None:
    """Change a model in place; tensors in other files are not looked at.

    Raises:
        ConfigurationError: its operators are of too old a form.
    """
    from onnx import helper

    opset = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), 0)
    if opset < OLDEST_OPSET:
        raise ConfigurationError(
            f"postprocess: expected opset {OLDEST_OPSET} or newer, got {opset}"
        )
    graph = model.graph
    value = appendix.source.name
    axis = len(appendix.source.shape) - 1
    results = [spec.name for spec in appendix.graph_outputs()]
    for number, step in enumerate(appendix.steps):
        is_last = number == len(appendix.steps) - 1
        outputs = results if is_last else [f"{_PREFIX}{number}"]
        name, _, size = step.partition(":")
        if name == "top_k":
            count = helper.make_tensor(f"{_PREFIX}k", 7, [1], [int(size)])  # INT64
            graph.initializer.append(count)
            node = helper.make_node("TopK", [value, count.name], outputs, axis=axis)
        elif name == "argmax":
            node = helper.make_node("ArgMax", [value], outputs, axis=axis, keepdims=0)
        else:
            node = helper.make_node("Softmax", [value], outputs, axis=axis)
        node.name = f"{_PREFIX}{step}"
        graph.node.append(node)
        value = outputs[0]
    _replace_output(graph, appendix)


def _replace_output(graph: onnx.GraphProto, appendix: Appendix) -> None:
    """The new outputs in the place of the old one, so that their order is the signature's."""
    from onnx import helper

    from headrace.protocol.tensors import DATATYPES

    kept = list(graph.output)
    del graph.output[:]
    for value in kept:
        if value.name != appendix.source.name:
            graph.output.append(value)
            continue
        for spec in appendix.graph_outputs():
            shape = [
                spec.dimension(axis) or None if size == -1 else size
                for axis, size in enumerate(spec.shape)
            ]
            element_type = DATATYPES[spec.datatype].onnx
            graph.output.append(helper.make_tensor_value_info(spec.name, element_type, shape))
