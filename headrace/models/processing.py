"""Pre- and postprocessing from `model.toml`: the request-side signature and the model's own.

Requests may carry an input in a smaller datatype or another channel layout than the model's, and
may get softmax, the top classes or their labels instead of a raw output. Ingest checks requests
against the resulting signature; the backend converts one into the other.

Softmax, top-k and argmax are nodes that are appended to the model's graph at load. They run with
the model, on every execution provider, and only the small results leave the device. Labels are
looked up on the host afterwards: devices do not hold strings, and a lookup inside the graph would
cut it in two.

Operators: https://onnx.ai/onnx/operators (Softmax, ArgMax, TopK), along the last axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.device.widening import TARGETS, Widening, source_shape
from headrace.errors import ConfigurationError
from headrace.models.config import ModelConfig, Preprocess
from headrace.models.signature import Signature, TensorSpec, make_signature

if TYPE_CHECKING:
    import onnx


OLDEST_OPSET = 11
"""Oldest opset of the default domain in which the operators have the form used here."""
_FLOATS = ("FP16", "BF16", "FP32", "FP64")
_PREFIX = "headrace/"
"""Name prefix of the appended nodes and values; no exporter uses it."""


class Appendix(NamedTuple):
    """Nodes appended to one output of a model.

    Attributes:
        source: the output as in the model's file.
        steps: `softmax`, `argmax` or `top_k:N`; the outputs are those of the last step.
        labels: one per index along the last axis; empty: no labels are wanted.
    """

    source: TensorSpec
    steps: tuple[str, ...]
    labels: tuple[bytes, ...] = ()

    @property
    def top_k(self) -> int:
        """N of a final step `top_k:N`; otherwise 0."""
        name, _, number = self.steps[-1].partition(":")
        return int(number) if name == "top_k" else 0

    @property
    def indices(self) -> str:
        """Name of the output with the indices to label; empty if there are no indices."""
        if self.top_k:
            return f"{self.source.name}_indices"
        return f"{self.source.name}_argmax" if self.steps[-1] == "argmax" else ""

    @property
    def labelled(self) -> str:
        """Name of the output with the labels; empty if there is none."""
        return f"{self.source.name}_labels" if self.labels else ""

    def graph_outputs(self) -> list[TensorSpec]:
        """Return the graph's outputs that replace the source."""
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
        """Return the graph's outputs, and the labels."""
        outputs = self.graph_outputs()
        if self.labels:
            outputs.append(outputs[-1]._replace(name=self.labelled, datatype="BYTES"))
        return outputs

    def look_up_labels(self, indices: NDArray[Any]) -> NDArray[Any]:
        """Return the labels of indices of any shape, as an object array of bytes."""
        labels: NDArray[Any] = np.array(self.labels, dtype=object)
        # Indexing by a scalar would return the label itself instead of an array.
        return np.asarray(labels[indices], dtype=object)


def plan_appendix(
    signature: Signature, steps: Sequence[str], output: str, labels: Sequence[bytes]
) -> Appendix:
    """Check that the steps fit an output, and return them as an appendix.

    Args:
        signature: as in the model's file.
        steps: `postprocess` of `model.toml`.
        output: name of the output; empty: the only one.
        labels: see `read_labels`.

    Raises:
        ConfigurationError: there is no such output, or the steps do not fit it.
    """
    source = _find_output(signature, output)
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


def _find_output(signature: Signature, output: str) -> TensorSpec:
    names = {spec.name: spec for spec in signature.outputs}
    if not output and len(names) == 1:
        return signature.outputs[0]
    if output not in names:
        raise ConfigurationError(
            f"postprocess_output: expected one of {', '.join(names)}, got {output or 'none'}"
        )
    return names[output]


