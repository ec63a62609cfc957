"""How long brokers may hold the fetches of a consumer."""

from __future__ import annotations

from headrace.log.kafka.consumer import FetchWait
from headrace.tuning import KafkaTuning

TUNING = KafkaTuning(fetch_max_wait_s=0.05, idle_fetch_max_wait_s=0.5, idle_after_s=1.0)


def test_fetch_of_idle_consumer_waits_long() -> None:
    """It is idle once nothing has happened for the given time, from its start on."""
    rule = FetchWait(TUNING, now_s=100.0)

    assert rule.wait_s(100.9, is_any_paused=False) == 0.05
    assert rule.wait_s(101.0, is_any_paused=False) == 0.5


def test_fetch_after_activity_waits_shortly() -> None:
    """Any activity begins the time anew."""
    rule = FetchWait(TUNING, now_s=100.0)
    rule.note_activity(150.0)

    assert rule.wait_s(150.5, is_any_paused=False) == 0.05
    assert rule.wait_s(151.0, is_any_paused=False) == 0.5


def test_fetch_beside_paused_partition_waits_shortly() -> None:
    """The partition is not in the fetch, and would wait for its end when it is resumed."""
    rule = FetchWait(TUNING, now_s=100.0)

    assert rule.wait_s(200.0, is_any_paused=True) == 0.05


def test_idle_wait_below_usual_one_shortens_nothing() -> None:
    """A tuning with another usual wait need not change the idle one."""
    rule = FetchWait(KafkaTuning(fetch_max_wait_s=2.0, idle_fetch_max_wait_s=0.5), now_s=100.0)

    assert rule.wait_s(200.0, is_any_paused=False) == 2.0
