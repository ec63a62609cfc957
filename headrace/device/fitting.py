"""Whether what a model needs of a device's memory is free there."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.device.port import Memory
from headrace.errors import ConfigurationError

RESERVE_BYTES = 512 * 1024 * 1024
"""For what nobody asks for by name: the context, the workspaces of cuDNN, the arena's rounding."""

_MIB = 1024 * 1024


def require(device: str, memory: Memory, needs: Mapping[str, int]) -> None:
    """See that a model fits before it is loaded, where running out would end other models too.

    Args:
        device: its name.
        memory: of it.
        needs: bytes, by what they are for.

    Raises:
        ConfigurationError: with all figures.
    """
    needed = {**needs, "reserve": RESERVE_BYTES}
    total = sum(needed.values())
    if total <= memory.free_bytes:
        return
    parts = ", ".join(f"{name} {_mib(size)}" for name, size in needed.items())
    used = ", ".join(f"{name} {_mib(size)}" for name, size in memory.used_bytes.items())
    raise ConfigurationError(
        f"memory of {device}: expected {_mib(total)} free ({parts}), got {_mib(memory.free_bytes)} "
        f"of {_mib(memory.total_bytes)}" + (f", ours so far: {used}" if used else "")
    )


def _mib(size_bytes: int) -> str:
    return f"{-(-size_bytes // _MIB)} MiB"
