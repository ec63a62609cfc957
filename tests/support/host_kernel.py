"""The CUDA kernel's source run on the host, by a C++ compiler and what CUDA's own words stand for.

It shows that the kernel goes to the right places and does the right arithmetic, not that a GPU
does. Sources with instructions of a GPU's in them cannot be run so.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.device.cuda import KERNEL_NAME, KernelLayout

THREADS, GROUPS = 4, 3
"""Fewer than there are elements, so that a thread takes several."""

_SHIM = f"""
#include <cstring>
#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
struct Place {{ unsigned x; }};
static Place blockIdx, threadIdx, blockDim = {{ {THREADS} }}, gridDim = {{ {GROUPS} }};
static float __fmul_rn(float a, float b) {{ return a * b; }}
static float __fadd_rn(float a, float b) {{ return a + b; }}
static float __int_as_float(int bits) {{ float f; std::memcpy(&f, &bits, 4); return f; }}
"""
_LAUNCH = """
extern "C" void launch(const void* source, void* target, const float* scale, const float* offset,
    long long count, long long channels, long long pixels, int a, int b, int c)
{
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
            KERNEL((SOURCE*)source, (TARGET*)target, scale, offset, count, channels, pixels,
                a, b, c);
}
"""


class HostKernel:
    """A kernel that was compiled for the host; skips the test where there is no compiler.

    Args:
        directory: to compile in.
        code: in CUDA C++.
        source, target: the C++ types of its first two arguments.
    """

    def __init__(self, directory: Path, code: str, source: str, target: str) -> None:
        compiler = shutil.which("c++")
        if compiler is None:
            pytest.skip("no C++ compiler on this machine")
        (directory / "kernel.cpp").write_text(_SHIM + code + _LAUNCH)
        subprocess.run(
            [
                *(
                    compiler,
                    "-shared",
                    "-fPIC",
                    "-O1",
                    "-ffp-contract=off",
                    f"-DKERNEL={KERNEL_NAME}",
                ),
                *(f"-DSOURCE={source}", f"-DTARGET={target}", "kernel.cpp", "-o", "kernel.so"),
            ],
            cwd=directory,
            check=True,
            timeout=60,
        )
        self._library = ctypes.CDLL(str(directory / "kernel.so"))

    def __call__(
        self,
        given: NDArray[Any],
        target: NDArray[Any],
        factors: tuple[NDArray[np.float32], NDArray[np.float32]],
        layout: KernelLayout,
    ) -> None:
        scale, offset = factors
        self.launch(
            [each.ctypes.data for each in (given, target, scale, offset)],
            [target.size, layout.channels, layout.pixels],
            [layout.source_last, layout.target_last, scale.size > 1],
        )

    def launch(self, addresses: list[int], numbers: list[int], flags: list[int]) -> None:
        """The kernel's arguments in its own order."""
        self._library.launch(
            *(ctypes.c_void_p(each) for each in addresses),
            *(ctypes.c_longlong(each) for each in numbers),
            *(ctypes.c_int(each) for each in flags),
        )
