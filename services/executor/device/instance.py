"""An instance whose batches pass through a ring of slots on a device.

It has two threads: the *dispatcher* loads the model and enqueues each batch, which takes
microseconds; the *completion thread* waits for the answers and copies them out of the ring.
Meanwhile the loop gathers the next batch into a free slot and enqueues it behind the running one,
so that its rows are on the device when that one ends.

Batches that do not fit into the ring (a request with more rows than the largest batch, a part of a
failed batch, all batches of a model with dynamic shapes) run as in `Instance`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import structlog
from numpy.typing import NDArray

from headrace.device.port import Device, Memory, require_memory
from headrace.errors import Fatal, NotLoadableHere
from headrace.models.backends.port import Arrays, Backend, ReusedInputs, StreamBackend
from headrace.primitives.worker_thread import Call, WorkerThread
from headrace.protocol.messages import Request
from headrace.protocol.tensors import DATATYPES
from headrace.services.executor.buffers import copy_rows, fit_inputs
from headrace.services.executor.device.ring import Ring, RingPlan, Slot, buckets, plan_ring
from headrace.services.executor.instance import (
    Instance,
    load_and_warm_up,
)
from headrace.telemetry.logs import Event
from headrace.telemetry.snapshots import DeviceSnapshot
from headrace.tuning import TUNING, ExecutorTuning

GRAPH_RUNS = 3
"""Runs of each bucket before it is used: ONNX Runtime captures a graph at the third run."""

log = structlog.get_logger(__name__)


class DevicePlacement(NamedTuple):
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


class RingBatch(ReusedInputs):
    """A batch in a slot of a ring; its rows are not accessible as arrays.

    Attributes:
        call: its run, once it is enqueued.
    """

    __slots__ = ("call", "rows", "slot")

    def __init__(self, slot: Slot, rows: int) -> None:
        super().__init__()
        self.slot = slot
        self.rows = rows
        self.call: Call | None = None


class BoundRing:
    """A ring and the runs that are bound to its inputs and outputs: one for each bucket.

    The loop calls `gather` and `release`, the dispatcher `bind` and `submit`, and the completion
    thread `wait` and `outputs`.

    Args:
        name: name of the instance.
        ring: the ring, whose compute stream the backend uses.
        plan: its tensors and its size.
        backend: the backend, loaded and warmed up.
        tuning: the buckets, and when tensors are copied one by one.
    """

    def __init__(
        self,
        name: str,
        ring: Ring,
        plan: RingPlan,
        backend: StreamBackend,
        tuning: ExecutorTuning,
    ) -> None:
        self._name = name
        self._ring = ring
        self._plan = plan
        self._backend = backend
        self._copy_each_min_bytes = tuning.copy_each_min_bytes
        self._buckets = buckets(plan.max_rows, tuning)
        self._bucket_of = [
            next(size for size in self._buckets if size >= rows)
            for rows in range(1, plan.max_rows + 1)
        ]
        self._runs: dict[int, Callable[[], None]] = {}

    @property
    def max_rows(self) -> int:
        """Rows of the largest batch that a slot holds."""
        return self._plan.max_rows

    def bind(self, trial_runs: int) -> None:
        """Bind every bucket, and run each so many times.

        Raises:
            NotLoadableHere: one of the runs failed.
        """
        ring = self._ring
        inputs = {name: block.address for name, block in ring.inputs.items()}
        outputs = {name: block.address for name, block in ring.outputs.items()}
        # The largest first: the memory that it takes serves all others.
        for number, rows in enumerate(reversed(self._buckets), start=1):
            run = self._runs[rows] = self._backend.bind(rows, number, inputs, outputs)
            for _ in range(trial_runs):
                self._try_run(rows, run)

    def _try_run(self, rows: int, run: Callable[[], None]) -> None:
        slot = self._ring.take()
        assert slot is not None
        self._ring.submit(slot, rows, run)
        self._ring.collect(slot)
        error = slot.error
        self._ring.release(slot)
        if error is not None:
            raise NotLoadableHere(f"{self._name}: a bound run of {rows} rows failed: {error}")

    def gather(self, requests: Sequence[Request], rows: int) -> RingBatch:
        """Copy the requests' rows into a free slot, padded to the next bucket."""
        slot = self._ring.take()
        assert slot is not None, "more than a running batch and the next one"
        try:
            self._fill(slot, requests, rows)
        except BaseException:
            self._ring.release(slot)
            raise
        return RingBatch(slot, rows)

    def _fill(self, slot: Slot, requests: Sequence[Request], rows: int) -> None:
        padding = self._bucket_of[rows - 1] - rows
        for position, (block, tensor) in enumerate(zip(slot.host, self._plan.inputs, strict=True)):
            assert block.array is not None
            stop = rows * tensor.row_bytes
            copy_rows(requests, position, block.array.data[:stop], self._copy_each_min_bytes)
            if padding:
                _repeat_last(block.array, stop, tensor.row_bytes, padding)

    def submit(self, batch: RingBatch) -> None:
        """Enqueue the copies and the run of a batch."""
        bucket = self._bucket_of[batch.rows - 1]
        self._ring.submit(batch.slot, batch.rows, self._runs[bucket], bucket)

    def wait(self, batch: RingBatch) -> None:
        """Wait until the answers of a batch have arrived, or its operations have ended."""
        self._ring.collect(batch.slot)

    def outputs(self, batch: RingBatch) -> Arrays:
        """Return copies of the outputs of a batch that `wait` has waited for.

        Raises:
            Exception: the model's exception.
        """
        slot = batch.slot
        if slot.error is not None:
            raise slot.error
        arrays: dict[str, NDArray[Any]] = {}
        specs = self._backend.processing.own.outputs
        for spec, tensor, block in zip(specs, self._plan.outputs, slot.answers, strict=True):
            assert block.array is not None
            content = block.array[: batch.rows * tensor.row_bytes].copy()
            shape = (batch.rows, *spec.shape[1:])
            arrays[spec.name] = content.view(DATATYPES[spec.datatype].dtype).reshape(shape)
        return self._backend.label(arrays)

    def release(self, batch: RingBatch) -> None:
        """Return the batch's slot to the free ones."""
        self._ring.release(batch.slot)


