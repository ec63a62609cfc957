"""Inputs and outputs of ONNX Runtime bound by address, once for each size of batch.

A run with everything bound costs two thirds of one with arrays in and out, whose checks and
conversions are made anew each time. Outputs can be bound where their shapes are fixed, and are
copied out of the bound memory after the run, since the next one overwrites it. Large ones are not
bound: for them the copy costs more than the binding saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.models.backend import Arrays, Placed
from headrace.models.signature import Signature, TensorSpec
from headrace.protocol.tensors import DATATYPES

LARGEST_OUTPUTS_BYTES = 65536

UNBOUND: Final = "not bound"
"""In place of a binding, where there cannot be one."""


class Binding(NamedTuple):
    """Addresses that ONNX Runtime knows, and the arrays that lie there."""

    binding: Any
    outputs: dict[str, NDArray[Any]]


class Outlets:
    """The memory for a session's outputs. Its runs follow one another, so all sizes share it.

    Args:
        signature: of the model.
    """

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._memory = [np.empty(0, np.uint8) for _ in signature.outputs]

    def bind(self, session: Any, inputs: Placed, outputs: Arrays) -> Binding | str:
        """Bind a run's inputs, and outputs like those that it had without; `UNBOUND` otherwise.

        Args:
            session: of ONNX Runtime, on the CPU.
            inputs: which ran.
            outputs: of that run.
        """
        specs = self._signature.outputs
        fixed = all(_is_fixed(spec, outputs[spec.name]) for spec in specs)
        if not fixed or sum(array.nbytes for array in outputs.values()) > LARGEST_OUTPUTS_BYTES:
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
            # Bindings that were made before keep the memory that they know.
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
    """A binding to memory of the device's. ONNX Runtime keeps nothing of it alive.

    Args:
        session: of ONNX Runtime.
        own: what it takes and gives, of fixed shapes besides the batch.
        device: such as `cpu` or `cuda:0`.
        rows: of each tensor.
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
    """Of the size that its declaration says, whatever the values of the inputs."""
    fits = spec.shape[1:] == array.shape[1:] and spec.shape[:1] in ((-1,), array.shape[:1])
    return fits and bool(DATATYPES[spec.datatype].itemsize)


def _value(spec: TensorSpec, array: NDArray[Any]) -> Any:
    """ONNX Runtime's view of an array; NumPy has no bfloat16 that it knows."""
    from onnxruntime import OrtValue

    raw = array.view(np.uint16) if spec.datatype == "BF16" else array
    return OrtValue.ortvalue_from_numpy_with_onnx_type(raw, DATATYPES[spec.datatype].onnx)
