"""Estimate of what a process can do in a second, learned from its work, without I/O.

`docs/metrics.md` explains the formula.
"""

from __future__ import annotations

from headrace.tuning import TUNING, ConsumerTuning


class Throughput:
    """Learns how many records are answered per second when there is enough work.

    Args:
        tuning: how fast the estimate follows.

    Attributes:
        per_s: the estimate; None before anything was answered.
    """

    def __init__(self, tuning: ConsumerTuning = TUNING.consumer) -> None:
        self._rise = tuning.throughput_rise
        self._fall = tuning.throughput_fall
        self.per_s: float | None = None
        self._last: tuple[float, int] | None = None

    def observe(self, now_s: float, answered: int, lag: int) -> None:
        """Learn from the answers since the last call.

        A rate above the estimate raises it at once: the process can do at least that. A lower rate
        counts only if more was left over than was done; otherwise the demand was low, not the
        throughput.

        Args:
            now_s: monotonic seconds.
            answered: records, since the start of the process.
            lag: records that are not answered now.
        """
        last, self._last = self._last, (now_s, answered)
        if last is None or now_s <= last[0]:
            return
        elapsed_s = now_s - last[0]
        rate = (answered - last[1]) / elapsed_s
        if self.per_s is None:
            self.per_s = rate or None
        elif rate >= self.per_s:
            self.per_s += self._rise * (rate - self.per_s)
        elif lag and lag >= rate * elapsed_s:
            self.per_s += self._fall * (rate - self.per_s)

    def time_to_drain_s(self, lag: int) -> float | None:
        """Return how long the backlog takes at the estimated rate; None before there is one."""
        if not lag:
            return 0.0
        return lag / self.per_s if self.per_s else None
