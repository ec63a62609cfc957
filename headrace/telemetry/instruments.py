"""The measuring instruments of a stage, as one object."""

from __future__ import annotations

from typing import NamedTuple

from headrace.clock import AnchoredClock, Clock, steady_clock_us, wall_clock_us
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.tracing import Tracing


class Instruments(NamedTuple):
    """Instruments passed to every stage of a process.

    Attributes:
        tracing: None if no traces are exported; then no work is done for them.
        clock: for deadlines and for the times in metrics and spans.
        steady: for durations.
    """

    metrics: Metrics
    tracing: Tracing | None = None
    clock: Clock = wall_clock_us
    steady: Clock = steady_clock_us

    def anchored_clock(self) -> AnchoredClock:
        """Return a clock for the timestamps of one piece of work."""
        return AnchoredClock(self.clock, self.steady)
