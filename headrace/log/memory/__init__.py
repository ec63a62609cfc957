"""The embedded log: the port of `headrace.log.port`, kept in this process's memory.

It is what `headrace run` uses when no broker is configured, and what tests use. It promises
what Kafka promises and no more: order within a partition only, eager rebalances that revoke
every partition, commits fenced by membership and generation, batches acknowledged one by one,
transactions that readers see whole or not at all, with markers that take up offsets.
Partitions are trimmed from the front by bytes, so memory stays bounded.

- `partition`, `topics`, `assignors`, `group`, `transactions`: state and rules, synchronous, no I/O
- `faults`: what tests make it suffer
- `reader`, `member`, `producer`, `sealing`, `log`: the asyncio faces of the port
"""

from headrace.log.memory.faults import Faults, SealFault
from headrace.log.memory.log import MemoryLog

__all__ = ["Faults", "MemoryLog", "SealFault"]
