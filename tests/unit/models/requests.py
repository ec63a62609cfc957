"""Requests in a line, for the tests of what checks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import Code, Rejected
from headrace.models.inputs.binding import Binder, Bound
from headrace.models.signature import TensorSpec
from headrace.protocol.messages import InputTensor
from headrace.protocol.tensors import from_array


def tensor(
    name: str, array: NDArray[Any], *, shape: Sequence[int] | None = None, datatype: str = ""
) -> InputTensor:
    """An input made of an array; shape and datatype may lie about it."""
    made = from_array(name, array)
    return InputTensor(
        name=name,
        datatype=datatype or made.datatype,
        shape=list(made.shape if shape is None else shape),
        data=memoryview(made.data),
    )


def zeros(name: str, *shape: int, dtype: Any = np.float32) -> InputTensor:
    """An input of zeros."""
    return tensor(name, np.zeros(shape, dtype))


def spec(
    name: str, datatype: str, shape: Sequence[int], dimensions: Sequence[str] = ()
) -> TensorSpec:
    """A part of a signature."""
    return TensorSpec(name, datatype, tuple(shape), tuple(dimensions))


def refusal(binder: Binder, *inputs: InputTensor) -> tuple[Code, str]:
    """The code and the message with which these inputs are refused."""
    try:
        bound: Bound = binder.bind(inputs)
    except Rejected as error:
        return error.code, error.message
    raise AssertionError(f"expected a refusal, got {bound}")
