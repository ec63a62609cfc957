"""Helpers for users' own tests: models served inside the test's process, without a broker.

```python
async with serving("models") as client:
    response = await client.infer("digits", {"pixels": array})
```

`MemoryLog.faults` injects the faults of a broker. docs/testing.md has more, and the pytest fixture.
"""

from headrace.log.memory import Faults, MemoryLog, TransactionFault
from headrace.log.port import TopicPartition
from headrace.testing.serving import serving, serving_sync

__all__ = [
    "Faults",
    "MemoryLog",
    "TopicPartition",
    "TransactionFault",
    "serving",
    "serving_sync",
]
