"""Tools to read and reset a deployment's acknowledged offsets of each source partition.

The state is that of `headrace.delivery.acked_offsets`: the offset that the group `{namespace}` has
committed on `requests` is the base, its metadata holds the answered ranges above it. Kafka's own
tools show only the offset, and a reset by them erases the ranges.

- `state`: reads it, together with the partitions' contents
- `resetting`: sets a new base, and selects the answered ranges to keep
"""

from headrace.tools.offsets.resetting import Reset, Target, reset
from headrace.tools.offsets.state import PartitionOffsets, read_offsets

__all__ = ["PartitionOffsets", "Reset", "Target", "read_offsets", "reset"]
