"""The CPU as a device: copies are made at once, and events are nothing, since all has happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.device.port import Block, Event, Memory, Stream


class CpuDevice:
    """See `headrace.device.port.Device`. Any thread may call it."""

    name = "cpu"
    shares_memory = True

    def stream(self, name: str) -> Stream:
        return Stream(name)

    def event(self, name: str) -> Event:
        return Event(name)

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

    def record(self, event: Event, stream: Stream) -> None:
        pass

    def wait(self, stream: Stream, event: Event) -> None:
        pass

    def synchronize(self, event: Event) -> None:
        pass

    def memory(self) -> Memory:
        """Of no device of its own."""
        return Memory(0, 0, {})
