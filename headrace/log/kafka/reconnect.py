"""How long an address that could not be reached is left alone.

aiokafka has no such pause: each of a process's clients tries again whenever one of its tasks wants
something, hundreds of times a second in all while a broker is away, which costs a tenth of a core
and meets the broker that comes back with a storm.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, TypeAlias

FIRST_S: Final = 0.05
LONGEST_S: Final = 1.0
JITTER: Final = 0.2

Address: TypeAlias = tuple[str, int]


class ReconnectBackoff:
    """Pauses that double with every failure, as Kafka's clients make them.

    One for all clients of a process: what one of them found out, the others need not try.

    Source: `reconnect.backoff.ms` and `reconnect.backoff.max.ms` in Kafka's documentation of
    clients; the times and the 20 percent of jitter are the defaults there.

    Args:
        random_share: gives numbers of 0 to 1.
    """

    def __init__(self, random_share: Callable[[], float] = random.random) -> None:
        self._random_share = random_share
        self._pause_s: dict[Address, float] = {}
        self._until_s: dict[Address, float] = {}

    def left_s(self, address: Address, now_s: float) -> float:
        """How long it is to be left alone from now on; 0: it may be tried."""
        return max(0.0, self._until_s.get(address, now_s) - now_s)

    def failed(self, address: Address, now_s: float) -> None:
        """It could not be reached. Of tries that were under way together, one counts."""
        if self.left_s(address, now_s):
            return
        pause_s = min(2 * self._pause_s.get(address, FIRST_S / 2), LONGEST_S)
        jitter = 1 + JITTER * (2 * self._random_share() - 1)
        self._pause_s[address] = pause_s
        self._until_s[address] = now_s + pause_s * jitter

    def reached(self, address: Address) -> None:
        """It answers."""
        self._pause_s.pop(address, None)
        self._until_s.pop(address, None)
