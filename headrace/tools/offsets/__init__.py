"""What a deployment has answered of each source partition, read and reset from outside.

The state is that of `headrace.delivery.acked_offsets`: the offset that the group `{namespace}` has
committed on `requests` is the base, its metadata the answered ranges above it. Kafka's own tools
show the offset alone, and a reset by them erases the ranges.

- `state`: reading it, beside what the partitions hold
- `resetting`: a new base, and which answered ranges stay
"""

from headrace.tools.offsets.resetting import Reset, Target, reset
from headrace.tools.offsets.state import PartitionOffsets, read_offsets

__all__ = ["PartitionOffsets", "Reset", "Target", "read_offsets", "reset"]
