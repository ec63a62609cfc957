"""Log lines for requests: one canonical line each at debug, and one for each without outputs.

Refused and expired requests are logged at info, since the caller must fix them; failed ones at
warning.

Lines identify requests by partition and offset, and by trace if there is one; never by their
content. An error's message may quote the content, so lines have its code and stage, and the message
only at debug; the answer and the dead letter have it as well.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import structlog

from headrace.protocol.messages import Request
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import outcome_of
from headrace.tuning import TUNING

log = structlog.get_logger(__name__)
_level = logging.getLogger(__name__)

_EVENTS = {
    "expired": (logging.INFO, Event.REQUEST_EXPIRED),
    "refused": (logging.INFO, Event.REQUEST_REFUSED),
    "failed": (logging.WARNING, Event.REQUEST_FAILED),
}


def log_answered(
    requests: Sequence[Request],
    now_us: int,
    max_failures: int = TUNING.runtime.failure_lines_per_chunk,
) -> None:
    """Log requests whose answers are acknowledged. Without debug and failures this is nearly
    free.

    Args:
        requests: a chunk.
        now_us: when they were acknowledged.
        max_failures: most lines for failed ones; the last line says how many `more` there are.
    """
    debugging = _level.isEnabledFor(logging.DEBUG)
    if debugging:
        for request in requests:
            log.debug(Event.REQUEST, **_canonical(request, now_us))
    failed = [request for request in requests if request.failure is not None]
    for place, request in enumerate(failed[:max_failures], start=1):
        failure = request.failure
        assert failure is not None
        more = len(failed) - max_failures if place == max_failures else 0
        level, event = _EVENTS[outcome_of(failure.code)]
        log.log(
            level,
            event,
            **identity(request),
            code=str(failure.code),
            stage=str(failure.stage),
            **({"reason": failure.message} if debugging else {}),
            **({"more": more} if more > 0 else {}),
        )


def identity(request: Request) -> dict[str, Any]:
    """Return the identity of a request: partition and offset of its record, model, trace."""
    fields: dict[str, Any] = {"partition": request.partition, "offset": request.offset}
    if request.version:
        fields |= {"model": request.model, "version": request.version}
    if request.trace is not None:
        fields["trace_id"] = f"{request.trace.trace_id:032x}"
    return fields


def _canonical(request: Request, now_us: int) -> dict[str, Any]:
    """Return everything that happened to a request, on one line; times are in microseconds."""
    failure = request.failure
    fields = identity(request) | {
        "code": "ok" if failure is None else str(failure.code),
        "rows": request.rows,
        "total_us": max(0, now_us - request.timestamp_ms * 1000),
        "log_wait_us": max(0, request.ingested_us - request.timestamp_ms * 1000),
    }
    if request.batch.formed_us:
        fields |= {
            "queue_us": max(0, request.batch.formed_us - request.ingested_us),
            "compute_us": request.batch.compute_us,
            "batch_rows": request.batch.rows,
        }
    return fields
