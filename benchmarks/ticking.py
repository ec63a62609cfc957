"""Due times of requests from a separate process: a Poisson process in real time.

    python -m benchmarks.ticking RATE_PER_S SECONDS SEED

Each tick is eight bytes on standard output: the moment when it was due, in epoch microseconds,
little-endian. Ticks that are due together are written together.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from headrace.tools.bench.load import PoissonArrivals

TICK_BYTES = 8
STARTS_AFTER_S = 0.2


def tick(per_s: float, seconds: float, seed: int, descriptor: int) -> None:
    """Write ticks for `seconds`."""
    arrivals = PoissonArrivals(per_s, seconds, seed)
    start_us = time.time_ns() // 1000 + int(STARTS_AFTER_S * 1e6)
    while (next_s := arrivals.next_s()) is not None:
        now_s = time.time_ns() / 1e9 - start_us / 1e6
        if next_s > now_s:
            time.sleep(next_s - now_s)
            continue
        due_us = start_us + (np.array(arrivals.due(now_s)) * 1e6).astype("<i8")
        os.write(descriptor, due_us.tobytes())


if __name__ == "__main__":
    tick(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.stdout.fileno())
