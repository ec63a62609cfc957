"""Memory that Python objects hold."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable


def held_bytes_of(work: Callable[[], None]) -> int:
    """Return the bytes of all objects that were made by the work and outlive it."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def peak_bytes_of(work: Callable[[], object]) -> int:
    """Return the most bytes that all objects made by the work took at one time."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
