"""Failures that end a request early, at any stage."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.errors import Code, Rejected
from headrace.protocol.messages import Failure, Request

VOID = Failure(Code.CANCELLED, "the partition was revoked", "log")
"""Set on requests of revoked partitions; this process does not answer them."""


def any_void(requests: Iterable[Request]) -> bool:
    """Return True if the partition of at least one request was revoked."""
    assignments = {request.ack_handle.assignment for request in requests}
    return True in [each.revoked for each in assignments]


def deadline_passed(request: Request, now_us: int, stage: str) -> Failure | None:
    """Return the failure of an expired request; None before its deadline."""
    deadline_ms = request.envelope.deadline_ms
    if not deadline_ms or now_us < deadline_ms * 1000:
        return None
    return expiry(deadline_ms, now_us / 1000 - deadline_ms, stage)


def expiry(deadline_ms: int, late_ms: float, stage: str) -> Failure:
    """Return the failure of a request that is `late_ms` past its deadline."""
    return Failure(
        Code.DEADLINE_EXCEEDED,
        f"deadline: expected an answer by {deadline_ms} (epoch milliseconds), got to the "
        f"{stage} {late_ms:.0f} ms later",
        stage,
    )


def ran_alone(stage: str) -> Failure:
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
