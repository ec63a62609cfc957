"""An NVIDIA GPU as a device, using CuPy.

All calls come from the dispatcher's thread, except `synchronize`, which the completion thread
calls: ONNX Runtime keeps its CUDA graphs for each thread, and captures them anew on a second one
(docs/device.md). Streams are created without the default stream's implicit order, events sleep
instead of spinning, host blocks are pinned, and nothing is allocated once the ring is set up.

The kernel that widens an input is the twin of `headrace.device.widening`. There is one for each
pair of datatypes; it needs no headers, so that NVRTC alone compiles it. Each thread handles
elements of the target, one grid apart, so that writes are adjacent. The intrinsics with `_rn` keep
the compiler from fusing multiplication and addition, which would round once where NumPy rounds
twice. It is compiled for sm_80 and sm_90 in CI.

https://docs.cupy.dev/en/stable/reference/cuda.html
https://docs.nvidia.com/cuda/cuda-math-api
https://docs.nvidia.com/cuda/parallel-thread-execution
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from headrace.device.port import Block, Memory, Stream, StreamEvent, Widen
from headrace.device.widening import Widening
from headrace.errors import Fatal, NotLoadableHere
from headrace.tuning import TUNING, ModelTuning

KERNEL_NAME = "widen"

_LOADS = {
    "UINT8": ("unsigned char", "return (float)value;"),
    "FP16": (
        "unsigned short",
        'float wide; asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value)); return wide;',
    ),
    "BF16": ("unsigned short", "return __int_as_float((int)value << 16);"),
    "FP32": ("float", "return value;"),
}
_STORES = {
    "FP32": ("float", "return value;"),
    "FP16": (
        "unsigned short",
        'unsigned short bits; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); '
        "return bits;",
    ),
    "BF16": (
        "unsigned short",
        'unsigned short bits; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); '
        "return bits;",
    ),
}
_SOURCE = """
__device__ __forceinline__ float load({source} value) {{ {load} }}
__device__ __forceinline__ {target} store(float value) {{ {store} }}

extern "C" __global__ void {name}(
    const {source}* __restrict__ source, {target}* __restrict__ target,
    const float* __restrict__ scale, const float* __restrict__ offset,
    const long long count, const long long channels, const long long pixels,
    const int source_last, const int target_last, const int per_channel)
{{
    const long long step = (long long)gridDim.x * blockDim.x;
    const long long row = channels * pixels;
    for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += step) {{
        const long long within = at % row;
        const long long channel = target_last ? within % channels : within / pixels;
        const long long pixel = target_last ? within / channels : within % pixels;
        const long long from = at - within
            + (source_last ? pixel * channels + channel : channel * pixels + pixel);
        const int place = per_channel ? (int)channel : 0;
        target[at] = store(__fadd_rn(__fmul_rn(load(source[from]), scale[place]), offset[place]));
    }}
}}
"""


class KernelLayout(NamedTuple):
    """Layout of a row for the kernel: channels, pixels in each, and whether channels come last."""

    channels: int
    pixels: int
    source_last: bool
    target_last: bool


def make_kernel_source(widening: Widening) -> str:
    """Return the kernel for these datatypes, in CUDA C++."""
    source, load = _LOADS[widening.source]
    target, store = _STORES[widening.target]
    return _SOURCE.format(name=KERNEL_NAME, source=source, load=load, target=target, store=store)


def plan_kernel_layout(widening: Widening, row_shape: tuple[int, ...]) -> KernelLayout:
    """Return the layout of a row of the model's input, without the batch axis."""
    elements = 1
    for size in row_shape:
        elements *= size
    axis = widening.target_channels
    if not axis:
        return KernelLayout(1, elements, source_last=False, target_last=False)
    channels = row_shape[axis - 1]
    last = len(row_shape)
    return KernelLayout(
        channels,
        elements // channels,
        source_last=widening.source_channels == last,
        target_last=axis == last,
    )


class CudaDevice:
    """See `headrace.device.port.Device`. Construct it on the dispatcher's thread.

    Args:
        number: the GPU's number in CUDA.
        tuning: sizes of the kernels' grids.

    Raises:
        NotLoadableHere: CuPy is not installed, or there is no such GPU.
    """

    shares_memory = False

    def __init__(self, number: int, tuning: ModelTuning = TUNING.models) -> None:
        self._tuning = tuning
        self.name = f"cuda:{number}"
        try:
            import cupy
            import cupyx
        except ImportError as error:
            raise NotLoadableHere(
                f"{self.name}: expected CuPy, from the extra headrace[gpu]: {error}"
            ) from error
        # CuPy can be imported without a GPU.
        count = cupy.cuda.runtime.getDeviceCount() if cupy.cuda.is_available() else 0
        if number >= count:
            raise NotLoadableHere(f"{self.name}: expected a GPU of this number, got {count}")
        self._cupy: Any = cupy
        self._cupyx: Any = cupyx
        cupy.cuda.Device(number).use()

    def stream(self, name: str) -> Stream:
        with self._fatal():
            handle = self._cupy.cuda.Stream(non_blocking=True)
        return Stream(name, handle, handle.ptr)

    def event(self, name: str) -> StreamEvent:
        with self._fatal():
            return StreamEvent(name, self._cupy.cuda.Event(block=True, disable_timing=True))

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

    def widening(self, widening: Widening, row_shape: tuple[int, ...]) -> Widen:
        cupy = self._cupy
        threads, max_blocks = self._tuning.kernel_block_threads, self._tuning.kernel_max_blocks
        layout = plan_kernel_layout(widening, row_shape)
        per_channel = max(len(widening.scale), len(widening.offset)) > 1
        size = layout.channels if per_channel else 1
        with self._fatal():
            kernel = cupy.RawKernel(make_kernel_source(widening), KERNEL_NAME)
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

    def record(self, event: StreamEvent, stream: Stream) -> None:
        with self._fatal():
            event.handle.record(stream.handle)

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        with self._fatal():
            stream.handle.wait_event(event.handle)

    def synchronize(self, event: StreamEvent) -> None:
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
            raise NotLoadableHere(f"{self.name}: {error}") from error
