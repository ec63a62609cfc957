"""The event loop as a server: durations of its turns, for models that run on it.

A turn is the loop's work on requests that it reads together: reading, checking, batches, runs and
answers. T(n) is the time until the answers of n requests are encoded, U(n) until the loop can read
again; in between the answers are written and acknowledged. For a model as small as digits these two
make up nearly all of a request's latency, and its runs nearly nothing.

Occasionally a machine stalls a process for milliseconds. Stalls depend on elapsed time, not on the
turn that they hit: they are drawn by how long the loop works, and added to the turn.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from headrace.tools.replay.events import EventLoop, ModelKey, Turn
from headrace.tools.replay.service_times import ServiceTime, fitted

STALL_US = 1000.0
"""A turn that exceeds S(n) by more than this, and by more than S(n), was stalled."""


class Stalls(NamedTuple):
    """Observed stalls.

    Attributes:
        watched_us: duration of the observed work, without the stalls.
        seen: time of each stall within it, and its duration, in order of time.
    """

    watched_us: float = 0.0
    seen: Sequence[tuple[float, float]] = ()

    def drawn(self, chance: random.Random) -> Callable[[int], int]:
        """Return a function that gives the stall of each piece of work.

        It repeats the observed stalls cyclically from a random start.
        """
        if not self.seen:
            return lambda work_us: 0
        places = [at_us for at_us, _ in self.seen]
        sums = [0.0, *accumulate(length_us for _, length_us in self.seen)]
        now_us = chance.uniform(0.0, self.watched_us)

        def before(at_us: float) -> float:
            rounds, rest_us = divmod(at_us, self.watched_us)
            return rounds * sums[-1] + sums[bisect_left(places, rest_us)]

        def stalled(work_us: int) -> int:
            nonlocal now_us
            began_us, now_us = now_us, now_us + work_us
            return round(before(now_us) - before(began_us))

        return stalled


def apart_from_stalls(
    turns: Sequence[tuple[int, float]],
) -> tuple[list[tuple[int, float]], Stalls]:
    """Separate turns (size and duration, in order of time) into those without a stall, and the
    stalls.
    """
    usual = fitted(turns)
    free, seen, watched_us = [], [], 0.0
    for count, took_us in turns:
        usual_us = usual(count)
        if took_us - usual_us > max(STALL_US, usual_us):
            seen.append((watched_us + usual_us / 2, took_us - usual_us))
            watched_us += usual_us
        else:
            free.append((count, took_us))
            watched_us += took_us
    return free, Stalls(watched_us, tuple(seen))


class LoopTime(NamedTuple):
    """Durations of turns with requests of one model, in microseconds by number of requests.

    Attributes:
        answered: T(n), with the spread of single turns.
        busy: U(n).
        stalls: of the turns' work.
    """

    answered: ServiceTime
    busy: ServiceTime
    stalls: Stalls = Stalls()

    def drawn(self, chance: random.Random) -> Callable[[int], Turn]:
        """Return a function that gives successive turns; a slow turn delays T and U equally."""
        answered_us, stalled_us = self.answered.drawn(chance), self.stalls.drawn(chance)

        def turn(count: int) -> Turn:
            took_us = answered_us(count)
            took_us += stalled_us(took_us)
            rest_us = max(0, self.busy(count) - self.answered(count))
            return Turn(took_us, took_us + rest_us + stalled_us(rest_us))

        return turn

    def __str__(self) -> str:
        stalls = self.stalls
        held_up = f"{len(stalls.seen)} stalls in {stalls.watched_us / 1e6:.1f} s"
        return f"T(n) {self.answered}; U(n) {self.busy}; {held_up}"

    def capacity_per_s(self, most: int) -> float:
        """Return requests per second at the best turn size up to `most`."""
        return max(count / self.busy(count) for count in (1, most)) * 1e6


def event_loop(times: Mapping[ModelKey, LoopTime], chance: random.Random) -> EventLoop | None:
    """Return the loop that serves these versions; a turn takes the sum of its models' times."""
    if not times:
        return None
    turns = {key: each.drawn(chance) for key, each in times.items()}

    def turn(counts: Mapping[ModelKey, int]) -> Turn:
        parts = [turns[key](count) for key, count in counts.items()]
        return Turn(sum(one.answered_us for one in parts), sum(one.busy_us for one in parts))

    return EventLoop(tuple(times), turn)
