"""Widening: what travels as 8 or 16 bits becomes the model's input, scaled, shifted and reordered.

    target = source x scale + offset

computed in 32-bit floats, each step rounded to nearest, whatever the source and the target are;
so this, in NumPy, and the kernel in `headrace.device.kernels` give the same bits. Of
`(x / 255 - mean) / std` the scale is `1 / (255 std)` and the offset `-mean / std`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SOURCES = ("UINT8", "FP16", "BF16", "FP32")
TARGETS = ("FP32", "FP16", "BF16")


class Widening(NamedTuple):
    """How one input is made of what travels.

    Attributes:
        source, target: datatypes of the protocol, one of `SOURCES` and of `TARGETS`.
        scale, offset: one value, or one for each channel.
        source_channels, target_channels: which axis is the channels', the batch being axis 0; 0
            where there are none. Where they differ, the channels move.
    """

    source: str
    target: str
    scale: tuple[float, ...] = (1.0,)
    offset: tuple[float, ...] = (0.0,)
    source_channels: int = 0
    target_channels: int = 0

    @property
    def is_plain(self) -> bool:
        """Values are converted, and neither scaled nor shifted."""
        return set(self.scale) == {1.0} and set(self.offset) == {0.0}


def source_shape(widening: Widening, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what travels, for an input of this shape; dimensions may be -1."""
    if widening.source_channels == widening.target_channels:
        return shape
    sizes = list(shape)
    sizes.insert(widening.source_channels, sizes.pop(widening.target_channels))
    return tuple(sizes)


def widen(widening: Widening, source: NDArray[Any], target: NDArray[Any]) -> None:
    """Fill the model's input.

    Args:
        widening: how.
        source: of its source datatype, and of `source_shape` of the target's shape.
        target: of its target datatype.
    """
    if widening.source_channels != widening.target_channels:
        source = np.moveaxis(source, widening.source_channels, widening.target_channels)
    if widening.is_plain:
        np.copyto(target, source, casting="unsafe")
        return
    wide = target if target.dtype == np.float32 else np.empty(target.shape, np.float32)
    scale = _along(widening.scale, widening.target_channels, target.ndim)
    offset = _along(widening.offset, widening.target_channels, target.ndim)
    np.multiply(source, scale, out=wide, dtype=np.float32, casting="unsafe")
    np.add(wide, offset, out=wide)
    if wide is not target:
        np.copyto(target, wide, casting="unsafe")


def _along(values: tuple[float, ...], axis: int, rank: int) -> NDArray[np.float32]:
    """Values that broadcast along the axis of the channels."""
    array = np.array(values, np.float32)
    return (
        array if len(values) == 1 else array.reshape([-1 if n == axis else 1 for n in range(rank)])
    )