class DeviceInstance(Instance):
    """An `Instance` on a device; entering it opens the device too.

    Args:
        backend: the backend, not yet loaded.
        name: name of the dispatcher's thread.
        placement: the device, and how to use it.
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
        placement: DevicePlacement,
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
        self._stream_backend = backend
        self._placement = placement
        self._completion_thread = WorkerThread(f"{name}-completion")
        self._ring: BoundRing | None = None
        self._device: Device | None = None
        self._ready_ns = 0
        self._memory_read_s = 0.0
        self._growth_bytes: int | None = None
        self.memory: Memory | None = None

    # --- the dispatcher's thread ----------------------------------------------------------------

    def _set_up(self, prepare: Callable[[Backend], None]) -> None:
        backend, placement = self._stream_backend, self._placement
        device = self._device = placement.open_device()
        plan = None
        if placement.ring:
            plan = plan_ring(backend.processing, placement.max_rows, self._tuning.ring_slots)
        needs = dict(placement.needs)
        if plan is not None:
            needs["ring"] = plan.device_bytes
        self._read_memory()
        # Check before anything is allocated, so that the error names all needs together.
        if self.memory is not None:
            require_memory(device.name, self.memory, needs)
        ring = Ring(device, plan) if plan is not None else None
        # Before loading: the session is created on the ring's compute stream.
        if ring is not None:
            backend.use_stream(ring.compute.address, graphs=placement.graphs)
        prepare(backend)
        # After loading, which may find that the model does not batch: buckets need a batch.
        if ring is not None and plan is not None and backend.signature.batched:
            bound = BoundRing(self.name, ring, plan, backend, self._tuning)
            bound.bind(GRAPH_RUNS if placement.graphs else 1)
            self._ring = bound
        elif placement.ring:
            log.warning(
                Event.MODEL_WITHOUT_RING,
                instance=self.name,
                reason="expected a batch, and inputs and outputs of fixed shapes and sizes",
            )
        if self.memory is not None:
            self._growth_bytes = max(0, self.memory.free_bytes - device.memory().free_bytes)

    def _dispatch(self, ring: BoundRing, batch: RingBatch, completion: Call) -> None:
        submitted_ns = time.perf_counter_ns()
        try:
            ring.submit(batch)
        except Exception as raised:  # noqa: BLE001 - any error here is reported as fatal
            # It is unknown what was enqueued, so the slot can never be filled again.
            error = raised if isinstance(raised, Fatal) else Fatal(f"{self.name}: {raised}")
            completion.work = lambda: _raise(error)
        else:
            completion.work = lambda: self._complete(ring, batch, completion, submitted_ns)
        self._completion_thread.put(completion)
        self._read_memory()

    def _read_memory(self) -> None:
        device, now_s = self._device, time.monotonic()
        period_s = self._tuning.device_memory_period_s
        if device is None or device.shares_memory or now_s - self._memory_read_s < period_s:
            return
        self._memory_read_s = now_s
        self.memory = device.memory()

    def _unload(self) -> None:
        """Unload, and free streams and memory on the thread that allocated them."""
        try:
            super()._unload()
        finally:
            self._ring = self._device = None

    # --- the completion thread ------------------------------------------------------------------

    def _complete(
        self, ring: BoundRing, batch: RingBatch, completion: Call, submitted_ns: int
    ) -> Arrays:
        ring.wait(batch)
        ready_ns = time.perf_counter_ns()
        # A batch that was enqueued behind another one began when that one was ready.
        completion.compute_us = (ready_ns - max(submitted_ns, self._ready_ns)) // 1000
        self._ready_ns = ready_ns
        return ring.outputs(batch)

    # --- the event loop -------------------------------------------------------------------------

    def device_memory(self) -> DeviceSnapshot | None:
        device, memory = self._device, self.memory
        if device is None or memory is None:
            return None
        sizes = {"free": memory.free_bytes, "total": memory.total_bytes, **memory.used_bytes}
        return DeviceSnapshot(device.name, sizes)

    def device_growth(self) -> dict[str, int]:
        device, growth_bytes = self._device, self._growth_bytes
        return {} if device is None or growth_bytes is None else {device.name: growth_bytes}

    async def __aenter__(self) -> Self:
        self._completion_thread.start()
        try:
            return await super().__aenter__()
        except BaseException:
            self._completion_thread.close()
            raise

    async def __aexit__(self, *_: object) -> None:
        # The dispatcher ends first: its last runs still need the completion thread.
        await self._end()
        self._completion_thread.close()

    def gather(self, requests: Sequence[Request], *, fresh: bool = True) -> Arrays:
        """See `Instance.gather`; a `fresh` batch takes a slot until it has run or is discarded."""
        ring = self._ring
        rows = sum(request.rows for request in requests)
        if ring is None or not fresh or rows > ring.max_rows:
            return super().gather(requests, fresh=False)
        fit_inputs(requests, self._backend.signature)
        return ring.gather(requests, rows)

    def discard(self, inputs: Arrays) -> None:
        """Give up the result of `gather`, and free its slot."""
        if isinstance(inputs, RingBatch) and inputs.call is None:
            assert self._ring is not None
            self._ring.release(inputs)

    def submit_next(self, inputs: Arrays, is_in_time: Callable[[], bool]) -> bool:
        """Enqueue a batch behind the running one; see `Instance.submit_next`."""
        if not isinstance(inputs, RingBatch):
            return super().submit_next(inputs, is_in_time)
        self.submit(inputs)
        return True

    def _cancel(self, call: Call) -> None:
        """Cancel a run; this works on the CPU only, not for work enqueued on a device."""
        self._stream_backend.cancel()

    def submit(self, inputs: Arrays) -> Call:
        if not isinstance(inputs, RingBatch):
            return super().submit(inputs)
        if inputs.call is None:
            ring, batch = self._ring, inputs
            assert ring is not None
            completion = batch.call = Call(lambda: None)
            self._call(lambda: self._dispatch(ring, batch, completion))
            # Registered first: the slot is free before the caller that waits for answers resumes.
            completion.done.add_done_callback(lambda _: ring.release(batch))
            return completion
        return inputs.call


def _repeat_last(array: NDArray[np.uint8], stop: int, row_bytes: int, times: int) -> None:
    """Pad with copies of the last row, so that no rows of an earlier batch are run."""
    padded = array[stop : stop + times * row_bytes].reshape(times, row_bytes)
    padded[:] = array[stop - row_bytes : stop]


def _raise(error: Exception) -> None:
    raise error
