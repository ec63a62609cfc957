"""Records on their way from a poll to the first stage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from headrace.flow.inflight import Assignment
from headrace.flow.suspects import Unit
from headrace.log.port import Record

RECORD_OVERHEAD_BYTES = 1024
"""Charged for every record that waits, beside its value: many small ones are large as well."""


class Trial(NamedTuple):
    """What the first stage has to know of records that are suspect.

    Attributes:
        condemned: to be answered without being run.
        run_place: given where one record runs alone: before each of its requests, if it has
            several, to be called with the request's place.
    """

    condemned: frozenset[Unit]
    run_place: Callable[[int], Awaitable[None]] | None


class Delivery(NamedTuple):
    """Records of one partition, in offset order, not yet admitted; on trial while suspect."""

    assignment: Assignment
    records: Sequence[Record]
    trial: Trial | None = None


def size_bytes(records: Sequence[Record]) -> int:
    """What records take that wait; their headers are counted as part of the overhead."""
    values = sum([len(record.value) for record in records if record.value is not None])
    return values + RECORD_OVERHEAD_BYTES * len(records)
