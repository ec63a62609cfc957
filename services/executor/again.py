"""Retries after transient errors: pauses, number of attempts, and requests that would be late."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.protocol.messages import Batch, Request
from headrace.tuning import ExecutorTuning


def pause_after(attempts: int, batch: Batch, tuning: ExecutorTuning) -> float | None:
    """Return the seconds until the next attempt, doubled each time; None if there is none left.

    Args:
        attempts: how often these requests have run together.
        batch: their batch.
        tuning: pauses, and numbers of attempts.
    """
    is_half = batch.reason == "bisected"
    most = tuning.max_half_attempts if is_half else tuning.max_run_attempts
    if attempts >= most:
        return None
    return tuning.run_backoff.pause_s(attempts - 1)


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
