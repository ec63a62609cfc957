"""Retries after transient errors: pauses, number of attempts, and requests that would be late."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.protocol.messages import Batch, Request

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
RUN_ATTEMPTS = 10
"""Enough to wait five seconds for a busy backend, if deadlines allow."""
PART_ATTEMPTS = 3
"""Attempts for a part of a batch, which has been retried as a whole already."""


def pause_after(attempts: int, batch: Batch) -> float | None:
    """Return the seconds until the next attempt, doubled each time; None if there is none left.

    Args:
        attempts: how often these requests have run together.
        batch: their batch.
    """
    most = PART_ATTEMPTS if batch.reason == "bisected" else RUN_ATTEMPTS
    if attempts >= most:
        return None
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempts - 1)))


def divide(requests: Sequence[Request], at_us: int) -> tuple[list[Request], list[Request]]:
    """Split requests into (still in time, expired) at `at_us`, in epoch microseconds."""
    late = [one for one in requests if 0 < one.envelope.deadline_ms * 1000 <= at_us]
    return [one for one in requests if one not in late] if late else list(requests), late


def apart(batch: Batch, requests: Sequence[Request]) -> list[Batch]:
    """Return a batch for each request."""
    return [
        Batch(f"{batch.batch_id}.{place}", [request], "apart")
        for place, request in enumerate(requests)
    ]
