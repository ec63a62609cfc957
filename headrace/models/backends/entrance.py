"""Conversion of request inputs to the model's inputs, as configured in `preprocess`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.device.widening import Widening, widen
from headrace.models.backends.port import Arrays, Placed
from headrace.models.signature import Signature
from headrace.protocol.tensors import DATATYPES


class Entrance:
    """Reused memory of the model's own inputs, which every run overwrites.

    Args:
        own: the model's signature.
        widenings: by input name; other inputs are passed unchanged.
    """

    def __init__(self, own: Signature, widenings: Mapping[str, Widening]) -> None:
        self._widenings = widenings
        self._memory = {name: np.empty(0, np.uint8) for name in widenings}
        self._own = own

    def widen(self, inputs: Arrays) -> Arrays:
        """Return the model's inputs. `Placed` inputs always give the same `Placed` object."""
        if not isinstance(inputs, Placed):
            wide = self._place(inputs)
        elif inputs.bound is None:
            wide = inputs.bound = self._place(inputs)
        else:
            wide = inputs.bound
        for name, widening in self._widenings.items():
            widen(widening, inputs[name], wide[name])
        return wide if isinstance(inputs, Placed) else dict(wide)

    def _place(self, inputs: Arrays) -> Placed:
        """Return arrays with the shapes of the converted inputs."""
        wide = Placed()
        for spec in self._own.inputs:
            given = inputs[spec.name]
            widening = self._widenings.get(spec.name)
            if widening is None:
                wide[spec.name] = given
                continue
            shape = _target_shape(widening, given.shape)
            wide[spec.name] = self._array(spec.name, DATATYPES[spec.datatype].dtype, shape)
        return wide

    def _array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        size_bytes = math.prod(shape) * dtype.itemsize
        if self._memory[name].size < size_bytes:
            # Arrays that were returned earlier keep their memory.
            self._memory[name] = np.empty(size_bytes, np.uint8)
        return self._memory[name][:size_bytes].view(dtype).reshape(shape)


def _target_shape(widening: Widening, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = list(shape)
    sizes.insert(widening.target_channels, sizes.pop(widening.source_channels))
    return tuple(sizes)
