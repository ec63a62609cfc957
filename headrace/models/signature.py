"""Inputs and outputs of a model, as its file declares them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.errors import ConfigurationError
from headrace.protocol.messages import MAX_NAME_LENGTH, MAX_RANK
from headrace.protocol.tensors import DATATYPES

if TYPE_CHECKING:
    import onnx

_ONNX_DATATYPES = {datatype.onnx: name for name, datatype in DATATYPES.items()}

_LFS_POINTER = b"version https://git-lfs"

_GENERATED_NAME = re.compile(r"unk__\d+")
"""tf2onnx numbers the dimensions it has no name for; equal numbers are meaningless."""


class TensorSpec(NamedTuple):
    """One input or output of a model.

    Attributes:
        datatype: a name of the Open Inference Protocol, such as `FP32`.
        shape: -1 for a free dimension.
        dimensions: the model's names of its free dimensions, empty strings for unnamed ones; as
            long as `shape`, or empty if no dimension has a name.
        pad: padding value, see `headrace.models.inputs.padding`.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    dimensions: tuple[str, ...] = ()
    pad: float = 0

    def dimension(self, axis: int) -> str:
        """Return the model's name of one dimension, or an empty string."""
        return self.dimensions[axis] if self.dimensions else ""


class Signature(NamedTuple):
    """All inputs and outputs of a model.

    Attributes:
        batched: dimension 0 of every input and output is the batch.
        utf8: elements of `BYTES` inputs must be UTF-8, as ONNX strings are.
        unbatched_reason: why `batched` is false; empty if it is true.
        precision: the least precise datatype of the weights; inputs and outputs may hide it.
        buckets: sizes that free dimensions are padded to, ascending; empty: no padding.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool
    utf8: bool = False
    unbatched_reason: str = ""
    precision: str = "FP32"
    buckets: tuple[int, ...] = ()


def make_signature(
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    *,
    utf8: bool = False,
    precision: str = "FP32",
) -> Signature:
    """Make a signature, and determine whether dimension 0 is the batch.

    Raises:
        ConfigurationError: a name occurs twice, or there is no input or no output.
    """
    inputs, outputs = tuple(inputs), tuple(outputs)
    for kind, specs in (("inputs", inputs), ("outputs", outputs)):
        names = [spec.name for spec in specs]
        if not names:
            raise ConfigurationError(f"{kind}: expected at least one, got none")
        if len(set(names)) < len(names):
            raise ConfigurationError(f"{kind}: expected distinct names, got {', '.join(names)}")
    reason = _unbatched_reason(inputs, outputs)
    return Signature(inputs, outputs, not reason, utf8, reason, precision)


def without_batching(signature: Signature, reason: str) -> Signature:
    """Return the signature of a model whose dimension 0 turned out not to be the batch."""
    return signature._replace(batched=False, unbatched_reason=reason)


def read_onnx_signature(path: Path) -> Signature:
    """Check an ONNX file, and read its signature; tensors in other files are not read.

    Raises:
        ConfigurationError: the file cannot be read, is no valid model, or has an input or output
            whose type the protocol has no name for; the message names it.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except DecodeError as error:
        raise ConfigurationError(
            f"{path}: expected an ONNX model, got {_describe_unreadable_file(path, error)}"
        ) from error
    if not model.HasField("graph"):
        raise ConfigurationError(f"{path}: expected an ONNX model, got no graph")
    try:
        signature = _signature_of(model.graph)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    del model  # its weights, before the check reads them once more
    _check_model(path)
    return signature


def _signature_of(graph: onnx.GraphProto) -> Signature:
    constants = {tensor.name for tensor in graph.initializer}
    constants.update(tensor.values.name for tensor in graph.sparse_initializer)
    return make_signature(
        [_read_tensor(value, "input") for value in graph.input if value.name not in constants],
        [_read_tensor(value, "output") for value in graph.output],
        utf8=True,
        precision=_find_precision(graph),
    )


def _check_model(path: Path) -> None:
    """Check the graph, its operators of standard domains, and tensors in other files.

    ONNX Runtime says less about most faults, and only executors have it.

    Raises:
        ConfigurationError: it breaks a rule of ONNX.
    """
    import onnx

    try:
        onnx.checker.check_model(str(path))  # as a path: files beside it are checked, too
    except onnx.checker.ValidationError as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigurationError(f"{path}: expected a valid ONNX model: {first}") from error


