"""The ring's order of operations, held against the checker of happens-before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.device.cpu import CpuDevice
from headrace.device.port import Block, Stream, StreamEvent
from headrace.services.executor.device.ring import Ring, RingPlan, TensorPlan
from headrace.tuning import TUNING
from tests.support.happens_before import CheckedDevice, Operation, RaceError
from tests.support.ring_schedule import Schedule

Edit = Callable[[Operation], Operation | None]

BATCHES = 8


def dropping(kind: str, event: str) -> Edit:
    """Without the operations of this kind whose event, or written block, ends so."""

    def edit(operation: Operation) -> Operation | None:
        planted = operation.kind == kind and operation.event.endswith(event)
        return None if planted else operation

    return edit


def moving(kind: str, event: str, stream: str) -> Edit:
    """With the operations of this kind on another stream."""

    def edit(operation: Operation) -> Operation | None:
        planted = operation.kind == kind and operation.event.endswith(event)
        return operation._replace(stream=stream) if planted else operation

    return edit


class SavesTooLate(CheckedDevice):
    """Saves the results only after *computed* is recorded."""

    saves: tuple[tuple[Block, Block, int, Stream], ...] = ()  # waiting for *computed*

    def copy(self, source: Block, target: Block, size_bytes: int, stream: Stream) -> None:
        if " results " in target.name:
            self.saves = ((source, target, size_bytes, stream),)
        else:
            super().copy(source, target, size_bytes, stream)

    def record(self, event: StreamEvent, stream: Stream) -> None:
        super().record(event, stream)
        if event.name.endswith("computed"):
            for save in self.saves:
                super().copy(*save)
            self.saves = ()


class SharesResults(Ring):
    """Has one block for the results of all slots."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        slots = []
        while (slot := self.take()) is not None:
            slots.append(slot)
        for slot in slots:
            slot.results = slots[0].results
            self.release(slot)


PLANTED: dict[str, dict[str, Any]] = {
    "slot reused too early": {"early": True},
    "compute does not wait for landed": {"edit": dropping("wait", "landed")},
    "copy-out does not wait for computed": {"edit": dropping("wait", "computed")},
    "result read before ready": {"edit": dropping("synchronize", "ready")},
    "landed is never recorded": {"edit": dropping("record", "landed")},
    "computed is never recorded": {"edit": dropping("record", "computed")},
    "ready is never recorded": {"edit": dropping("record", "ready")},
    "landed recorded on compute": {"edit": moving("record", "landed", "compute")},
    "computed recorded on copy-in": {"edit": moving("record", "computed", "copy-in")},
    "ready recorded on compute": {"edit": moving("record", "ready", "compute")},
    "copy-in waits in place of compute": {"edit": moving("wait", "landed", "copy-in")},
    "model runs on copy-in": {"edit": moving("launch", "output z", "copy-in")},
    "conversion runs on copy-in": {"edit": moving("launch", "input x", "copy-in")},
    "results saved on copy-out": {"edit": moving("copy", "results z", "copy-out")},
    "rows copied in on copy-out": {"edit": moving("copy", "staged x", "copy-out")},
    "answers copied on compute": {"edit": moving("copy", "answers z", "compute")},
    "computed recorded before the results are saved": {"make_device": SavesTooLate},
    "one result block for all slots": {"make_ring": SharesResults},
}


@pytest.mark.parametrize("bug", PLANTED)
def test_race_detector_finds_planted_bug(bug: str) -> None:
    """Under each of a hundred schedules, whatever the bytes happened to be."""
    for seed in range(100):
        with pytest.raises(RaceError):
            Schedule(seed, **PLANTED[bug]).run(4 * BATCHES)


def test_ring_has_no_race() -> None:
    """Every access is ordered, and every answer is that of its own batch."""
    for seed in range(50):
        schedule = Schedule(seed)
        schedule.run(BATCHES)
        assert schedule.answered == BATCHES


def test_failed_run_releases_its_slot() -> None:
    """Its error comes when everything that was enqueued before is done."""
    ring = Ring(CpuDevice(), RingPlan((TensorPlan("x", 1, 1),), (TensorPlan("z", 1, 1),), 1))
    slot = ring.take()
    assert slot is not None

    def enqueue() -> None:
        raise ValueError("no")

    ring.submit(slot, 1, enqueue)
    ring.collect(slot)

    assert isinstance(slot.error, ValueError)


def test_ring_with_all_slots_in_use_returns_none() -> None:
    """The next one is to be had when one is released."""
    ring = Ring(CpuDevice(), RingPlan((TensorPlan("x", 1, 1),), (TensorPlan("z", 1, 1),), 1))
    taken = [slot for _ in range(TUNING.executor.ring_slots) if (slot := ring.take()) is not None]

    assert len(taken) == TUNING.executor.ring_slots
    assert ring.take() is None
    ring.release(taken[1])
    assert ring.take() is taken[1]


def test_plan_counts_rings_device_memory() -> None:
    """Three times what travels, and once what the model reads and writes, for every row."""
    plan = RingPlan((TensorPlan("x", 10, 40),), (TensorPlan("z", 8, 8),), max_rows=4)

    assert plan.device_bytes == 4 * (3 * 18 + 48)
