"""Requests that records cancel, by place or by correlation id, in the stages where they wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.errors import Code
from headrace.protocol.headers import BY_CORRELATION
from headrace.protocol.messages import Failure, Request


def cancelled_failure(stage: str) -> Failure:
    """Return the failure of a request that was cancelled while it waited in a stage."""
    return Failure(Code.CANCELLED, "the caller cancelled it", stage)


def find_cancelled(cancelling: Sequence[Request], waiting: Iterable[Request]) -> list[Request]:
    """Return the waiting requests that records cancel.

    A record cancels requests before it in its partition: a later one may repeat the correlation id
    of the one that was cancelled.
    """
    names: dict[tuple[int, bytes | None], int] = {}
    places: set[tuple[int, int]] = set()
    for each in cancelling:
        cancels = each.envelope.cancels
        if cancels == BY_CORRELATION:
            name = each.partition, each.envelope.correlation_id
            names[name] = max(each.offset, names.get(name, -1))
        elif cancels is not None:
            places.add((cancels[1], cancels[2]))
    return [
        request
        for request in waiting
        if (request.partition, request.offset) in places
        or request.offset < names.get((request.partition, request.envelope.correlation_id), -1)
    ]
