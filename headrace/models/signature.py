"""What a model takes and gives, and the check of a request against it."""

from __future__ import annotations

from typing import NamedTuple


class TensorSpec(NamedTuple):
    """One input or output of a model.

    Attributes:
        datatype: a name of the Open Inference Protocol, such as `FP32`.
        shape: -1 where a dimension is free.
        dimensions: the model's own names of its free dimensions, empty where there is none.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    dimensions: tuple[str, ...] = ()


class Signature(NamedTuple):
    """All inputs and outputs of a model.

    Attributes:
        batched: dimension 0 of every input and output is the batch.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool
