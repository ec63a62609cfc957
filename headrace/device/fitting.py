"""Check that a device has enough free memory for a model."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.device.port import Memory
from headrace.errors import ConfigurationError
from headrace.tuning import TUNING

_MIB = 1024 * 1024


def require(
    device: str,
    memory: Memory,
    needs: Mapping[str, int],
    reserve_bytes: int = TUNING.models.device_reserve_bytes,
) -> None:
    """Raise if a model does not fit, before it is loaded: running out would end other models too.

    Args:
        device: its name.
        memory: its memory.
        needs: bytes, by purpose.
        reserve_bytes: free memory that is left over for what is not requested explicitly.

    Raises:
        ConfigurationError: with all figures.
    """
    needed = {**needs, "reserve": reserve_bytes}
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
