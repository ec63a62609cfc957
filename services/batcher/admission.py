"""Admission: refuse requests that would be answered too late before they wait.

The end of a request is predicted from the rows ahead of it, the rate at which the model's queue
has been shrinking, and its own run. The rate is learned from batches that closed while more rows
waited, so it includes whatever else the process does. Without a backlog there is no rate, and
nothing is refused. This kind of prediction follows Clockwork (Gujarati et al., 2020): a request is
refused before its run, never after it.
"""

from __future__ import annotations

from headrace.errors import Code
from headrace.protocol.messages import Failure
from headrace.tuning import TUNING, BatcherTuning


class ServiceRate:
    """Rate at which one model's queue shrinks while more waits than one batch takes.

    Learns the ratio of the time from one close to the next over the batch's predicted run time.
    The ratio does not depend on batch sizes: after a period of small batches, which are slow per
    row, large ones are not expected to be as slow. With several instances it is below 1.

    A batch of one request that has more rows than a batch may have can take less time per row than
    the best size. Where such requests ran as well, the ratio is to the time that their rows would
    take in batches of the best size. It holds for every shape class; an average time per row would
    not.

    Attributes:
        row_us: microseconds per row of a long queue; 0 while unknown.
    """

    __slots__ = (
        "_best_us",
        "_closes",
        "_elapsed_us",
        "_learned_us",
        "_predicted_us",
        "_since_us",
        "_taken_best_us",
        "_taken_us",
        "_tuning",
        "row_us",
    )

    def __init__(self, tuning: BatcherTuning = TUNING.batcher) -> None:
        self._tuning = tuning
        self.row_us = 0.0
        self._elapsed_us = 0.0
        self._learned_us = 0
        self._predicted_us = 0.0
        self._since_us = 0
        self._taken_us = 0.0
        self._best_us = 0.0
        self._taken_best_us = 0.0
        self._closes = 0

    def record_close(
        self, rows: int, run_us: float, best_row_us: float, left: int, now_us: int
    ) -> None:
        """Record the close of a batch.

        Its duration is known when the next one closes, if rows waited all the time.

        Args:
            rows: its number of rows.
            run_us: its predicted run time; its number of rows if there is no prediction.
            best_row_us: the same per row of a batch of the best size.
            left: rows that still wait.
            now_us: microseconds of a steady clock.
        """
        if self._since_us:
            elapsed_us = float(max(0, now_us - self._since_us))
            if self._predicted_us:
                usual = max(1.0, self._elapsed_us / self._predicted_us)
                elapsed_us = min(elapsed_us, self._tuning.max_stall_ratio * usual * self._taken_us)
            self._elapsed_us += elapsed_us
            self._predicted_us += self._taken_us
            self._best_us += self._taken_best_us
            if self._elapsed_us > self._tuning.rate_half_life_us:
                self._elapsed_us /= 2
                self._predicted_us /= 2
                self._best_us /= 2
            self._learned_us = now_us
        elif now_us - self._learned_us > self._tuning.rate_memory_us:
            self._elapsed_us = self._predicted_us = self._best_us = self.row_us = 0.0
        if self._predicted_us:
            usual_us = max(self._predicted_us, self._best_us)
            self.row_us = best_row_us * self._elapsed_us / usual_us
        self._since_us = now_us if left else 0
        self._taken_us, self._taken_best_us = run_us, rows * best_row_us
        self._closes += 1

    def count_close(self) -> None:
        """Record the close of a batch while the rate `is_unknown`, if no rows still wait."""
        self._closes += 1

    @property
    def is_unknown(self) -> bool:
        """True if no rate is known, and none is being measured."""
        return not (self._since_us or self._predicted_us)

    def stop_measuring(self) -> None:
        """Stop measuring: nothing waits, so the time to the next batch says nothing."""
        self._since_us = 0

    @property
    def has_backlog(self) -> bool:
        """True if rows were left waiting when the last batch closed."""
        return bool(self._since_us)

    @property
    def explores_larger(self) -> bool:
        """True if the next batch may exceed the best size, to explore."""
        return self._explores(0)

    @property
    def explores_smaller(self) -> bool:
        """True if the next batch may be below the best size, to explore."""
        return self._explores(1)

    def _explores(self, turn: int) -> bool:
        tuning = self._tuning
        is_early = self._closes < tuning.early_batches
        every = tuning.explore_every_early_batches if is_early else tuning.explore_every_batches
        done, place = divmod(self._closes, every)
        return place == every - 1 and done % 2 == turn

    def predict_wait_us(self, rows: int, now_us: int) -> int:
        """Return the time until `rows` waiting rows have left; 0 if no rate is known."""
        if not self._predicted_us:
            return 0
        under_way_us = 0.0
        if self._since_us:
            took_us = self._taken_us * self._elapsed_us / self._predicted_us
            under_way_us = max(0.0, self._since_us + took_us - now_us)
        return int(under_way_us + rows * self.row_us)


def late_refusal(due_us: int, end_us: int, now_us: int, stage: str) -> Failure | None:
    """Return the refusal of a request that would be answered after its deadline, or None.

    Its retry time is by how much the request would be late: by then the backlog has shrunk enough
    for the same time to the deadline.
    """
    late_us = end_us - due_us
    if late_us <= 0:
        return None
    return Failure(
        Code.OVERLOADED,
        f"deadline would be exceeded by {late_us / 1000:.0f} ms: expected an answer within "
        f"{(due_us - now_us) / 1000:.0f} ms, got a backlog that takes "
        f"{(end_us - now_us) / 1000:.0f} ms",
        stage,
        max(1, -(-late_us // 1000)),
    )
