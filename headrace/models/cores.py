"""Cores for instances that are to keep to their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from headrace.errors import ConfigurationError


class Cores:
    """The cores of a process, and how many instances are on each. Any thread may ask.

    Args:
        available: numbers as the operating system has them.
    """

    def __init__(self, available: Iterable[int]) -> None:
        self._taken = dict.fromkeys(sorted(available), 0)
        self._lock = threading.Lock()

    @classmethod
    def of_process(cls) -> Cores:
        """Those that this process may run on, where the operating system says which (Linux)."""
        affinity = getattr(os, "sched_getaffinity", None)
        return cls(affinity(0) if affinity else ())

    def __len__(self) -> int:
        """How many there are; 0 where threads cannot be pinned."""
        return len(self._taken)

    def take(self, count: int, beside: frozenset[int] = frozenset()) -> frozenset[int]:
        """The cores that the fewest others are on.

        Args:
            count: how many.
            beside: cores that must not be among them.

        Raises:
            ConfigurationError: there are not so many.
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
        """Nobody is on them any more who was."""
        with self._lock:
            for core in cores:
                self._taken[core] -= 1


def keep_to(cores: Iterable[int]) -> None:
    """Have the calling thread, and all threads that it begins, run on these cores only."""
    os.sched_setaffinity(0, cores)
