"""The ring: the order in which batches are copied to a device, computed, and copied back.

It has three slots. While batch k computes, the rows of k+1 are copied in and the results of k-1
are copied out, each on its own stream:

    loop         gathers the rows into the slot's host blocks
    copy-in      host → staged                                        · records *landed*
    compute      waits for *landed*; staged → the model's input; the
                 model; the model's output → results                  · records *computed*
    copy-out     waits for *computed*; results → answers              · records *ready*
    completion   waits for *ready*
    loop         takes the answers, and releases the slot

The model's own input and output have one fixed address each, for all slots, because a CUDA graph
is captured with addresses. Only the compute stream reads and writes them, which orders the
accesses. All other blocks belong to a slot, and a slot is filled again only after the completion
thread has waited for *ready*, which comes after every operation on its blocks. See docs/device.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from headrace.device.port import Block, Device, StreamEvent
from headrace.device.widening import Widening
from headrace.errors import Fatal
from headrace.models.processing import Processing
from headrace.models.signature import TensorSpec
from headrace.protocol.tensors import DATATYPES
from headrace.tuning import TUNING, ExecutorTuning


class TensorPlan(NamedTuple):
    """One input or output of the model in the ring.

    Attributes:
        row_bytes: size of one row as copied between host and device.
        model_row_bytes: size of one row as the model uses it.
        widening: converts copied rows to the model's; None if they are the same. Inputs only.
        row_shape: shape of one row as the model uses it, for the widening.
    """

    name: str
    row_bytes: int
    model_row_bytes: int
    widening: Widening | None = None
    row_shape: tuple[int, ...] = ()


class RingPlan(NamedTuple):
    """Tensors and size of a ring.

    Attributes:
        max_rows: rows of the largest bucket.
        slots: number of slots.
    """

    inputs: tuple[TensorPlan, ...]
    outputs: tuple[TensorPlan, ...]
    max_rows: int
    slots: int = TUNING.executor.ring_slots

    @property
    def device_bytes(self) -> int:
        """Device memory that the ring's blocks take, in bytes."""
        copied_bytes = sum(each.row_bytes for each in self.inputs + self.outputs)
        model_bytes = sum(each.model_row_bytes for each in self.inputs + self.outputs)
        return self.max_rows * (self.slots * copied_bytes + model_bytes)


class Slot:
    """One slot of the ring.

    Attributes:
        host: blocks that rows are gathered into, one for each input.
        answers: blocks that results are copied to, one for each output.
        rows: rows of its batch.
        bucket: rows of its run: `rows` and padding.
        error: the model's exception, or None; with an error there are no answers.
    """

    __slots__ = (
        *("answers", "bucket", "computed", "error", "host", "landed", "name"),
        *("ready", "results", "rows", "staged"),
    )

    def __init__(self, device: Device, plan: RingPlan, number: int) -> None:
        self.name = f"slot {number}"
        rows = plan.max_rows
        self.host = [
            device.host_block(f"{self.name} host {each.name}", rows * each.row_bytes)
            for each in plan.inputs
        ]
        self.staged = [
            device.device_block(f"{self.name} staged {each.name}", rows * each.row_bytes)
            for each in plan.inputs
        ]
        self.results = [
            device.device_block(f"{self.name} results {each.name}", rows * each.row_bytes)
            for each in plan.outputs
        ]
        self.answers = [
            device.host_block(f"{self.name} answers {each.name}", rows * each.row_bytes)
            for each in plan.outputs
        ]
        self.landed: StreamEvent = device.event(f"{self.name} landed")
        self.computed: StreamEvent = device.event(f"{self.name} computed")
        self.ready: StreamEvent = device.event(f"{self.name} ready")
        self.rows = self.bucket = 0
        self.error: Exception | None = None


