"""Positions of views in the value that they are views of."""

from __future__ import annotations

import numpy as np

from headrace.primitives.bounded_cache import BoundedCache
from headrace.tuning import TUNING

_TUNING = TUNING.protocol
_starts: BoundedCache[tuple[int, int], int] = BoundedCache(_TUNING.cached_tensor_positions)
"""Cache of a tensor's position by the sizes of value and tensor: most values are alike."""


def start_in(value: bytes | memoryview, content: bytes | memoryview) -> int:
    """Return the position of `content` in `value`; -1 if it is not a view of it.

    Comparing a few bytes at the cached position is faster than reading memory addresses.
    """
    size = len(content)
    if not size:
        return 0
    lengths = len(value), size
    guess = _starts.get(lengths, -1)
    if (
        guess >= 0
        and size <= _TUNING.compared_tensor_bytes
        and isinstance(value, bytes)
        and value.startswith(content, guess)
    ):
        return guess
    # The value is alive, so an address within its memory belongs to a view of it.
    start = address_of(content) - address_of(value)
    if not 0 <= start <= len(value) - size:
        return -1
    return _starts.add(lengths, start)


def address_of(content: memoryview | bytes) -> int:
    """Return the address of bytes in memory."""
    address: int = np.frombuffer(content, np.uint8).__array_interface__["data"][0]
    return address
