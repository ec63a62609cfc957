"""The CUDA kernel, as far as it can be judged without a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.device.cuda import KernelLayout, make_kernel_source, plan_kernel_layout
from headrace.device.widening import SOURCES, TARGETS, Widening
from headrace.protocol.tensors import DATATYPES
from tests.support.host_kernel import HostKernel
from tests.support.nvrtc import CompileError, compile_cuda
from tests.support.widenings import CASES, expected, given

HOST_TYPES = {"UINT8": "unsigned char", "BF16": "unsigned short", "FP32": "float"}
FOR_THE_HOST = [
    name
    for name, case in CASES.items()
    if case.widening.source in HOST_TYPES and case.widening.target == "FP32"
]
ELF = b"\x7fELF"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_widening_kernel_compiles(source: str, target: str, architecture: str) -> None:
    """For every pair of datatypes, to machine code of the GPUs of data centres."""
    code = compile_cuda(make_kernel_source(Widening(source, target)), architecture)
    assert code.startswith(ELF)


def test_kernel_compiler_reports_error() -> None:
    """The test above would fail on a kernel that is not one."""
    with pytest.raises(CompileError, match="identifier"):
        compile_cuda('extern "C" __global__ void widen() { nothing(); }', "sm_90")


@pytest.mark.parametrize("name", FOR_THE_HOST)
def test_widening_kernel_gives_expected_bits(name: str, tmp_path: Path) -> None:
    """Run on the host, thread by thread: the same cases that NumPy's form is held to."""
    case = CASES[name]
    widening = case.widening
    kernel = HostKernel(
        tmp_path, make_kernel_source(widening), HOST_TYPES[widening.source], "float"
    )
    source = given(case)
    target = np.empty(case.shape, DATATYPES[widening.target].dtype)
    channels = case.shape[widening.target_channels] if widening.target_channels else 1
    many = max(len(widening.scale), len(widening.offset)) > 1
    size = channels if many else 1
    scale, offset = (
        np.ascontiguousarray(np.broadcast_to(np.array(values, np.float32), size))
        for values in (widening.scale, widening.offset)
    )

    kernel(source, target, (scale, offset), plan_kernel_layout(widening, case.shape[1:]))

    assert target.tobytes() == expected(case, source).tobytes()


def test_row_without_channels_is_one_channel() -> None:
    """Every element is a pixel of the only channel."""
    assert plan_kernel_layout(Widening("UINT8", "FP32"), (3, 4)) == KernelLayout(
        1, 12, source_last=False, target_last=False
    )
