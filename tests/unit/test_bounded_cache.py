"""The cache of a bounded number of entries."""

from __future__ import annotations

from headrace.primitives.bounded_cache import BoundedCache


def test_full_cache_is_cleared_before_next_entry() -> None:
    """The new entry stays, and there are never more than the bound."""
    cache: BoundedCache[int, str] = BoundedCache(3)
    for number in range(4):
        assert cache.add(number, str(number)) == str(number)
        assert len(cache) <= 3

    assert dict(cache) == {3: "3"}
