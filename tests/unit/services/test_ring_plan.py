"""Buckets, and how large a ring is."""

from __future__ import annotations

import pytest

from headrace.device.widening import Widening
from headrace.models.processing import Processing
from headrace.models.signature import Signature, TensorSpec, make_signature
from headrace.services.executor.device.ring import RingPlan, TensorPlan, buckets, plan_ring
from headrace.tuning import TUNING


@pytest.mark.parametrize(
    ("max_rows", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (4, (1, 2, 3, 4)),
        (6, (1, 2, 3, 4, 6)),
        (16, (1, 2, 3, 4, 8, 12, 16)),
        (30, (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 30)),
    ],
)
def test_ring_buckets_grow_in_small_steps(max_rows: int, expected: tuple[int, ...]) -> None:
    """Each number up to four, then every fourth, and the largest batch."""
    assert buckets(max_rows, TUNING.executor) == expected


def processing(output: TensorSpec) -> Processing:
    """Bytes [2, 3] that the model takes as floats, and one output."""
    own = make_signature([TensorSpec("x", "FP32", (-1, 2, 3))], [output])
    seen = Signature((TensorSpec("x", "UINT8", (-1, 2, 3)),), own.outputs, own.batched)
    return Processing(own, seen, {"x": Widening("UINT8", "FP32")}, None)


def test_copied_rows_are_smaller_than_models_rows() -> None:
    """The slots hold the one, the model's input the other."""
    plan = plan_ring(processing(TensorSpec("y", "FP32", (-1, 5))), max_rows=8, slots=3)
    widened = TensorPlan("x", 6, 24, Widening("UINT8", "FP32"), (2, 3))
    assert plan == RingPlan((widened,), (TensorPlan("y", 20, 20),), 8)


@pytest.mark.parametrize(
    "output",
    [
        TensorSpec("y", "FP32", (-1, -1)),
        TensorSpec("y", "BYTES", (-1, 5)),
        TensorSpec("y", "FP32", (4, 5)),
    ],
    ids=["free", "strings", "no batch"],
)
def test_model_of_unknown_sizes_has_no_ring(output: TensorSpec) -> None:
    """A model without a batch dimension has no ring either."""
    assert plan_ring(processing(output), max_rows=8, slots=3) is None
