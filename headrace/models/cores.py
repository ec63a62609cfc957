"""Assignment of cores to pinned instances."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from headrace.errors import ConfigurationError


class Cores:
    """Cores of a process, with the number of instances on each. Thread-safe.

    Args:
        available: core numbers of the operating system.
    """

    def __init__(self, available: Iterable[int]) -> None:
        self._taken = dict.fromkeys(sorted(available), 0)
        self._lock = threading.Lock()

    @classmethod
    def of_process(cls) -> Cores:
        """Return the cores that this process may run on, where the system reports them (Linux)."""
        affinity = getattr(os, "sched_getaffinity", None)
        return cls(affinity(0) if affinity else ())

    def __len__(self) -> int:
        """Number of cores; 0 if threads cannot be pinned."""
        return len(self._taken)

    def take(self, count: int, beside: frozenset[int] = frozenset()) -> frozenset[int]:
        """Reserve the cores with the fewest instances on them, and return their numbers.

        Args:
            count: number of cores.
            beside: cores to leave out.

        Raises:
            ConfigurationError: there are not enough cores.
        """
        with self._lock:
            free = [core for core in self._taken if core not in beside]
            if count > len(free):
                raise ConfigurationError(
                    f"pinned: expected {count} cores for each instance, apart from those of the "
                    f"others; got {len(free)} of {len(self._taken)}"
                )
            chosen = frozenset(sorted(free, key=lambda core: self._taken[core])[:count])
            for core in chosen:
                self._taken[core] += 1
            return chosen

    def give_back(self, cores: Iterable[int]) -> None:
        """Release cores that `take` reserved."""
        with self._lock:
            for core in cores:
                self._taken[core] -= 1


def keep_to(cores: Iterable[int]) -> None:
    """Pin the calling thread, and all threads that it starts, to these cores."""
    os.sched_setaffinity(0, cores)
