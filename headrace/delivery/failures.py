"""How requests end early, at whichever stage finds it."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.errors import Code, Rejected
from headrace.protocol.messages import Failure, Request

VOID = Failure(Code.CANCELLED, "the partition was revoked", "log")
"""Set on requests that are another process's business now; nobody answers these."""


def any_void(requests: Iterable[Request]) -> bool:
    """Whether the partition of one of them, at least, has been revoked."""
    assignments = {request.ack_handle.assignment for request in requests}
    return True in [each.revoked for each in assignments]


def deadline_passed(request: Request, now_us: int, stage: str) -> Failure | None:
    """The failure of a request whose deadline has passed; None while it has not."""
    deadline_ms = request.envelope.deadline_ms
    if not deadline_ms or now_us < deadline_ms * 1000:
        return None
    return expiry(deadline_ms, now_us / 1000 - deadline_ms, stage)


def expiry(deadline_ms: int, late_ms: float, stage: str) -> Failure:
    """The failure of a request that is so late."""
    return Failure(
        Code.DEADLINE_EXCEEDED,
        f"deadline: expected an answer by {deadline_ms} (epoch milliseconds), got to the "
        f"{stage} {late_ms:.0f} ms later",
        stage,
    )


def ran_alone(stage: str) -> Failure:
    """The failure of a request that ended its process whenever it ran alone."""
    return Failure(
        Code.MODEL_FAILED,
        "each time this request ran, with nothing else running, its process ended; it is not run "
        "again",
        stage,
    )


def rejection(error: Rejected, stage: str) -> Failure:
    """The failure that a `Rejected` stands for."""
    return Failure(error.code, error.message, stage, error.retry_after_ms)