def _describe_unreadable_file(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            return "a pointer of Git LFS; fetch the file with `git lfs pull`"
    return f"another file: {error}"


def _find_precision(graph: onnx.GraphProto) -> str:
    """Return the weights' datatype; converters to fp16 often keep fp32 inputs and outputs."""
    kept = {tensor.data_type for tensor in graph.initializer}
    return next((name for name in ("BF16", "FP16") if DATATYPES[name].onnx in kept), "FP32")


def _read_tensor(value: onnx.ValueInfoProto, kind: str) -> TensorSpec:
    _check_name(value.name, kind)
    where = f"{kind} {value.name}"
    what = value.type.WhichOneof("value")
    if what != "tensor_type":
        got = (what or "no type").removesuffix("_type")
        if got == "sequence":
            got += "; of scikit-learn's classifiers it is left out with the option zipmap=False"
        raise ConfigurationError(f"{where}: expected a dense tensor, got {got}")
    tensor = value.type.tensor_type
    datatype = _ONNX_DATATYPES.get(tensor.elem_type)
    if datatype is None:
        raise ConfigurationError(
            f"{where}: expected one of {', '.join(_ONNX_DATATYPES.values())}, "
            f"got {_element_type_name(tensor.elem_type)}"
        )
    if not tensor.HasField("shape"):
        raise ConfigurationError(f"{where}: expected a shape, got a tensor of unknown rank")
    dims = tensor.shape.dim
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims)
    if len(shape) > MAX_RANK:
        raise ConfigurationError(
            f"{where}: expected at most {MAX_RANK} dimensions, got {len(shape)}"
        )
    if min(shape, default=0) < -1:  # some exporters write -1 for a free one
        raise ConfigurationError(f"{where}: expected no negative dimension, got {list(shape)}")
    names = tuple("" if _GENERATED_NAME.fullmatch(dim.dim_param) else dim.dim_param for dim in dims)
    return TensorSpec(value.name, datatype, shape, names if any(names) else ())


def _check_name(name: str | bytes, kind: str) -> None:
    """Refuse a name that is not UTF-8, as in requests; protobuf accepts any bytes."""
    try:
        readable = isinstance(name, str) and bool(name.encode())
    except UnicodeEncodeError:
        readable = False
    if not readable or len(name) > MAX_NAME_LENGTH:
        raise ConfigurationError(
            f"{kind}: expected a name in UTF-8 of 1 to {MAX_NAME_LENGTH} characters, "
            f"got {name[:40]!r} of {len(name)}"
        )


def _element_type_name(element_type: int) -> str:
    import onnx

    try:
        return str(onnx.TensorProto.DataType.Name(element_type))
    except ValueError:
        return f"element type {element_type}"


def _unbatched_reason(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> str:
    """Return why dimension 0 cannot be the batch, or an empty string.

    Inputs whose dimensions 0 have different names have different numbers of rows. An output may
    have a name that no input has: exporters invent such names (`Gemmoutput_dim_0`). It may not have
    the name of another dimension of an input.
    """
    for spec in inputs + outputs:
        if not spec.shape:
            return f"{spec.name} is a scalar"
        if spec.shape[0] != -1:
            return f"dimension 0 of {spec.name} is fixed at {spec.shape[0]}"
    batch_names = {name for spec in inputs if (name := spec.dimension(0))}
    if len(batch_names) > 1:
        names = ", ".join(f"{spec.dimension(0) or '?'} of {spec.name}" for spec in inputs)
        return f"dimension 0 has different names: {names}"
    other_names = {name for spec in inputs for name in spec.dimensions[1:]}
    for spec in outputs:
        name = spec.dimension(0)
        if name and name not in batch_names and name in other_names:
            return f"dimension 0 of {spec.name} is {name}, which is not the inputs' dimension 0"
    other_names.update(name for spec in outputs for name in spec.dimensions[1:])
    if tied := batch_names & other_names:
        return f"{tied.pop()} is dimension 0 and another dimension as well"
    return ""
