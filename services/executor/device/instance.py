"""An instance whose batches pass through a ring of slots on a device.

It has two threads: the *dispatcher* loads the model and enqueues each batch, which takes
microseconds; the *reaper* waits for the answers and copies them out of the ring. Meanwhile the
loop gathers the next batch into a free slot and enqueues it behind the running one, so that its
rows are on the device when that one ends.

Batches that do not fit into the ring (a request with more rows than the largest batch, a part of a
failed batch, all batches of a model with dynamic shapes) run as in `Instance`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import structlog
from numpy.typing import NDArray

from headrace.device.port import Device, Memory, require_memory
from headrace.errors import ConfigurationError, Fatal
from headrace.models.backends.port import Arrays, Backend, ReusedInputs, StreamBackend
from headrace.protocol.messages import Request
from headrace.protocol.tensors import DATATYPES
from headrace.services.executor.buffers import copy_rows
from headrace.services.executor.device.ring import Ring, RingPlan, Slot, buckets, plan_ring
from headrace.services.executor.instance import (
    Call,
    Instance,
    load_and_warm_up,
    serve_calls,
)
from headrace.telemetry.logs import Event
from headrace.telemetry.snapshots import DeviceSnapshot
from headrace.tuning import TUNING, ExecutorTuning

GRAPH_RUNS = 3
"""Runs of each bucket before it is used: ONNX Runtime captures a graph at the third run."""

log = structlog.get_logger(__name__)


class OnDevice(NamedTuple):
    """Device settings of an instance.

    Attributes:
        open_device: called on the dispatcher's thread.
        max_rows: rows of the largest batch.
        ring: use a ring if the model's shapes allow it.
        graphs: capture a graph for each bucket.
        needs: device memory in bytes besides the ring, by purpose.
    """

    open_device: Callable[[], Device]
    max_rows: int
    ring: bool
    graphs: bool
    needs: dict[str, int]


class Loaded(ReusedInputs):
    """A batch in a slot; its rows are not accessible as arrays."""

    __slots__ = ("call", "rows", "slot")

    def __init__(self, slot: Slot, rows: int) -> None:
        super().__init__()
        self.slot = slot
        self.rows = rows
        self.call: Call | None = None


class DeviceInstance(Instance):
    """An `Instance` on a device; entering it opens the device too.

    Args:
        backend: the backend, not yet loaded.
        name: name of the dispatcher's thread.
        where: the device, and how to use it.
        max_execution_s: a longer run is considered hung and cancelled.
        max_load_s: time limit to load and warm up.
        prepare: prepares the backend, on the dispatcher's thread.

    Attributes:
        memory: recent state of the device's memory; None before it is open, and for the CPU.
    """

    def __init__(
        self,
        backend: StreamBackend,
        name: str,
        where: OnDevice,
        *,
        max_execution_s: float,
        max_load_s: float,
        prepare: Callable[[Backend], None] = load_and_warm_up,
        tuning: ExecutorTuning = TUNING.executor,
    ) -> None:
        super().__init__(
            backend,
            name,
            max_execution_s=max_execution_s,
            max_load_s=max_load_s,
            may_inline=False,
            prepare=lambda _: self._set_up(prepare),
            tuning=tuning,
        )
        self._streaming = backend
        self._where = where
        self._reaps: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._reaper = threading.Thread(
            target=serve_calls, args=(self._reaps.get,), name=f"{name}-reaper", daemon=True
        )
        self._ring: Ring | None = None
        self._plan: RingPlan | None = None
        self._runs: dict[int, Callable[[], None]] = {}
        self._bucket_of: list[int] = []
        self._device: Device | None = None
        self._ready_ns = 0
        self._looked_s = 0.0
        self.memory: Memory | None = None

    # --- the dispatcher's thread ----------------------------------------------------------------

    def _set_up(self, prepare: Callable[[Backend], None]) -> None:
        backend, where = self._streaming, self._where
        device = self._device = where.open_device()
        plan = None
        if where.ring:
            plan = plan_ring(backend.processing, where.max_rows, self._tuning.ring_slots)
        needs = dict(where.needs)
        if plan is not None:
            needs["ring"] = plan.device_bytes
        self._look_at_memory()
        if self.memory is not None:
            require_memory(device.name, self.memory, needs)
        ring = Ring(device, plan) if plan is not None else None
        if ring is not None:
            backend.use_stream(ring.compute.address, graphs=where.graphs)
        prepare(backend)
        if ring is not None and plan is not None and backend.signature.batched:
            self._bind(ring, plan)
            self._ring, self._plan = ring, plan
        elif where.ring:
            log.warning(
                Event.MODEL_WITHOUT_RING,
                instance=self.name,
                reason="expected a batch, and inputs and outputs of fixed shapes and sizes",
            )

    def _bind(self, ring: Ring, plan: RingPlan) -> None:
        """Bind every bucket to the ring's inputs and outputs, the largest first."""
        inputs = {name: block.address for name, block in ring.inputs.items()}
        outputs = {name: block.address for name, block in ring.outputs.items()}
        sizes = buckets(plan.max_rows, self._tuning)
        for number, rows in enumerate(reversed(sizes), start=1):
            run = self._runs[rows] = self._streaming.bind(rows, number, inputs, outputs)
            for _ in range(GRAPH_RUNS if self._where.graphs else 1):
                self._try(ring, rows, run)
        self._bucket_of = [
            next(size for size in sizes if size >= rows) for rows in range(1, plan.max_rows + 1)
        ]

    def _try(self, ring: Ring, rows: int, run: Callable[[], None]) -> None:
        slot = ring.take()
        assert slot is not None
        ring.submit(slot, rows, run)
        ring.collect(slot)
        error = slot.error
        ring.release(slot)
        if error is not None:
            raise ConfigurationError(f"{self.name}: a bound run of {rows} rows failed: {error}")

    def _dispatch(self, loaded: Loaded, reap: Call) -> None:
        assert self._ring is not None
        rows, bucket = loaded.rows, self._bucket_of[loaded.rows - 1]
        submitted_ns = time.perf_counter_ns()
        try:
            self._ring.submit(loaded.slot, rows, self._runs[bucket], bucket)
        except Exception as raised:  # noqa: BLE001 - any error here is reported as fatal
            # It is unknown what was enqueued, so the slot can never be filled again.
            error = raised if isinstance(raised, Fatal) else Fatal(f"{self.name}: {raised}")
            reap.work = lambda: _raise(error)
        else:
            reap.work = lambda: self._reap(loaded, reap, submitted_ns)
        self._reaps.put(reap)
        self._look_at_memory()

    def _look_at_memory(self) -> None:
        device, now_s = self._device, time.monotonic()
        period_s = self._tuning.device_memory_period_s
        if device is None or device.shares_memory or now_s - self._looked_s < period_s:
            return
        self._looked_s = now_s
        self.memory = device.memory()

    def _unload(self) -> None:
        """Unload, and free streams and memory on the thread that allocated them."""
        try:
            super()._unload()
        finally:
            self._runs.clear()
            self._ring = self._plan = self._device = None

    # --- the reaper's thread --------------------------------------------------------------------

    def _reap(self, loaded: Loaded, reap: Call, submitted_ns: int) -> Arrays:
        assert self._ring is not None
        slot = loaded.slot
        self._ring.collect(slot)
        ready_ns = time.perf_counter_ns()
        reap.compute_us = (ready_ns - max(submitted_ns, self._ready_ns)) // 1000
        self._ready_ns = ready_ns
        if slot.error is not None:
            raise slot.error
        assert self._plan is not None
        arrays: dict[str, NDArray[Any]] = {}
        specs = self._streaming.processing.own.outputs
        for spec, tensor, block in zip(specs, self._plan.outputs, slot.answers, strict=True):
            assert block.array is not None
            content = block.array[: loaded.rows * tensor.row_bytes].copy()
            shape = (loaded.rows, *spec.shape[1:])
            arrays[spec.name] = content.view(DATATYPES[spec.datatype].dtype).reshape(shape)
        return self._streaming.label(arrays)

    # --- the event loop -------------------------------------------------------------------------

    def device_memory(self) -> DeviceSnapshot | None:
        device, memory = self._device, self.memory
        if device is None or memory is None:
            return None
        sizes = {"free": memory.free_bytes, "total": memory.total_bytes, **memory.used_bytes}
        return DeviceSnapshot(device.name, sizes)

    async def __aenter__(self) -> Self:
        self._reaper.start()
        try:
            return await super().__aenter__()
        except BaseException:
            self._reaps.put(None)
            raise

    async def __aexit__(self, *_: object) -> None:
        await self._end()
        self._reaps.put(None)

    def gather(self, requests: Sequence[Request], *, fresh: bool = True) -> Arrays:
        """See `Instance.gather`; a `fresh` batch takes a slot, so it must be run."""
        ring, plan = self._ring, self._plan
        rows = sum(request.rows for request in requests)
        if ring is None or plan is None or not fresh or rows > plan.max_rows:
            return super().gather(requests, fresh=False)
        slot = ring.take()
        assert slot is not None, "more than a running batch and the next one"
        padding = self._bucket_of[rows - 1] - rows
        for position, (block, tensor) in enumerate(zip(slot.host, plan.inputs, strict=True)):
            assert block.array is not None
            stop = rows * tensor.row_bytes
            target = block.array.data[:stop]
            copy_rows(requests, position, target, self._tuning.copy_each_min_bytes)
            if padding:
                _repeat_last(block.array, stop, tensor.row_bytes, padding)
        return Loaded(slot, rows)

    def start_ahead(self, inputs: Arrays, wanted: Callable[[], bool]) -> bool:
        """Enqueue a batch behind the running one; see `Instance.start_ahead`."""
        if not isinstance(inputs, Loaded):
            return super().start_ahead(inputs, wanted)
        self.begin(inputs)
        return True

    def _cancel(self, call: Call) -> None:
        """Cancel a run; this works on the CPU only, not for work enqueued on a device."""
        self._streaming.cancel()

    def begin(self, inputs: Arrays) -> Call:
        if not isinstance(inputs, Loaded):
            return super().begin(inputs)
        if inputs.call is None:
            reap = inputs.call = Call(lambda: None)
            self._call(lambda: self._dispatch(inputs, reap))
            ring, slot = self._ring, inputs.slot
            assert ring is not None
            # Registered first: the slot is free before the caller that waits for answers resumes.
            reap.done.add_done_callback(lambda _: ring.release(slot))
        return inputs.call


def _repeat_last(array: NDArray[np.uint8], stop: int, row_bytes: int, times: int) -> None:
    """Pad with copies of the last row, so that no rows of an earlier batch are run."""
    padded = array[stop : stop + times * row_bytes].reshape(times, row_bytes)
    padded[:] = array[stop - row_bytes : stop]


def _raise(error: Exception) -> None:
    raise error