def with_appendix(signature: Signature, appendix: Appendix) -> Signature:
    """Return the signature with the appended outputs instead of the source.

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
    """Return the lines of a file with labels. Raises `ConfigurationError`, see `read_beside`."""
    return tuple(line.encode() for line in read_lines(directory, name, "labels"))


def read_lines(directory: Path, name: str, what: str) -> list[str]:
    """Return the lines of a file, without spaces around them; see `read_beside`.

    `splitlines` would end them at further characters, such as U+2028, and shift all that follow.
    """
    text = read_beside(directory, name, what)
    return [line.strip() for line in text.removesuffix("\n").split("\n")] if text else []


def read_beside(directory: Path, name: str, what: str) -> str:
    """Return the text of a file in a version's directory or, failing that, beside `model.toml`.

    Args:
        directory: of the version.
        name: name of the file.
        what: the key that names the file, for messages.

    Raises:
        ConfigurationError: the file is in neither directory, lies outside of them, or is not UTF-8.
    """
    places = (directory / name, directory.parent / name)
    for path in places:
        try:
            if not path.is_file():
                continue
        except OSError as error:
            raise ConfigurationError(f"{what}: {error.strerror}: {name:.100}...") from error
        # Resolved, because a symbolic link can lead outside just as ".." can.
        inside = (directory.resolve(), directory.parent.resolve())
        if not any(path.resolve().is_relative_to(each) for each in inside):
            raise ConfigurationError(
                f"{what}: expected a file in the model's directory {inside[1]}, "
                f"got {path.resolve()}"
            )
        try:
            return path.read_text(encoding="utf-8-sig")  # editors may write a mark before it
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path}: {error}") from error
    raise ConfigurationError(f"{what}: expected a file {places[0]} or {places[1]}, got none")


def read_output_labels(
    directory: Path, files: Mapping[str, str], signature: Signature
) -> dict[str, tuple[bytes, ...]]:
    """Return the labels of each output that has a file in `output_labels`.

    Raises:
        ConfigurationError: there is no such output, it has no numbers, or another number of
            elements in a row; or see `read_labels`.
    """
    specs = {spec.name: spec for spec in signature.outputs}
    labels: dict[str, tuple[bytes, ...]] = {}
    for name, file in files.items():
        where = f"output_labels.{name}"
        if name not in specs:
            raise ConfigurationError(f"{where}: expected one of {', '.join(specs)}")
        spec = specs[name]
        if spec.datatype in ("BOOL", "BYTES"):
            raise ConfigurationError(
                f"{where}: expected an output of numbers, got one of {spec.datatype}"
            )
        try:
            labels[name] = read_labels(directory, file)
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from error
        dimensions = spec.shape[1:] if signature.batched else spec.shape
        classes = math.prod(dimensions)
        if -1 not in dimensions and classes != len(labels[name]):
            raise ConfigurationError(f"{where}: expected {classes} lines, got {len(labels[name])}")
    return labels


def append_nodes(model: onnx.ModelProto, appendix: Appendix) -> None:
    """Append the nodes to a model in place; tensors in other files are not read.

    Raises:
        ConfigurationError: the model's opset is too old.
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
    """Put the new outputs where the old one was, so that the order matches the signature."""
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


_CHANNELS = {None: 0, "NCHW": 1, "NHWC": 3}
"""Axis of the channels, by layout."""


class Processing(NamedTuple):
    """The model-side and the request-side signature of a model, and the conversions between them.

    Attributes:
        own: inputs and outputs of the session, including what is appended to the graph.
        signature: inputs and outputs that requests see.
        widenings: input conversions, by input name.
        appendix: nodes appended to the graph; None if there are none.
    """

    own: Signature
    signature: Signature
    widenings: Mapping[str, Widening]
    appendix: Appendix | None