class Ring:
    """The schedule of one instance on its device.

    The loop calls `take` and `release`, the dispatcher `submit`, and the completion thread
    `collect`; a slot
    is passed from one to the next and never shared.

    Args:
        device: the device that holds the blocks.
        plan: the sizes of the blocks.

    Attributes:
        inputs, outputs: the model's own blocks, by name.
        compute: the stream that the model runs on.
    """

    def __init__(self, device: Device, plan: RingPlan) -> None:
        self._device = device
        self._plan = plan
        self._copy_in = device.stream("copy-in")
        self.compute = device.stream("compute")
        self._copy_out = device.stream("copy-out")
        self.inputs: Mapping[str, Block] = {
            each.name: device.device_block(
                f"input {each.name}", plan.max_rows * each.model_row_bytes
            )
            for each in plan.inputs
        }
        self.outputs: Mapping[str, Block] = {
            each.name: device.device_block(
                f"output {each.name}", plan.max_rows * each.model_row_bytes
            )
            for each in plan.outputs
        }
        self._widen = [
            each.widening and device.widening(each.widening, each.row_shape) for each in plan.inputs
        ]
        self._free = deque(Slot(device, plan, number) for number in range(plan.slots))

    def take(self) -> Slot | None:
        """Return a free slot; None while all are in use."""
        return self._free.popleft() if self._free else None

    def submit(
        self, slot: Slot, rows: int, enqueue: Callable[[], None], bucket: int | None = None
    ) -> None:
        """Enqueue all operations for a batch whose rows are in the slot's host blocks.

        A model's error is kept in the slot; `collect` still waits for the operations enqueued
        before it, as for a successful batch.

        Args:
            slot: a filled slot from `take`.
            rows: number of rows in it.
            enqueue: enqueues a run of the model on the compute stream.
            bucket: rows of that run, if more than `rows`; the padding must be in the host blocks
                too, since the model's input still holds rows of an earlier batch.

        Raises:
            Fatal: the device failed.
        """
        slot.rows, slot.bucket, slot.error = rows, bucket or rows, None
        self._enqueue_inputs(slot)
        try:
            self._device.launch(
                enqueue,
                self.compute,
                reads=tuple(self.inputs.values()),
                writes=tuple(self.outputs.values()),
            )
            self._save_results(slot)
        except Fatal:
            raise
        except Exception as error:  # noqa: BLE001 - a model may raise anything; kept in the slot
            slot.error = error
        self._enqueue_outputs(slot)

    def _enqueue_inputs(self, slot: Slot) -> None:
        device, rows = self._device, slot.bucket
        for tensor, host, staged in zip(self._plan.inputs, slot.host, slot.staged, strict=True):
            device.copy(host, staged, rows * tensor.row_bytes, self._copy_in)
        device.record(slot.landed, self._copy_in)
        device.wait(self.compute, slot.landed)
        ways = zip(self._plan.inputs, self._widen, slot.staged, strict=True)
        for tensor, widen, staged in ways:
            target = self.inputs[tensor.name]
            if widen is None:
                device.copy(staged, target, rows * tensor.row_bytes, self.compute)
            else:
                work = partial(widen, staged, target, rows)
                device.launch(work, self.compute, reads=(staged,), writes=(target,))

    def _save_results(self, slot: Slot) -> None:
        """Copy the results to the slot, before the next run overwrites the model's outputs."""
        for tensor, result in zip(self._plan.outputs, slot.results, strict=True):
            source = self.outputs[tensor.name]
            self._device.copy(source, result, slot.rows * tensor.row_bytes, self.compute)

    def _enqueue_outputs(self, slot: Slot) -> None:
        device = self._device
        device.record(slot.computed, self.compute)
        device.wait(self._copy_out, slot.computed)
        if slot.error is None:
            blocks: Sequence[tuple[TensorPlan, Block, Block]] = list(
                zip(self._plan.outputs, slot.results, slot.answers, strict=True)
            )
            for tensor, result, answer in blocks:
                device.copy(result, answer, slot.rows * tensor.row_bytes, self._copy_out)
        device.record(slot.ready, self._copy_out)

    def collect(self, slot: Slot) -> None:
        """Wait until the slot's answers have arrived, or all its operations if it has an error."""
        self._device.synchronize(slot.ready)

    def release(self, slot: Slot) -> None:
        """Return a slot whose answers have been copied out to the free ones."""
        self._free.append(slot)


def buckets(max_rows: int, tuning: ExecutorTuning) -> tuple[int, ...]:
    """Return the row counts that runs are bound for: 1 to 4, every fourth, and the largest.

    A batch is padded to the next bucket.
    """
    exact, step = tuning.ring_exact_rows, tuning.ring_step_rows
    sizes = {*range(1, min(exact, max_rows) + 1), *range(exact, max_rows, step), max_rows}
    return tuple(sorted(sizes))


def plan_ring(processing: Processing, max_rows: int, slots: int) -> RingPlan | None:
    """Return the plan of a model's ring; None if it is not batched or has dynamic sizes."""
    own = processing.own
    if not own.batched or not all(_is_fixed(spec) for spec in own.inputs + own.outputs):
        return None
    copied = {spec.name: spec for spec in processing.signature.inputs}
    inputs = tuple(
        TensorPlan(
            spec.name,
            _row_bytes(copied[spec.name]),
            _row_bytes(spec),
            processing.widenings.get(spec.name),
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
