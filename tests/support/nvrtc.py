"""NVIDIA's runtime compiler, which needs no GPU, from its wheel."""

from __future__ import annotations

import ctypes
from importlib import metadata
from pathlib import Path

import pytest

WHEEL = "nvidia-cuda-nvrtc-cu12"


class CompileError(Exception):
    """The message of the compiler."""


def compile_cuda(source: str, architecture: str) -> bytes:
    """Machine code for an architecture such as `sm_90`; skips the test where there is no compiler.

    Raises:
        CompileError: with the compiler's log.
    """
    nvrtc = _library()
    program = ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
    )
    assert created == 0
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        if nvrtc.nvrtcCompileProgram(program, len(options), options):
            raise CompileError(_text(nvrtc, program, "ProgramLog").decode())
        return _text(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{what}")(program, text) == 0
    return text.raw


def _library() -> ctypes.CDLL:
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"{WHEEL} is not installed: it is for Linux on x86-64 only")
    [path] = [each for each in files if each.name.startswith("libnvrtc.so")]
    return ctypes.CDLL(str(Path(str(path.locate()))))
