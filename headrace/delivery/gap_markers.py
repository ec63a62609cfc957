"""Ranges of the source that are skipped altogether travel as an item of their own.

Retention has taken records that were never read, or the log begins above 0. Whoever keeps the base
of the partition may be another process, which sees no gap in what it does not read. So the range
comes to it as a request that ends at once, with neither outputs nor a failure; it is answered to
nobody, and acknowledging it moves the base.
"""

from __future__ import annotations

from headrace.delivery.inflight import AssignedPartition
from headrace.protocol.messages import Envelope, Request

_NO_HEADERS = Envelope()


def skipped_range(assignment: AssignedPartition, last: int) -> Request:
    """What stands for everything after the record that was admitted last, up to `last`."""
    ack_handle = assignment.admit(last, 0)
    origin = (assignment.partition.partition, last, ack_handle.previous, 0)
    return Request(ack_handle, *origin, None, None, [], _NO_HEADERS)
