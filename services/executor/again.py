"""Runs that may work a little later: how long to wait, how often, and for whom it is of no use."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.protocol.messages import Batch, Request

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
RUN_ATTEMPTS = 10
"""A backend that is busy for five seconds is waited for, where deadlines allow."""
PART_ATTEMPTS = 3
"""Of a part of a batch that has been tried for so long already."""


def pause_after(attempts: int, batch: Batch) -> float | None:
    """Seconds until the next attempt, twice as long each time; None when there shall be none.

    Args:
        attempts: how often these requests have run together.
        batch: in which they did.
    """
    most = PART_ATTEMPTS if batch.reason == "bisected" else RUN_ATTEMPTS
    if attempts >= most:
        return None
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempts - 1)))


def divide(requests: Sequence[Request], at_us: int) -> tuple[list[Request], list[Request]]:
    """Those whose deadline lies after a moment (in epoch microseconds), and those for whom
    whatever happens then comes too late.
    """
    late = [one for one in requests if 0 < one.envelope.deadline_ms * 1000 <= at_us]
    return [one for one in requests if one not in late] if late else list(requests), late


def apart(batch: Batch, requests: Sequence[Request]) -> list[Batch]:
    """Each request as a batch of its own."""
    return [
        Batch(f"{batch.batch_id}.{place}", [request], "apart")
        for place, request in enumerate(requests)
    ]
