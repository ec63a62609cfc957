"""The ring: the order in which batches go to a device, through it, and back.

Three slots go round. While batch k computes, the rows of k+1 are copied in and the results of k-1
are copied out, each on a stream of its own:

    loop         gathers the rows into the slot's host blocks
    copy-in      host → staged                                        · records *landed*
    compute      waits for *landed*; staged → the model's input; the
                 model; the model's output → results                  · records *computed*
    copy-out     waits for *computed*; results → answers              · records *ready*
    reaper       waits for *ready*
    loop         takes the answers, and releases the slot

The model's own input and output are at one address each, for all slots: a CUDA graph is captured
with addresses in it. What reads and writes them is on the compute stream alone, which orders it.
All other blocks belong to a slot, and a slot is filled again only after somebody has waited for
*ready*, which comes after every operation on its blocks. See docs/device.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from headrace.device.port import Block, Device, Event
from headrace.device.widening import Widening
from headrace.errors import Fatal

SLOTS = 3


class TensorPlan(NamedTuple):
    """One input or output of the model in the ring.

    Attributes:
        row_bytes: of one row as it travels between host and device.
        model_row_bytes: of one row as the model has it.
        widening: what makes the second of the first; None where both are the same. Inputs only.
        row_shape: of one row as the model has it, for the widening.
    """

    name: str
    row_bytes: int
    model_row_bytes: int
    widening: Widening | None = None
    row_shape: tuple[int, ...] = ()


class RingPlan(NamedTuple):
    """What a ring is made for.

    Attributes:
        max_rows: the rows of the largest bucket.
    """

    inputs: tuple[TensorPlan, ...]
    outputs: tuple[TensorPlan, ...]
    max_rows: int

    @property
    def device_bytes(self) -> int:
        """What the blocks of a ring take of the device's memory."""
        travelling = sum(each.row_bytes for each in self.inputs + self.outputs)
        resident = sum(each.model_row_bytes for each in self.inputs + self.outputs)
        return self.max_rows * (SLOTS * travelling + resident)


class Slot:
    """One place in the ring.

    Attributes:
        host: where the rows are gathered, one block for each input.
        answers: where the results arrive, one block for each output.
        rows: of the batch that is in it.
        bucket: of the run that it goes through: `rows`, and those that pad it.
        error: what the model raised, if it did; there are no answers then.
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
        self.landed: Event = device.event(f"{self.name} landed")
        self.computed: Event = device.event(f"{self.name} computed")
        self.ready: Event = device.event(f"{self.name} ready")
        self.rows = self.bucket = 0
        self.error: Exception | None = None


class Ring:
    """The schedule of one instance on its device.

    `take` and `release` are the loop's, `submit` is the dispatcher's and `collect` the reaper's;
    a slot is handed from one to the next, never shared.

    Args:
        device: what holds the blocks.
        plan: how large they are.

    Attributes:
        inputs, outputs: the model's own, by name.
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
            each.widening and device.widening(each.widening, each.row_shape, self.compute)
            for each in plan.inputs
        ]
        self._free = deque(Slot(device, plan, number) for number in range(SLOTS))

    def take(self) -> Slot | None:
        """A slot to be filled; None while all are under way."""
        return self._free.popleft() if self._free else None

    def submit(
        self, slot: Slot, rows: int, enqueue: Callable[[], None], bucket: int | None = None
    ) -> None:
        """Enqueue everything for a batch whose rows are in the slot's host blocks.

        An error of the model's is kept in the slot; it is for `collect` to wait for what was
        enqueued until then, like for a batch that went well.

        Args:
            slot: from `take`, filled.
            rows: how many are in it.
            enqueue: a run of the model on the compute stream.
            bucket: the rows of that run, where they are more; those behind the batch's own are in
                the host blocks as well, since the model's input still holds an earlier batch's.

        Raises:
            Fatal: an error of the device's.
        """
        slot.rows, slot.bucket, slot.error = rows, bucket or rows, None
        self._bring_in(slot)
        try:
            self._device.launch(
                enqueue,
                self.compute,
                reads=tuple(self.inputs.values()),
                writes=tuple(self.outputs.values()),
            )
            self._set_aside(slot)
        except Fatal:
            raise
        except Exception as error:  # noqa: BLE001 - a model may raise anything; `collect` tells it
            slot.error = error
        self._bring_out(slot)

    def _bring_in(self, slot: Slot) -> None:
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

    def _set_aside(self, slot: Slot) -> None:
        """Before the next run overwrites the model's outputs."""
        for tensor, result in zip(self._plan.outputs, slot.results, strict=True):
            source = self.outputs[tensor.name]
            self._device.copy(source, result, slot.rows * tensor.row_bytes, self.compute)

    def _bring_out(self, slot: Slot) -> None:
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
        """Wait until the slot's answers are there, or its error is all that will come."""
        self._device.synchronize(slot.ready)

    def release(self, slot: Slot) -> None:
        """The answers are taken."""
        self._free.append(slot)
