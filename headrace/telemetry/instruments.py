"""What a stage measures with, as one object."""

from __future__ import annotations

from typing import NamedTuple

from headrace.clock import AnchoredClock, Clock, steady_clock_us, wall_clock_us
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.tracing import Tracing


class Instruments(NamedTuple):
    """Handed to every stage of a process.

    Attributes:
        tracing: None where no traces leave the process; then nothing is done for them.
        clock: of deadlines and of the times in metrics and spans.
        steady: of durations.
    """

    metrics: Metrics
    tracing: Tracing | None = None
    clock: Clock = wall_clock_us
    steady: Clock = steady_clock_us

    def anchored(self) -> AnchoredClock:
        """A clock for the stamps of one piece of work."""
        return AnchoredClock(self.clock, self.steady)
