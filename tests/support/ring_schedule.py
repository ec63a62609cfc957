"""Batches sent round a ring in an order picked by chance, with their bytes checked at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import NamedTuple

import numpy as np

from headrace.device.port import Block, Device
from headrace.device.widening import Widening
from headrace.services.executor.device.ring import Ring, RingPlan, Slot, TensorPlan
from tests.support.happens_before import CheckedDevice, Clock, Operation

ROW_BYTES = 3
MAX_ROWS = 4
POISON = 232
WIDENING = Widening("UINT8", "FP16")


class Sent(NamedTuple):
    """A slot on its way from one thread to the next, with what the sender knew."""

    slot: Slot
    rows: bytes
    clock: Clock


class Schedule:
    """A loop, a dispatcher and a completion thread that take turns by chance.

    The rows of `x` are widened; the model adds one to every byte of what comes of that, and fails
    where the first byte of the rows is `POISON` or more.

    Args:
        seed: of all that is left to chance.
        edit: plants a bug, see `CheckedDevice`.
        early: a slot is released as soon as it has been submitted.
        make_ring: another ring than ours.
        make_device: another device; plants a bug that takes several operations.
    """

    def __init__(
        self,
        seed: int,
        edit: Callable[[Operation], Operation | None] = lambda operation: operation,
        *,
        early: bool = False,
        make_ring: Callable[[Device, RingPlan], Ring] = Ring,
        make_device: type[CheckedDevice] = CheckedDevice,
    ) -> None:
        self._random = Random(seed)
        self._early = early
        self.device = device = make_device(self._random, edit)
        widened = TensorPlan("x", ROW_BYTES, 2 * ROW_BYTES, WIDENING, (ROW_BYTES,))
        plain = TensorPlan("z", 2 * ROW_BYTES, 2 * ROW_BYTES)
        self.ring = make_ring(device, RingPlan((widened,), (plain,), MAX_ROWS))
        self._to_dispatch: deque[Sent] = deque()
        self._to_collect: deque[Sent] = deque()
        self._to_answer: deque[Sent] = deque()
        self._left = 0
        self.answered = 0

    def run(self, batches: int) -> None:
        """Run until so many batches are answered."""
        self._left = batches
        while self.answered < batches:
            turns: list[Callable[[], object]] = []
            if self._left:
                turns.append(self._fill)
            for queue, turn in (
                (self._to_dispatch, self._submit),
                (self._to_collect, self._collect),
                (self._to_answer, self._answer),
            ):
                if queue:
                    turns.append(turn)
            self._random.choice([*turns, self.device.step])()

    def _fill(self) -> None:
        """The loop: rows into a free slot, if there is one."""
        device = self.device
        device.thread = "loop"
        slot = self.ring.take()
        if slot is None:
            return
        self._left -= 1
        rows = self._random.randbytes(ROW_BYTES * self._random.randint(1, MAX_ROWS))
        _write(device, slot.host[0], rows)
        self._to_dispatch.append(Sent(slot, rows, device.sent()))

    def _submit(self) -> None:
        """The dispatcher: everything onto the streams."""
        sent = self._to_dispatch.popleft()
        device = self.device
        device.received("dispatcher", sent.clock)
        count = len(sent.rows) // ROW_BYTES
        self.ring.submit(sent.slot, count, lambda: self._compute(sent.rows, count))
        self._to_collect.append(Sent(sent.slot, sent.rows, device.sent()))
        if self._early:
            self.ring.release(sent.slot)

    def _compute(self, rows: bytes, count: int) -> None:
        if rows[0] >= POISON:
            raise ValueError("poison")
        source, target = self.ring.inputs["x"], self.ring.outputs["z"]
        size = 2 * count * ROW_BYTES
        self.device.later(lambda: _put(target, expected(_bytes(source, size))))

    def _collect(self) -> None:
        """The completion thread: waits for the answers."""
        sent = self._to_collect.popleft()
        self.device.received("completion", sent.clock)
        self.ring.collect(sent.slot)
        self._to_answer.append(Sent(sent.slot, sent.rows, self.device.sent()))

    def _answer(self) -> None:
        """The loop again: takes the answers, and gives the slot back."""
        sent = self._to_answer.popleft()
        slot, device = sent.slot, self.device
        device.received("loop", sent.clock)
        if sent.rows[0] >= POISON:
            assert isinstance(slot.error, ValueError)
        else:
            assert slot.error is None
            device.touch(slot.answers[0], write=False)
            wide = np.frombuffer(sent.rows, np.uint8).astype(np.float16).tobytes()
            assert _bytes(slot.answers[0], len(wide)) == expected(wide)
        if not self._early:
            self.ring.release(slot)
        self.answered += 1


def expected(given: bytes) -> bytes:
    """Return the model's output for its input."""
    return bytes((byte + 1) % 256 for byte in given)


def _write(device: CheckedDevice, block: Block, content: bytes) -> None:
    device.touch(block, write=True)
    _put(block, content)


def _put(block: Block, content: bytes) -> None:
    assert block.array is not None
    block.array.data[: len(content)] = content


def _bytes(block: Block, size: int) -> bytes:
    assert block.array is not None
    return block.array[:size].tobytes()
