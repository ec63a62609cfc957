"""Helpers for users' own tests: models served inside the test's process, without a broker.

```python
async with serving("models") as client:
    response = await client.infer("digits", {"pixels": array})
```

docs/testing.md has more, and the pytest fixture.
"""

from headrace.testing.serving import serving, serving_sync

__all__ = ["serving", "serving_sync"]
