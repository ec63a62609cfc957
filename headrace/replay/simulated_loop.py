"""The event loop as a server: what its turns take, for models whose runs are made on it.

A turn is what the loop does with requests that it reads together: reading, checking, batches, runs
and answers. T(n) is the time until the answers of n requests are encoded, U(n) until the loop can
read again; between the two the answers are written and settled. For a model as short as digits the
two are nearly all of a request's latency, and its runs nearly nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

from headrace.replay.events import EventLoop, ModelKey, Turn
from headrace.replay.service_times import ServiceTime


class LoopTime(NamedTuple):
    """Of turns with the requests of one model, in microseconds by their number.

    Attributes:
        answered: T(n), with the spread of single turns.
        busy: U(n).
    """

    answered: ServiceTime
    busy: ServiceTime

    def drawn(self, chance: random.Random) -> Callable[[int], Turn]:
        """One turn after the other; a slow one is late with all that it does by as much."""
        answered_us = self.answered.drawn(chance)

        def turn(count: int) -> Turn:
            took_us = answered_us(count)
            return Turn(took_us, took_us + max(0, self.busy(count) - self.answered(count)))

        return turn

    def __str__(self) -> str:
        return f"T(n) {self.answered}; U(n) {self.busy}"

    def capacity_per_s(self, most: int) -> float:
        """Requests a second in the best turns of up to so many."""
        return max(count / self.busy(count) for count in (1, most)) * 1e6


def event_loop(times: Mapping[ModelKey, LoopTime], chance: random.Random) -> EventLoop | None:
    """The loop that serves these versions, each turn with the time of all that is in it."""
    if not times:
        return None
    turns = {key: each.drawn(chance) for key, each in times.items()}

    def turn(counts: Mapping[ModelKey, int]) -> Turn:
        parts = [turns[key](count) for key, count in counts.items()]
        return Turn(sum(one.answered_us for one in parts), sum(one.busy_us for one in parts))

    return EventLoop(tuple(times), turn)
