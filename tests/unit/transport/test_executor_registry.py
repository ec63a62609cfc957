"""The executor registry: who is there, what it takes, and where it reads."""

from __future__ import annotations

from headrace.protocol.events import Completion, ExecutorEvent, HostedModel
from headrace.transport.executor_registry import ExecutorRegistry, ExecutorSlot, InFlightWindow

DIGITS = ("digits", "1")
PARTITIONS = 8


def event(
    executor: str = "a",
    *partitions: int,
    instances: int = 1,
    leaving: bool = False,
    silent_after_ms: int = 10_000,
) -> ExecutorEvent:
    """An announcement of an executor that has digits."""
    model = HostedModel(name="digits", version="1", instances=instances, max_batch_size=32)
    return ExecutorEvent(
        executor=executor,
        silent_after_ms=silent_after_ms,
        partitions=list(partitions),
        models=[model],
        leaving=leaving,
    )


def registry_of(*events: ExecutorEvent) -> ExecutorRegistry:
    """A registry with these events, at second 0."""
    registry = ExecutorRegistry(PARTITIONS)
    for each in events:
        registry.apply(each, 0.0)
    return registry


def test_each_executor_has_slots_for_its_models() -> None:
    """A model has as many slots as announced instances."""
    registry = registry_of(event("a", 0), event("b", 1, instances=3))
    assert registry.slots() == {ExecutorSlot("a", DIGITS): 1, ExecutorSlot("b", DIGITS): 3}


def flight(travel_us: int, busy_us: int, stay_us: int = 0) -> tuple[int, Completion]:
    """A batch that has ended."""
    ended = Completion(batch_id="b", model="digits", version="1", stay_us=stay_us, busy_us=busy_us)
    return travel_us + stay_us, ended


def window_of(travel_us: int, busy_us: int, stay_us: int = 0) -> InFlightWindow:
    """A window that has seen many such batches."""
    window = InFlightWindow()
    window.observe([flight(travel_us, busy_us, stay_us)] * 40)
    return window


def test_window_of_long_runs_is_two_batches() -> None:
    """One runs and one is there when it ends; more would only wait elsewhere."""
    assert InFlightWindow().room(1) == 2
    assert window_of(travel_us=4000, busy_us=20_000).room(1) == 2


def test_window_of_short_runs_covers_round_trip() -> None:
    """The window covers the time of gathering too: an instance does not wait for the log."""
    assert window_of(travel_us=4000, busy_us=2000).room(1) == 8
    assert window_of(travel_us=40_000, busy_us=50).room(1) == 64


def test_window_adds_up_over_instances() -> None:
    """Completions between two batches of an executor count for all of its instances."""
    assert InFlightWindow().room(3) == 6
    assert window_of(travel_us=40_000, busy_us=1000).room(3) == 53
    assert window_of(travel_us=40_000, busy_us=50).room(3) == 192


def test_queue_at_executor_does_not_grow_window() -> None:
    """A window that counted its own queue would grow without end."""
    assert window_of(travel_us=4000, busy_us=2000, stay_us=500_000).room(1) == 8


def test_single_delayed_batch_leaves_window() -> None:
    """The median counts."""
    window = window_of(travel_us=4000, busy_us=20_000)
    window.observe([flight(10_000_000, 1)])
    assert window.room(1) == 2


def test_executor_without_partitions_gets_no_batch() -> None:
    """It would not read what is sent to it."""
    registry = registry_of(event("a"))
    assert registry.slots() == {}
    assert registry.partition_of("a") is None


def test_partitions_of_executor_get_batches_in_turn() -> None:
    """None of them grows longer than the others."""
    registry = registry_of(event("a", 1, 4))
    assert {registry.partition_of("a"), registry.partition_of("a")} == {1, 4}


def test_partition_belongs_to_executor_that_announced_it_last() -> None:
    """The group has moved it, and the former owner does not read it any more."""
    registry = registry_of(event("a", 0, 1), event("b", 1))
    assert [registry.partition_of("a") for _ in range(3)] == [0, 0, 0]
    assert registry.partition_of("b") == 1


def test_executor_that_lost_all_partitions_is_removed() -> None:
    """Its group has noticed that it died before its silence shows."""
    registry = registry_of(event("a", 0), event("b", 0, 1))
    assert registry.partition_of("a") is None
    assert len(registry) == 1


def test_silent_executor_is_removed() -> None:
    """Each says how long that is."""
    registry = registry_of(event("a", 0, silent_after_ms=1000), event("b", 1, silent_after_ms=5000))
    registry.expire(1.5)
    assert registry.partition_of("a") is None
    assert registry.partition_of("b") is not None


def test_executor_with_heartbeats_is_kept() -> None:
    """Every announcement counts."""
    registry = registry_of(event("a", 0, silent_after_ms=1000))
    registry.apply(event("a", 0, silent_after_ms=1000), 0.9)
    registry.expire(1.5)
    assert registry.partition_of("a") is not None


def test_leaving_executor_is_removed_at_once() -> None:
    """A stop needs no timeout."""
    registry = registry_of(event("a", 0), event("a", leaving=True))
    assert registry.slots() == {}


def test_released_partition_can_be_announced_by_another_executor() -> None:
    """A former owner that announces the partition again is its owner again."""
    registry = registry_of(event("a", 0, 1), event("a", 1), event("b", 0), event("a", 0, 1))
    assert {registry.partition_of("a") for _ in range(4)} == {0, 1}
    assert registry.partition_of("b") is None
