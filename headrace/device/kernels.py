"""The source of the CUDA kernel that widens an input: the twin of `headrace.device.widening`.

One kernel for each pair of datatypes; it needs no headers, so that NVRTC alone compiles it. Each
thread handles elements of the target, one grid apart, so that writes are adjacent. The intrinsics
with `_rn` keep the compiler from fusing multiplication and addition, which would round once where
NumPy rounds twice.

https://docs.nvidia.com/cuda/cuda-math-api, https://docs.nvidia.com/cuda/parallel-thread-execution

Experimental: compiled for sm_80 and sm_90 in CI, and not yet run on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.device.widening import Widening

NAME = "widen"

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


class Layout(NamedTuple):
    """Layout of a row for the kernel: channels, pixels in each, and whether channels come last."""

    channels: int
    pixels: int
    source_last: bool
    target_last: bool


def source_of(widening: Widening) -> str:
    """Return the kernel for these datatypes, in CUDA C++."""
    source, load = _LOADS[widening.source]
    target, store = _STORES[widening.target]
    return _SOURCE.format(name=NAME, source=source, load=load, target=target, store=store)


def layout_of(widening: Widening, row_shape: tuple[int, ...]) -> Layout:
    """Return the layout of a row of the model's input, without the batch axis."""
    elements = 1
    for size in row_shape:
        elements *= size
    axis = widening.target_channels
    if not axis:
        return Layout(1, elements, source_last=False, target_last=False)
    channels = row_shape[axis - 1]
    last = len(row_shape)
    return Layout(
        channels,
        elements // channels,
        source_last=widening.source_channels == last,
        target_last=axis == last,
    )