def plan_processing(found: Signature, config: ModelConfig, directory: Path) -> Processing:
    """Apply `preprocess`, `postprocess`, `labels` and `transform.tokens.decode`.

    Args:
        found: the signature as the model's file says it.
        config: configuration of the model.
        directory: directory of the version.

    Raises:
        ConfigurationError: they do not fit the model; each message names the key.
    """
    own, seen, appendix = found, found, None
    if config.postprocess:
        labels = read_labels(directory, config.labels) if config.labels else ()
        appendix = plan_appendix(found, config.postprocess, config.postprocess_output, labels)
        own = with_appendix(found, appendix._replace(labels=()))
        seen = with_appendix(found, appendix)
    widenings = _plan_widenings(found, config.preprocess)
    if widenings:
        inputs = [_make_request_spec(spec, widenings.get(spec.name)) for spec in found.inputs]
        seen = make_signature(inputs, seen.outputs, utf8=seen.utf8, precision=seen.precision)
    if config.decoded:
        seen = _with_texts(seen, config.decoded)
    return Processing(own, seen, widenings, appendix)


def name_texts(output: str) -> str:
    """Return the name of the output with the texts of one with ids."""
    return f"{output}_text"


def _with_texts(signature: Signature, output: str) -> Signature:
    """Return the signature with the texts of an output with ids beside it."""
    source = next((spec for spec in signature.outputs if spec.name == output), None)
    if source is None or len(source.shape) != 2 or source.datatype not in ("INT64", "INT32"):
        got = ", ".join(f"{s.name} {s.datatype} {list(s.shape)}" for s in signature.outputs)
        raise ConfigurationError(
            f"transform.tokens.decode: expected an output of 2 dimensions in INT64 or INT32, "
            f"got {got}"
        )
    texts = TensorSpec(name_texts(output), "BYTES", source.shape[:1], source.dimensions[:1])
    return make_signature(
        signature.inputs,
        [*signature.outputs, texts],
        utf8=signature.utf8,
        precision=signature.precision,
    )


def _plan_widenings(found: Signature, preprocess: Mapping[str, Preprocess]) -> dict[str, Widening]:
    specs = {spec.name: spec for spec in found.inputs}
    if unknown := preprocess.keys() - specs.keys():
        raise ConfigurationError(
            f"preprocess: expected some of {', '.join(specs)}, got {', '.join(sorted(unknown))}"
        )
    return {name: _make_widening(specs[name], each) for name, each in preprocess.items()}


def _make_widening(spec: TensorSpec, preprocess: Preprocess) -> Widening:
    where = f"preprocess.{spec.name}"
    if spec.datatype not in TARGETS:
        raise ConfigurationError(
            f"{where}: expected an input of {', '.join(TARGETS)}, got {spec.datatype}"
        )
    if preprocess.layout and len(spec.shape) != 4:
        raise ConfigurationError(f"{where}.layout: expected 4 dimensions, got {list(spec.shape)}")
    source, target = _CHANNELS[preprocess.layout], _CHANNELS[preprocess.model_layout]
    channels = spec.shape[target] if target else 1
    for key, values in (("scale", preprocess.scale), ("offset", preprocess.offset)):
        if len(values) not in (1, channels):
            raise ConfigurationError(
                f"{where}.{key}: expected 1 value or one for each of {channels} channels, "
                f"got {len(values)}"
            )
    return Widening(
        preprocess.datatype, spec.datatype, preprocess.scale, preprocess.offset, source, target
    )


def _make_request_spec(spec: TensorSpec, widening: Widening | None) -> TensorSpec:
    if widening is None:
        return spec
    order = source_shape(widening, tuple(range(len(spec.shape))))
    return TensorSpec(
        spec.name,
        widening.source,
        tuple(spec.shape[axis] for axis in order),
        tuple(spec.dimensions[axis] for axis in order) if spec.dimensions else (),
    )


def read_in_version(directory: Path, name: str, what: str) -> bytes:
    """Return the content of a file in a version's directory, which its manifest covers.

    Args:
        directory: of the version.
        name: name of the file.
        what: the key that names the file, for messages.

    Raises:
        ConfigurationError: it is not there, or lies outside of the directory.
    """
    path = directory / name
    try:
        if not path.resolve().is_relative_to(directory.resolve()):
            raise ConfigurationError(
                f"{what}: expected a file in the version's directory, got {path.resolve()}"
            )
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{what}: {path}: {error.strerror}") from error
