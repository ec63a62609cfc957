"""An NVIDIA GPU as a device, using CuPy.

Experimental: it has not run on a GPU yet. All calls come from the dispatcher's thread, except
`synchronize`, which the completion thread calls. Streams are created without the default stream's
implicit order, events sleep instead of spinning, host blocks are pinned, and nothing is allocated
once the ring is set up.

https://docs.cupy.dev/en/stable/reference/cuda.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from headrace.device.kernels import NAME, layout_of, source_of
from headrace.device.port import Block, Event, Memory, Stream, Widen
from headrace.device.widening import Widening
from headrace.errors import ConfigurationError, Fatal
from headrace.tuning import TUNING, ModelTuning


class CudaDevice:
    """See `headrace.device.port.Device`. Construct it on the dispatcher's thread.

    Args:
        number: the GPU's number in CUDA.
        tuning: sizes of the kernels' grids.

    Raises:
        ConfigurationError: CuPy is not installed, or there is no such GPU.
    """

    shares_memory = False

    def __init__(self, number: int, tuning: ModelTuning = TUNING.models) -> None:
        self._tuning = tuning
        self.name = f"cuda:{number}"
        try:
            import cupy
            import cupyx
        except ImportError as error:
            raise ConfigurationError(
                f"{self.name}: expected CuPy, from the extra headrace[gpu]: {error}"
            ) from error
        # CuPy can be imported without a GPU.
        count = cupy.cuda.runtime.getDeviceCount() if cupy.cuda.is_available() else 0
        if number >= count:
            raise ConfigurationError(f"{self.name}: expected a GPU of this number, got {count}")
        self._cupy: Any = cupy
        self._cupyx: Any = cupyx
        cupy.cuda.Device(number).use()

    def stream(self, name: str) -> Stream:
        with self._fatal():
            handle = self._cupy.cuda.Stream(non_blocking=True)
        return Stream(name, handle, handle.ptr)

    def event(self, name: str) -> Event:
        with self._fatal():
            return Event(name, self._cupy.cuda.Event(block=True, disable_timing=True))

    def host_block(self, name: str, size_bytes: int) -> Block:
        with self._fatal():
            array = self._cupyx.zeros_pinned(max(1, size_bytes), np.uint8)
        return Block(name, size_bytes, array.ctypes.data, array, array)

    def device_block(self, name: str, size_bytes: int) -> Block:
        with self._fatal():
            array = self._cupy.zeros(max(1, size_bytes), np.uint8)
            # The zeros are written on the default stream, which no other stream waits for.
            self._cupy.cuda.get_current_stream().synchronize()
        return Block(name, size_bytes, array.data.ptr, array, None)

    def copy(self, source: Block, target: Block, size_bytes: int, stream: Stream) -> None:
        with self._fatal():
            if source.array is not None:
                target.memory.data.copy_from_host_async(source.address, size_bytes, stream.handle)
            elif target.array is not None:
                source.memory.data.copy_to_host_async(target.address, size_bytes, stream.handle)
            else:
                target.memory.data.copy_from_device_async(
                    source.memory.data, size_bytes, stream.handle
                )

    def launch(
        self,
        work: Callable[[], None],
        stream: Stream,
        *,
        reads: Sequence[Block],
        writes: Sequence[Block],
    ) -> None:
        with self._fatal(), stream.handle:
            work()

    def widening(self, widening: Widening, row_shape: tuple[int, ...], stream: Stream) -> Widen:
        cupy = self._cupy
        threads, max_blocks = self._tuning.kernel_block_threads, self._tuning.kernel_max_blocks
        layout = layout_of(widening, row_shape)
        per_channel = max(len(widening.scale), len(widening.offset)) > 1
        size = layout.channels if per_channel else 1
        with self._fatal():
            kernel = cupy.RawKernel(source_of(widening), NAME)
            kernel.compile()
            scale, offset = (
                cupy.asarray(
                    np.ascontiguousarray(np.broadcast_to(np.array(values, np.float32), size))
                )
                for values in (widening.scale, widening.offset)
            )
            cupy.cuda.get_current_stream().synchronize()

        def run(source: Block, target: Block, rows: int) -> None:
            count = rows * layout.channels * layout.pixels
            blocks = min(max_blocks, -(-count // threads))
            numbers = (np.int64(count), np.int64(layout.channels), np.int64(layout.pixels))
            flags = (layout.source_last, layout.target_last, per_channel)
            arguments = (source.memory, target.memory, scale, offset, *numbers)
            kernel((blocks,), (threads,), (*arguments, *(np.int32(flag) for flag in flags)))

        return run

    def record(self, event: Event, stream: Stream) -> None:
        with self._fatal():
            event.handle.record(stream.handle)

    def wait(self, stream: Stream, event: Event) -> None:
        with self._fatal():
            stream.handle.wait_event(event.handle)

    def synchronize(self, event: Event) -> None:
        with self._fatal():
            event.handle.synchronize()

    def memory(self) -> Memory:
        with self._fatal():
            free_bytes, total_bytes = self._cupy.cuda.runtime.memGetInfo()
        pool = self._cupy.get_default_memory_pool()
        return Memory(free_bytes, total_bytes, {"cupy": pool.total_bytes()})

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """Translate CUDA errors. They stay with the context: every later call fails as well."""
        runtime = self._cupy.cuda
        try:
            yield
        except (runtime.runtime.CUDARuntimeError, runtime.driver.CUDADriverError) as error:
            raise Fatal(f"{self.name}: {error}") from error
        except (runtime.memory.OutOfMemoryError, runtime.compiler.CompileException) as error:
            raise ConfigurationError(f"{self.name}: {error}") from error
