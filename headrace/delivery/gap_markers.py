"""Gap markers: requests that stand for skipped ranges of a source partition.

A range is skipped if retention deleted records before they were read, or the log begins above 0.
The base of the partition may be kept by another process, which does not read the source and cannot
see the gap. So the range is sent as a request that ends at once, with neither outputs nor a
failure; it gets no answer, and acknowledging it moves the base.
"""

from __future__ import annotations

from headrace.delivery.inflight import AssignedPartition
from headrace.protocol.messages import Envelope, Request

_NO_HEADERS = Envelope()


def skipped_range(assignment: AssignedPartition, last: int) -> Request:
    """Return the marker for all offsets after the record admitted last, up to `last`."""
    ack_handle = assignment.admit(last, 0)
    origin = (assignment.partition.partition, last, ack_handle.previous, 0)
    return Request(ack_handle, *origin, None, None, [], _NO_HEADERS)
