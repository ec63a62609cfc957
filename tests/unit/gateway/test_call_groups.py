"""Calls over gRPC that wait for others and go on together."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.gateway.call_groups import CallGroups, WaitRule
from headrace.tuning import TUNING
from tests.support.conditions import DEADLINE_S

QUICK = replace(TUNING.gateway, grouped_pause_s=0.0, grouped_least_calls=3, grouped_most_passed=7)


async def waiting_groups() -> CallGroups:
    """Return groups whose next call waits, since three have gone on together."""
    groups = CallGroups(QUICK)
    for _ in range(QUICK.grouped_most_passed):
        await groups.join()
    await asyncio.gather(*(groups.join() for _ in range(3)))
    return groups


def passed_before_wait(rule: WaitRule) -> int:
    """Return the number of calls that go on at once before one waits."""
    passed = 0
    while not rule.should_wait():
        passed += 1
    return passed


async def join_all(groups: CallGroups, calls: int) -> list[asyncio.Task[None]]:
    """Begin to join in one turn of the event loop."""
    tasks = [asyncio.create_task(groups.join()) for _ in range(calls)]
    await asyncio.sleep(0)
    return tasks


def test_first_calls_go_on_at_once() -> None:
    """A process that has just started has few callers."""
    assert passed_before_wait(WaitRule(least_calls=3, most_passed=100)) == 100


def test_calls_wait_again_after_wait_that_found_enough() -> None:
    """The same callers soon come again."""
    rule = WaitRule(least_calls=3, most_passed=100)
    passed_before_wait(rule)

    rule.note_wait(3)

    assert passed_before_wait(rule) == 0


def test_waits_that_find_too_few_become_rare_up_to_limit() -> None:
    """Each such wait doubles the calls that go on at once after it."""
    rule = WaitRule(least_calls=3, most_passed=10)
    rule.note_wait(3)

    passed = []
    for _ in range(6):
        passed.append(passed_before_wait(rule))
        rule.note_wait(2)

    assert passed == [0, 1, 3, 7, 10, 10]


def test_wait_that_finds_enough_ends_rarity() -> None:
    """Later waits that find too few begin to be rare again from one call on."""
    rule = WaitRule(least_calls=3, most_passed=100)
    for calls in (1, 1, 1, 3, 1):
        passed_before_wait(rule)
        rule.note_wait(calls)

    assert passed_before_wait(rule) == 1


@given(st.lists(st.integers(1, 5), max_size=40), st.integers(0, 20))
def test_some_call_waits_after_any_waits(waits: list[int], most_passed: int) -> None:
    """If none waited, callers that come later would never go on together."""
    rule = WaitRule(least_calls=3, most_passed=most_passed)
    for calls in waits:
        assert passed_before_wait(rule) <= most_passed
        rule.note_wait(calls)


async def test_calls_of_one_turn_go_on_together() -> None:
    """The first waits, and all go on in the same turn of the event loop."""
    groups = await waiting_groups()
    first, *others = await join_all(groups, 5)
    assert not first.done()

    async with asyncio.timeout(DEADLINE_S):
        while not first.done():
            assert not any(each.done() for each in others)
            await asyncio.sleep(0)

    assert all(each.done() for each in others)


async def test_call_that_comes_while_first_waits_goes_on_with_it() -> None:
    """It counts for whether the wait was worth its time."""
    groups = await waiting_groups()
    (first,) = await join_all(groups, 1)
    later = await join_all(groups, 2)

    await asyncio.gather(first, *later)

    (next_call,) = await join_all(groups, 1)
    assert not next_call.done()
    await next_call


async def test_call_after_lonely_wait_goes_on_at_once() -> None:
    """A caller that is alone waits in vain."""
    groups = await waiting_groups()
    await groups.join()

    (call,) = await join_all(groups, 1)

    assert call.done()


async def test_cancelled_first_call_lets_others_go_on() -> None:
    """Its caller has hung up; theirs have not."""
    groups = await waiting_groups()
    first, *others = await join_all(groups, 3)

    first.cancel()

    await asyncio.gather(*others)
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_cancelled_later_call_leaves_others_in_group() -> None:
    """The group goes on without it."""
    groups = await waiting_groups()
    first, cancelled, third = await join_all(groups, 3)

    cancelled.cancel()

    await asyncio.gather(first, third)
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_wait_ends_although_calls_keep_coming() -> None:
    """No call waits longer than `grouped_most_s`, whatever the load."""
    groups = await waiting_groups()
    (first,) = await join_all(groups, 1)

    calls = [first]
    async with asyncio.timeout(DEADLINE_S):
        while not first.done():
            calls += await join_all(groups, 1)

    await asyncio.gather(*calls)
