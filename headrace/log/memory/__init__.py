"""The embedded log: the port of `headrace.log.port`, kept in this process's memory.

`headrace run` uses it when no broker is configured, and so do tests. It makes Kafka's promises and
no others: order within a partition only, eager rebalances that revoke every partition, commits
fenced by membership and generation, batches acknowledged one by one, transactions that are visible
completely or not at all, with markers that take up offsets. Partitions are trimmed from the front
by bytes, so memory stays bounded.

- `broker`, `group`, `transactions`: state and rules, synchronous, no I/O
- `faults`: fault injection for tests
- `consumer`, `producer`, `log`: the asyncio implementations of the port
"""

from headrace.log.memory.faults import Faults, TransactionFault
from headrace.log.memory.log import MemoryLog

__all__ = ["Faults", "MemoryLog", "TransactionFault"]
