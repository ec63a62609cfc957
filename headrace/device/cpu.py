"""The CPU as a device: copies are synchronous, and events do nothing, since all work is done."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.device.port import Block, Memory, Stream, StreamEvent, Widen
from headrace.device.widening import Widening, source_shape, widen
from headrace.protocol.tensors import DATATYPES


class CpuDevice:
    """See `headrace.device.port.Device`. Any thread may call it."""

    name = "cpu"
    shares_memory = True

    def stream(self, name: str) -> Stream:
        return Stream(name)

    def event(self, name: str) -> StreamEvent:
        return StreamEvent(name)

    def host_block(self, name: str, size_bytes: int) -> Block:
        array = np.zeros(max(1, size_bytes), np.uint8)
        return Block(name, size_bytes, array.ctypes.data, array, array)

    device_block = host_block

    def copy(self, source: Block, target: Block, size_bytes: int, stream: Stream) -> None:
        assert source.array is not None
        assert target.array is not None
        target.array[:size_bytes] = source.array[:size_bytes]

    def launch(
        self,
        work: Callable[[], None],
        stream: Stream,
        *,
        reads: Sequence[Block],
        writes: Sequence[Block],
    ) -> None:
        work()

    def widening(self, widening: Widening, row_shape: tuple[int, ...]) -> Widen:
        source_dtype = DATATYPES[widening.source].dtype
        target_dtype = DATATYPES[widening.target].dtype
        source_row = source_shape(widening, (0, *row_shape))[1:]

        def run(source: Block, target: Block, rows: int) -> None:
            widen(
                widening,
                view_block(source, source_dtype, (rows, *source_row)),
                view_block(target, target_dtype, (rows, *row_shape)),
            )

        return run

    def record(self, event: StreamEvent, stream: Stream) -> None:
        pass

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        pass

    def synchronize(self, event: StreamEvent) -> None:
        pass

    def memory(self) -> Memory:
        """Return zeros: the CPU has no device memory of its own."""
        return Memory(0, 0, {})


def view_block(block: Block, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the beginning of a host block as an array."""
    assert block.array is not None
    size_bytes = math.prod(shape) * dtype.itemsize
    return block.array[:size_bytes].view(dtype).reshape(shape)
