"""A wall clock of a whole process that tests shift.

A file holds the shift in nanoseconds. It is mapped into memory, so that a change applies at once,
and reading it costs next to nothing. Monotonic clocks stay as they are, as they do when somebody
sets a machine's clock. What has imported the functions themselves keeps the unshifted ones:
OpenTelemetry's times of spans, and aiokafka's timestamps where a record has none.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path


def shift_wall_clock(path: Path) -> None:
    """Shift `time.time` and `time.time_ns` by what the file holds whenever they are called."""
    with path.open("rb") as file:
        shift = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    unshifted_ns = time.time_ns

    def shifted_ns() -> int:
        return unshifted_ns() + int.from_bytes(shift[:], "little", signed=True)

    def shifted_s() -> float:
        return shifted_ns() / 1e9

    time.time_ns = shifted_ns
    time.time = shifted_s
