"""Widening: convert 8- or 16-bit payloads to the model's input: scale, shift and reorder them.

    target = source x scale + offset

computed in 32-bit floats, each step rounded to nearest, for any source and target; so this code, in
NumPy, and the kernel in `headrace.device.cuda` give the same bits. For `(x / 255 - mean) / std`
the scale is `1 / (255 std)` and the offset `-mean / std`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SOURCES = ("UINT8", "FP16", "BF16", "FP32")
TARGETS = ("FP32", "FP16", "BF16")


class Widening(NamedTuple):
    """The conversion of one input from its payload.

    Attributes:
        source, target: datatypes of the protocol, one of `SOURCES` and of `TARGETS`.
        scale, offset: one value, or one for each channel.
        source_channels, target_channels: the channel axis, where axis 0 is the batch; 0 if there
            are no channels. If they differ, the channels are moved.
    """

    source: str
    target: str
    scale: tuple[float, ...] = (1.0,)
    offset: tuple[float, ...] = (0.0,)
    source_channels: int = 0
    target_channels: int = 0

    @property
    def is_plain(self) -> bool:
        """True if values are converted, but neither scaled nor shifted."""
        return set(self.scale) == {1.0} and set(self.offset) == {0.0}


def source_shape(widening: Widening, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the payload's shape for an input of this shape; dimensions may be -1."""
    if widening.source_channels == widening.target_channels:
        return shape
    sizes = list(shape)
    sizes.insert(widening.source_channels, sizes.pop(widening.target_channels))
    return tuple(sizes)


def widen(widening: Widening, source: NDArray[Any], target: NDArray[Any]) -> None:
    """Fill the model's input.

    Args:
        widening: the conversion.
        source: array of the source datatype, in `source_shape` of the target's shape.
        target: array of the target datatype.
    """
    if widening.source_channels != widening.target_channels:
        source = np.moveaxis(source, widening.source_channels, widening.target_channels)
    if widening.is_plain:
        np.copyto(target, source, casting="unsafe")
        return
    wide = target if target.dtype == np.float32 else np.empty(target.shape, np.float32)
    scale = _broadcast_along(widening.scale, widening.target_channels, target.ndim)
    offset = _broadcast_along(widening.offset, widening.target_channels, target.ndim)
    np.multiply(source, scale, out=wide, dtype=np.float32, casting="unsafe")
    np.add(wide, offset, out=wide)
    if wide is not target:
        np.copyto(target, wide, casting="unsafe")


def _broadcast_along(values: tuple[float, ...], axis: int, rank: int) -> NDArray[np.float32]:
    """Return the values as an array that broadcasts along the channel axis."""
    array = np.array(values, np.float32)
    return (
        array if len(values) == 1 else array.reshape([-1 if n == axis else 1 for n in range(rank)])
    )
