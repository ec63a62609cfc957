"""Plan a model's ring: its size, and the row counts that its runs are bound for."""

from __future__ import annotations

import math

from headrace.models.processing import Adaptation
from headrace.models.signature import TensorSpec
from headrace.protocol.tensors import DATATYPES
from headrace.services.executor.ring import RingPlan, TensorPlan
from headrace.tuning import ExecutorTuning


def buckets(max_rows: int, tuning: ExecutorTuning) -> tuple[int, ...]:
    """Return the row counts that runs are bound for: 1 to 4, every fourth, and the largest.

    A batch is padded to the next bucket.
    """
    exact, step = tuning.ring_exact_rows, tuning.ring_step_rows
    sizes = {*range(1, min(exact, max_rows) + 1), *range(exact, max_rows, step), max_rows}
    return tuple(sorted(sizes))


def plan_ring(adaptation: Adaptation, max_rows: int, slots: int) -> RingPlan | None:
    """Return the plan of a model's ring; None if it is not batched or has dynamic sizes."""
    own = adaptation.own
    if not own.batched or not all(_is_fixed(spec) for spec in own.inputs + own.outputs):
        return None
    travelling = {spec.name: spec for spec in adaptation.signature.inputs}
    inputs = tuple(
        TensorPlan(
            spec.name,
            _row_bytes(travelling[spec.name]),
            _row_bytes(spec),
            adaptation.widenings.get(spec.name),
            spec.shape[1:],
        )
        for spec in own.inputs
    )
    outputs = tuple(
        TensorPlan(spec.name, _row_bytes(spec), _row_bytes(spec)) for spec in own.outputs
    )
    return RingPlan(inputs, outputs, max_rows, slots)


def _is_fixed(spec: TensorSpec) -> bool:
    return -1 not in spec.shape[1:] and bool(DATATYPES[spec.datatype].itemsize)


def _row_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape[1:]) * DATATYPES[spec.datatype].itemsize
