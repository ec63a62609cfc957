"""Widening in NumPy, and the shapes that go with it."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.device.widening import Widening, source_shape, widen
from headrace.protocol.tensors import DATATYPES
from tests.support.widenings import CASES, expected, given


@pytest.mark.parametrize("name", CASES)
def test_numpy_widening_gives_expected_bits(name: str) -> None:
    """Multiplied, rounded, added, rounded."""
    case = CASES[name]
    source = given(case)
    target = np.empty(case.shape, DATATYPES[case.widening.target].dtype)

    widen(case.widening, source, target)

    assert target.tobytes() == expected(case, source).tobytes()


@pytest.mark.parametrize(
    ("source_channels", "target_channels", "shape", "travels"),
    [
        (3, 1, (-1, 3, 8, 9), (-1, 8, 9, 3)),
        (1, 3, (-1, 8, 9, 3), (-1, 3, 8, 9)),
        (1, 1, (-1, 3, 8, 9), (-1, 3, 8, 9)),
        (0, 0, (-1, 7), (-1, 7)),
    ],
)
def test_widening_moves_channels_with_shape(
    source_channels: int,
    target_channels: int,
    shape: tuple[int, ...],
    travels: tuple[int, ...],
) -> None:
    """The channels' size moves with them."""
    widening = Widening(
        "UINT8", "FP32", source_channels=source_channels, target_channels=target_channels
    )
    assert source_shape(widening, shape) == travels
