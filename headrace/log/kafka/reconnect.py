"""Reconnect back-off for addresses that could not be reached.

aiokafka has none: each of a process's clients retries whenever one of its tasks needs the broker,
hundreds of times a second in all while a broker is down, which costs a tenth of a core and meets
the returning broker with a storm.
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
    """Back-off that doubles with every failure, as in Kafka's clients.

    One object is shared by all clients of a process, so that each failed attempt counts for all.

    Source: `reconnect.backoff.ms` and `reconnect.backoff.max.ms` in Kafka's documentation of
    clients; the times and the 20 percent of jitter are the defaults there.

    Args:
        random_share: returns random numbers from 0 to 1.
    """

    def __init__(self, random_share: Callable[[], float] = random.random) -> None:
        self._random_share = random_share
        self._pause_s: dict[Address, float] = {}
        self._until_s: dict[Address, float] = {}

    def left_s(self, address: Address, now_s: float) -> float:
        """Return the seconds until the address may be tried; 0 if it may be tried now."""
        return max(0.0, self._until_s.get(address, now_s) - now_s)

    def failed(self, address: Address, now_s: float) -> None:
        """Record a failure to connect. Of concurrent attempts only one counts."""
        if self.left_s(address, now_s):
            return
        pause_s = min(2 * self._pause_s.get(address, FIRST_S / 2), LONGEST_S)
        jitter = 1 + JITTER * (2 * self._random_share() - 1)
        self._pause_s[address] = pause_s
        self._until_s[address] = now_s + pause_s * jitter

    def reached(self, address: Address) -> None:
        """Reset the back-off: the address answers."""
        self._pause_s.pop(address, None)
        self._until_s.pop(address, None)
