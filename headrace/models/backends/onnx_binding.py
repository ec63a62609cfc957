"""ONNX Runtime inputs and outputs bound by address, once per batch size.

A run with everything bound costs two thirds of one with arrays in and out, which repeats checks and
conversions each time. Outputs can be bound if their shapes are fixed, and are copied out of the
bound memory after the run, since the next run overwrites it. Large outputs are not bound: for them
the copy costs more than the binding saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.models.backends.port import Arrays, Placed
from headrace.models.signature import Signature, TensorSpec
from headrace.protocol.tensors import DATATYPES
from headrace.tuning import TUNING

UNBOUND: Final = "not bound"
"""Stored instead of a binding if binding is not possible."""


class Binding(NamedTuple):
    """A binding of ONNX Runtime, and the arrays at the bound output addresses."""

    binding: Any
    outputs: dict[str, NDArray[Any]]


class Outlets:
    """Memory for a session's outputs. Runs are sequential, so all sizes share it.

    Args:
        signature: of the model.
        max_bytes: outputs of a run that are larger in total are not bound.
    """

    def __init__(
        self, signature: Signature, max_bytes: int = TUNING.models.max_bound_output_bytes
    ) -> None:
        self._signature = signature
        self._max_bytes = max_bytes
        self._memory = [np.empty(0, np.uint8) for _ in signature.outputs]

    def bind(self, session: Any, inputs: Placed, outputs: Arrays) -> Binding | str:
        """Bind a run's inputs, and outputs like those of its unbound run; `UNBOUND` if impossible.

        Args:
            session: of ONNX Runtime, on the CPU.
            inputs: inputs of the run.
            outputs: outputs of the run.
        """
        specs = self._signature.outputs
        fixed = all(_is_fixed(spec, outputs[spec.name]) for spec in specs)
        if not fixed or sum(array.nbytes for array in outputs.values()) > self._max_bytes:
            return UNBOUND
        binding = session.io_binding()
        for spec in self._signature.inputs:
            binding.bind_ortvalue_input(spec.name, _value(spec, inputs[spec.name]))
        bound: dict[str, NDArray[Any]] = {}
        for position, spec in enumerate(specs):
            array = bound[spec.name] = self._place(position, outputs[spec.name])
            binding.bind_ortvalue_output(spec.name, _value(spec, array))
        return Binding(binding, bound)

    def _place(self, position: int, like: NDArray[Any]) -> NDArray[Any]:
        if self._memory[position].size < like.nbytes:
            # Earlier bindings keep their memory.
            self._memory[position] = np.empty(like.nbytes, np.uint8)
        memory = self._memory[position][: like.nbytes]
        return memory.view(like.dtype).reshape(like.shape)


def bind_blocks(
    session: Any,
    own: Signature,
    device: str,
    rows: int,
    addresses: tuple[Mapping[str, int], Mapping[str, int]],
) -> Any:
    """Return a binding to device memory. ONNX Runtime does not keep that memory alive.

    Args:
        session: of ONNX Runtime.
        own: the session's inputs and outputs, with fixed shapes except for the batch.
        device: such as `cpu` or `cuda:0`.
        rows: number of rows of each tensor.
        addresses: of the inputs and of the outputs, by name.
    """
    kind, _, number = device.partition(":")
    inputs, outputs = addresses
    binding = session.io_binding()
    for specs, places, bind in (
        (own.inputs, inputs, binding.bind_input),
        (own.outputs, outputs, binding.bind_output),
    ):
        for spec in specs:
            element_type = DATATYPES[spec.datatype].onnx
            shape = [rows, *spec.shape[1:]]
            bind(spec.name, kind, int(number or 0), element_type, shape, places[spec.name])
    return binding


def _is_fixed(spec: TensorSpec, array: NDArray[Any]) -> bool:
    """Return whether the output's size follows from its declaration, whatever the inputs are."""
    fits = spec.shape[1:] == array.shape[1:] and spec.shape[:1] in ((-1,), array.shape[:1])
    return fits and bool(DATATYPES[spec.datatype].itemsize)


def _value(spec: TensorSpec, array: NDArray[Any]) -> Any:
    """Return an OrtValue on an array's memory; ONNX Runtime does not know NumPy's bfloat16."""
    from onnxruntime import OrtValue

    raw = array.view(np.uint16) if spec.datatype == "BF16" else array
    return OrtValue.ortvalue_from_numpy_with_onnx_type(raw, DATATYPES[spec.datatype].onnx)
