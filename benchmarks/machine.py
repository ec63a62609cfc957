"""Description of the machine and the versions, for the results."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import headrace

PACKAGES = ("aiokafka", "msgspec", "numpy", "onnxruntime", "uvloop")


def describe_machine() -> dict[str, Any]:
    """Return processor, available cores, memory, kernel, Python, packages and commit."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "headrace": headrace.__version__,
        "commit": _commit(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _cpu_model() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def versions_of(python: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """Return versions of packages in another environment; empty if there is no such environment."""
    if not python.exists():
        return {}
    code = (
        "import importlib.metadata as m, sys\n"
        "for name in sys.argv[1:]: print(name, m.version(name))"
    )
    found = subprocess.run(
        [python, "-c", code, *packages], capture_output=True, text=True, check=False
    )
    return dict(line.split() for line in found.stdout.splitlines())
