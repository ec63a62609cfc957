"""The Python client: NumPy in, NumPy out, over Kafka.

```python
async with Client(bootstrap_servers="127.0.0.1:9092") as client:
    response = await client.infer("digits", {"pixels": array}, timeout_s=1.0)
    response.outputs["label"]
```

`SyncClient` is the same for programs without an event loop. docs/client.md explains both.
"""

from headrace.client.client import (
    Client,
    InferenceError,
    InferenceTimeout,
    Payload,
    Response,
)
from headrace.client.rpc import ClientClosed
from headrace.client.sync import SyncClient

__all__ = [
    "Client",
    "ClientClosed",
    "InferenceError",
    "InferenceTimeout",
    "Payload",
    "Response",
    "SyncClient",
]
