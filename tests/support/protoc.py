"""Descriptor sets of Protobuf, made by protoc in a process of its own.

grpc_tools is not imported by tests: its compiler is loaded into the process, where the library of
onnxruntime-extensions then aborts, or damages memory and fails later somewhere else.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def write_descriptors(directory: Path, source: str, written: str, *options: str) -> None:
    """Compile a file of a directory to a set of descriptors in it.

    Args:
        directory: of both files.
        source: name of the file with the messages.
        written: name of the set.
        options: of protoc.
    """
    places = [f"-I{directory}", f"--descriptor_set_out={directory / written}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", *places, *options, source]
    subprocess.run(command, check=True, timeout=60)
