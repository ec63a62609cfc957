"""The clock of a whole process that the chaos suite sets back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SHIFTING = """
import sys
from pathlib import Path

from headrace.clock import wall_clock_us
from tests.chaos.shifted_clock import shift_wall_clock

before_us = wall_clock_us()
shift_wall_clock(Path(sys.argv[1]))
print((wall_clock_us() - before_us) / 1e6)
"""


def test_clock_of_imported_modules_is_shifted(tmp_path: Path) -> None:
    """Processes are forked with all modules imported, and their clock is set after that."""
    shift = tmp_path / "clock"
    shift.write_bytes((-1_000_000 * 10**9).to_bytes(8, "little", signed=True))

    done = subprocess.run(
        [sys.executable, "-c", SHIFTING, str(shift)], capture_output=True, text=True, check=True
    )

    assert -1_000_000 <= float(done.stdout) < -900_000
