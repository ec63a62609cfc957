"""Failures that end a request early, and requests whose partition was revoked, at any stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.errors import Code, Rejected
from headrace.protocol.ack import Revocable
from headrace.protocol.messages import Failure, Request
from headrace.telemetry.metrics import Metrics

REVOKED = Failure(Code.CANCELLED, "the partition was revoked", "log")
"""Set on requests of revoked partitions; this process does not answer them."""


def any_revoked(requests: Iterable[Request]) -> bool:
    """Return True if the partition of at least one request was revoked."""
    last: Revocable | None = None
    for request in requests:
        assignment = request.ack_handle.assignment
        if assignment is not last:
            if assignment.revoked:
                return True
            last = assignment
    return False


def drop_revoked(requests: Sequence[Request], metrics: Metrics) -> Sequence[Request]:
    """Return the requests whose partition is still assigned; count and acknowledge the others.

    The ack releases their bytes; their offsets belong to the partition's new owner.
    """
    if not any_revoked(requests):
        return requests
    assigned: list[Request] = []
    for request in requests:
        if request.ack_handle.revoked:
            metrics.revoked.inc()
            request.ack_handle.ack()
        else:
            assigned.append(request)
    return assigned


def split_ended(
    requests: list[Request], now_us: int, stage: str
) -> tuple[list[Request], list[Request]]:
    """Fail the requests that have expired, or whose partition was revoked.

    Args:
        requests: waiting requests.
        now_us: epoch microseconds.
        stage: where they wait.

    Returns:
        The requests that have ended, and the others.
    """
    deadlines = [ms for request in requests if (ms := request.envelope.deadline_ms)]
    in_time = not deadlines or now_us < min(deadlines) * 1000
    if in_time and not any_revoked(requests):
        return [], requests
    ended: list[Request] = []
    remaining: list[Request] = []
    for request in requests:
        failure = find_end(request, now_us, stage)
        if failure is None:
            remaining.append(request)
        else:
            request.fail(failure)
            ended.append(request)
    return ended, remaining


def find_end(request: Request, now_us: int, stage: str) -> Failure | None:
    """Return the failure of a request that has expired, or whose partition was revoked; or None."""
    return REVOKED if request.ack_handle.revoked else deadline_passed(request, now_us, stage)


def deadline_passed(request: Request, now_us: int, stage: str) -> Failure | None:
    """Return the failure of an expired request; None before its deadline."""
    deadline_ms = request.envelope.deadline_ms
    if not deadline_ms or now_us < deadline_ms * 1000:
        return None
    return deadline_exceeded(deadline_ms, now_us / 1000 - deadline_ms, stage)


def deadline_exceeded(deadline_ms: int, late_ms: float, stage: str) -> Failure:
    """Return the failure of a request that is `late_ms` past its deadline."""
    return Failure(
        Code.DEADLINE_EXCEEDED,
        f"deadline exceeded by {late_ms:.0f} ms at the {stage} stage: expected an answer by "
        f"{deadline_ms} (epoch milliseconds)",
        stage,
    )


def poisoned_failure(stage: str) -> Failure:
    """Return the failure of a request that crashed its process each time it ran alone."""
    return Failure(
        Code.MODEL_FAILED,
        "each time this request ran, with nothing else running, its process ended; it is not run "
        "again",
        stage,
    )


def rejection(error: Rejected, stage: str) -> Failure:
    """Return the failure for a `Rejected`."""
    return Failure(error.code, error.message, stage, error.retry_after_ms)
