"""Which requests would be answered too late, told before they wait for that.

The end of a request is predicted: what goes before it, over the pace at which the model's queue
has been getting shorter, and its own run. The pace is learned from the batches that were closed
while more waited behind them; so it includes whatever else the process does, and as long as there
was no backlog there is none and nothing is refused. Prediction of this kind: Clockwork (Gujarati
et al., 2020), in whose words a request is refused before it is run, never after.
"""

from __future__ import annotations

from headrace.errors import Code
from headrace.protocol.messages import Failure

HALVE_AFTER_US = 1_000_000
"""What was learned of the pace counts half after so much time with a backlog."""

HELD_UP = 4
"""A batch that took so many times as long as the others was held up, and counts as no longer: one
that a machine keeps for half a second says nothing of the next."""

FORGET_AFTER_US = 5_000_000
"""What was learned is forgotten when there has been no backlog for so long: a pace from a bad
moment refuses so much that no backlog comes about which could correct it."""

EXPLORE_EVERY = 128
"""Of the batches that close with more rows behind them than they take, every so many-th takes half
or twice the size that is best as far as is known, by turns: so that one can show that it has become
better.
"""

EXPLORE_EVERY_EARLY, EARLY = 8, 128
"""Of the first batches more do, since of most sizes little is known then, and all that was seen of
one may have been seen in a bad moment."""


class Pace:
    """How fast one model's queue gets shorter while more waits than one batch takes.

    What is learned is how long a batch takes from its close to that of the next, over what its run
    was predicted to take. So it does not depend on the size of the batches at the time: after a
    while of small ones, which are slow for each row, a queue of large ones is not expected to be
    just as slow. With several instances it is below 1.

    Attributes:
        row_us: microseconds for each row of a long queue; 0 while that is not known.
    """

    __slots__ = (
        "_closes",
        "_elapsed_us",
        "_learned_us",
        "_predicted_us",
        "_since_us",
        "_taken_us",
        "row_us",
    )

    def __init__(self) -> None:
        self.row_us = 0.0
        self._elapsed_us = 0.0
        self._learned_us = 0
        self._predicted_us = 0.0
        self._since_us = 0
        self._taken_us = 0.0
        self._closes = 0

    def closed(self, run_us: float, best_row_us: float, left: int, now_us: int) -> None:
        """A batch has closed.

        What it takes is known when the next one closes, if there is always something there to be
        closed.

        Args:
            run_us: what its run will take; where that is not known, how many rows it has.
            best_row_us: the same for each row of a batch of the best size.
            left: how many rows still wait.
            now_us: microseconds of a steady clock.
        """
        if self._since_us:
            elapsed_us = float(max(0, now_us - self._since_us))
            if self._predicted_us:
                usual = max(1.0, self._elapsed_us / self._predicted_us)
                elapsed_us = min(elapsed_us, HELD_UP * usual * self._taken_us)
            self._elapsed_us += elapsed_us
            self._predicted_us += self._taken_us
            if self._elapsed_us > HALVE_AFTER_US:
                self._elapsed_us /= 2
                self._predicted_us /= 2
            self._learned_us = now_us
        elif now_us - self._learned_us > FORGET_AFTER_US:
            self._elapsed_us = self._predicted_us = self.row_us = 0.0
        if self._predicted_us:
            self.row_us = best_row_us * self._elapsed_us / self._predicted_us
        self._since_us = now_us if left else 0
        self._taken_us = run_us
        self._closes += 1

    def idle(self) -> None:
        """Nothing waits: the time until the next batch says nothing of the pace."""
        self._since_us = 0

    @property
    def has_backlog(self) -> bool:
        """More waited than the last batch took."""
        return bool(self._since_us)

    @property
    def tries_more(self) -> bool:
        """The next batch may have more rows than are best."""
        return self._explores(0)

    @property
    def tries_less(self) -> bool:
        """The next batch may have fewer rows than are best."""
        return self._explores(1)

    def _explores(self, turn: int) -> bool:
        every = EXPLORE_EVERY_EARLY if self._closes < EARLY else EXPLORE_EVERY
        done, place = divmod(self._closes, every)
        return place == every - 1 and done % 2 == turn

    def wait_us(self, rows: int, now_us: int) -> int:
        """Until so many rows that wait now have gone; 0 where no pace is known."""
        if not self._predicted_us:
            return 0
        under_way_us = 0.0
        if self._since_us:
            took_us = self._taken_us * self._elapsed_us / self._predicted_us
            under_way_us = max(0.0, self._since_us + took_us - now_us)
        return int(under_way_us + rows * self.row_us)


def too_late(due_us: int, end_us: int, now_us: int, stage: str) -> Failure | None:
    """The refusal of a request that would be answered after its deadline; None if it would not.

    The caller may try again when so much of the backlog has gone that the same time to the
    deadline would be enough.
    """
    late_us = end_us - due_us
    if late_us <= 0:
        return None
    return Failure(
        Code.OVERLOADED,
        f"deadline: expected an answer within {(due_us - now_us) / 1000:.0f} ms, got a backlog "
        f"by which it would take {(end_us - now_us) / 1000:.0f} ms",
        stage,
        max(1, -(-late_us // 1000)),
    )
