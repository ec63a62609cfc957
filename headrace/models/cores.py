"""Cores of a process: which of the machine's they are, and the instances that are pinned to them.

Processes that share a machine, as those of `headrace run --replicas` do, each have a part of its
cores (`executor.cores`), so that together they start as many threads as one process would, and pin
their instances to different cores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from headrace.errors import NotLoadableHere


class Cores:
    """Cores of a process, with the number of instances on each. Thread-safe.

    Args:
        available: core numbers of the operating system.
    """

    def __init__(self, available: Iterable[int]) -> None:
        self._reserved = dict.fromkeys(sorted(available), 0)
        self._lock = threading.Lock()

    @classmethod
    def of_process(cls, part: str) -> Cores:
        """Return the cores of this process, where the system reports them (Linux).

        Args:
            part: see `part_of`.
        """
        affinity = getattr(os, "sched_getaffinity", None)
        return cls(part_of(affinity(0), part) if affinity else ())

    def __len__(self) -> int:
        """Number of cores; 0 if threads cannot be pinned."""
        return len(self._reserved)

    def reserve(self, count: int, beside: frozenset[int] = frozenset()) -> frozenset[int]:
        """Reserve the cores with the fewest instances on them, and return their numbers.

        Args:
            count: number of cores.
            beside: cores to leave out.

        Raises:
            NotLoadableHere: there are not enough cores.
        """
        with self._lock:
            free = [core for core in self._reserved if core not in beside]
            if count > len(free):
                raise NotLoadableHere(
                    f"pinned: expected {count} cores for each instance, apart from those of the "
                    f"others; got {len(free)} of {len(self._reserved)}"
                )
            chosen = frozenset(sorted(free, key=lambda core: self._reserved[core])[:count])
            for core in chosen:
                self._reserved[core] += 1
            return chosen

    def release(self, cores: Iterable[int]) -> None:
        """Release cores that `reserve` reserved."""
        with self._lock:
            for core in cores:
                self._reserved[core] -= 1


def available_cores() -> range | set[int]:
    """Return the cores on which the calling thread may run, by number where these are known."""
    # Affinity exists on Linux only; in a container with pinned cores it is smaller than the
    # machine.
    affinity = getattr(os, "sched_getaffinity", None)
    return affinity(0) if affinity else range(os.cpu_count() or 1)


def part_of(cores: Iterable[int], part: str) -> list[int]:
    """Return a part of cores.

    Args:
        cores: numbers of cores.
        part: `2/4` for the second of four parts. They are disjoint and together all cores, unless
            there are more parts than cores, which then have one core each.
    """
    number, of = map(int, part.split("/"))
    ordered = sorted(cores)
    start = (number - 1) * len(ordered) // of
    return ordered[start : max(start + 1, number * len(ordered) // of)]


def pin_thread(cores: Iterable[int]) -> None:
    """Pin the calling thread, and all threads that it starts, to these cores."""
    os.sched_setaffinity(0, cores)
