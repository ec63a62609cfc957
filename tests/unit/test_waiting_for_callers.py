"""Bounds of what waits for its callers."""

from __future__ import annotations

from headrace.primitives.waiting_for_callers import WaitingForCallers


def test_too_many_bytes_drop_those_that_have_waited_longest() -> None:
    """As many as it takes, and those that are dropped no longer count."""
    waiting: WaitingForCallers[str] = WaitingForCallers(10)
    assert [waiting.add(name, 4) for name in ("a", "b")] == [[], []]
    assert waiting.add("c", 8) == ["a", "b"]
    assert waiting.size_bytes == 8


def test_newest_may_have_any_size() -> None:
    """All others give way to it."""
    waiting: WaitingForCallers[str] = WaitingForCallers(10)
    waiting.add("a", 1)
    assert waiting.add("b", 100) == ["a"]
    assert waiting.add("c", 1) == ["b"]


def test_too_many_drop_the_longest_waiting_one() -> None:
    """However few bytes they have."""
    waiting: WaitingForCallers[str] = WaitingForCallers(10, 2)
    assert [waiting.add(name, 0) for name in ("a", "b", "c")] == [[], [], ["a"]]


def test_one_that_waits_no_longer_is_not_dropped() -> None:
    """Nor does it count; to remove it again does nothing."""
    waiting: WaitingForCallers[str] = WaitingForCallers(10)
    waiting.add("a", 8)
    for _ in range(2):
        waiting.remove("a")
    assert waiting.add("b", 8) == []
    assert waiting.size_bytes == 8
