"""Cases of widening that NumPy and the CUDA kernel are held to alike, and how they must come out.

The expected values are computed one element at a time, in double precision where that is exact:
a product of two 32-bit floats is, and so is its rounding; the sum is rounded once by NumPy's
scalar addition of 32-bit floats.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.device.widening import Widening, source_shape
from headrace.protocol.tensors import DATATYPES

SCALE = tuple(float(np.float32(1 / (255 * std))) for std in (0.229, 0.224, 0.225))
OFFSET = tuple(
    float(np.float32(-mean / std))
    for mean, std in zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)
)


class Case(NamedTuple):
    """A widening, and the shape of the model's input, the batch included."""

    widening: Widening
    shape: tuple[int, ...]


CASES = {
    "bytes to floats": Case(Widening("UINT8", "FP32"), (3, 5)),
    "scaled": Case(Widening("UINT8", "FP32", (1 / 255,), (-0.5,)), (4, 7)),
    "NHWC to NCHW by channel": Case(
        Widening("UINT8", "FP32", SCALE, OFFSET, source_channels=3, target_channels=1), (2, 3, 4, 5)
    ),
    "NCHW by channel": Case(
        Widening("UINT8", "FP32", SCALE, OFFSET, source_channels=1, target_channels=1), (2, 3, 4, 5)
    ),
    "NHWC by channel": Case(
        Widening("UINT8", "FP32", SCALE, OFFSET, source_channels=3, target_channels=3), (2, 4, 5, 3)
    ),
    "NCHW to NHWC": Case(
        Widening("UINT8", "FP32", source_channels=1, target_channels=3), (2, 4, 5, 3)
    ),
    "half to floats": Case(Widening("FP16", "FP32"), (2, 9)),
    "half scaled": Case(Widening("FP16", "FP32", (0.1,), (3.0,)), (2, 9)),
    "bfloat16 to floats": Case(Widening("BF16", "FP32", (2.0,), (0.1,)), (2, 9)),
    "bytes to half": Case(
        Widening("UINT8", "FP16", SCALE, OFFSET, source_channels=3, target_channels=1), (2, 3, 4, 5)
    ),
    "bytes to bfloat16": Case(
        Widening("UINT8", "BF16", SCALE, OFFSET, source_channels=3, target_channels=1), (2, 3, 4, 5)
    ),
    "floats scaled": Case(Widening("FP32", "FP32", (0.3,), (0.7,)), (3, 3)),
}


def given(case: Case) -> NDArray[Any]:
    """Values of all kinds that a source can have, the same each time."""
    shape = source_shape(case.widening, case.shape)
    random = np.random.default_rng(7)
    if case.widening.source == "UINT8":
        return random.integers(0, 256, shape, dtype=np.uint8)
    values = random.normal(0, 100, shape)
    return values.astype(DATATYPES[case.widening.source].dtype)


def expected(case: Case, source: NDArray[Any]) -> NDArray[Any]:
    """Return the widened values, computed one element at a time."""
    widening = case.widening
    target = np.empty(case.shape, DATATYPES[widening.target].dtype)
    for place in np.ndindex(*case.shape):
        channel = place[widening.target_channels] if widening.target_channels else 0
        at = list(place)
        if widening.source_channels != widening.target_channels:
            at.insert(widening.source_channels, at.pop(widening.target_channels))
        scale = np.float32(widening.scale[channel if len(widening.scale) > 1 else 0])
        offset = np.float32(widening.offset[channel if len(widening.offset) > 1 else 0])
        product = np.float32(float(source[tuple(at)]) * float(scale))
        target[place] = np.float32(product + offset)
    return target
