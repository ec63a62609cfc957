"""Pauses between retries."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

_MOST_DOUBLINGS = 60  # beyond any limit in seconds; a larger exponent would overflow


@dataclass(frozen=True)
class Backoff:
    """Pauses that double with each failure, up to a limit, with jitter.

    The object keeps no state: the caller counts its attempts and supplies the random number, so the
    same attempt always has the same pause in a test.

    Attributes:
        first_s: the pause after the first failure.
        longest_s: the limit, before jitter.
        jitter: the largest deviation, as a fraction of the pause. It keeps clients that failed
            together from retrying together.
    """

    first_s: float
    longest_s: float
    jitter: float = 0.2

    def pause_s(self, attempt: int, random_share: float = 0.5) -> float:
        """Return the pause after a failed attempt.

        Args:
            attempt: the number of failures before this one.
            random_share: a random number from 0 to 1; 0.5 gives the pause without jitter.
        """
        pause_s = min(self.first_s * 2.0 ** min(attempt, _MOST_DOUBLINGS), self.longest_s)
        return pause_s * (1 + self.jitter * (2 * random_share - 1))


class Pauses:
    """The pauses of one retry loop, one after another."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._failures = 0

    def next_s(self) -> float:
        """Count a failed attempt, and return the pause after it."""
        pause_s = self._backoff.pause_s(self._failures, random.random())  # noqa: S311 - no secret
        self._failures += 1
        return pause_s

    async def sleep(self) -> None:
        """Count a failed attempt, and pause."""
        await asyncio.sleep(self.next_s())

    def reset(self) -> None:
        """Begin with the first pause again, after a success."""
        self._failures = 0
