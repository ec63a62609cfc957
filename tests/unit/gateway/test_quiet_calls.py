"""Calls without a request under way are bounded in number and in time."""

from __future__ import annotations

import asyncio

import pytest

from headrace.gateway.quiet_calls import EndedQuiet, QuietCall, QuietCalls, Room


async def _stay_open(calls: QuietCalls, opened: asyncio.Queue[QuietCall]) -> None:
    async with calls.opened() as call:
        opened.put_nowait(call)
        await asyncio.Event().wait()


async def test_call_over_limit_ends_the_one_quiet_for_longest() -> None:
    """The first one has been busy since, so that the second is quiet for longest."""
    calls = QuietCalls("Call", limit=2, timeout_s=None)
    opened: asyncio.Queue[QuietCall] = asyncio.Queue()
    first = asyncio.create_task(_stay_open(calls, opened))
    begun = await opened.get()
    second = asyncio.create_task(_stay_open(calls, opened))
    await opened.get()
    begun.begin()
    begun.done()

    third = asyncio.create_task(_stay_open(calls, opened))
    with pytest.raises(EndedQuiet, match="Call: expected at most 2 quiet ones, got one more"):
        await second

    assert (first.done(), third.done(), len(calls)) == (False, False, 2)
    for each in (first, third):
        each.cancel()
    await asyncio.wait([first, third])
    assert len(calls) == 0


async def test_busy_call_is_not_ended_by_others() -> None:
    """It counts again once its last request has ended."""
    calls = QuietCalls("Call", limit=1, timeout_s=None)
    async with calls.opened() as busy:
        busy.begin()
        busy.begin()
        async with calls.opened():
            assert len(calls) == 1
            busy.done()
            assert len(calls) == 1
        busy.done()
        assert len(calls) == 1


async def test_call_without_message_ends_after_its_time() -> None:
    """Not by an error of its own: the reason says what was expected."""
    calls = QuietCalls("Call", limit=1, timeout_s=0.01)
    with pytest.raises(EndedQuiet, match=r"Call: expected a message within 0\.01 s, got none"):
        async with calls.opened():
            await asyncio.Event().wait()


async def test_timeout_within_call_is_its_own_error() -> None:
    """What a call awaits may have limits in time as well."""
    calls = QuietCalls("Call", limit=1, timeout_s=None)
    with pytest.raises(TimeoutError):
        async with calls.opened():
            raise TimeoutError


async def test_call_that_has_to_end_is_not_kept_by_a_request() -> None:
    """One that comes in the same turn of the event loop is too late."""
    calls = QuietCalls("Call", limit=1, timeout_s=None)
    opened: asyncio.Queue[QuietCall] = asyncio.Queue()
    first = asyncio.create_task(_stay_open(calls, opened))
    call = await opened.get()
    async with calls.opened():
        call.begin()
        call.done()
        with pytest.raises(EndedQuiet):
            await first
        assert len(calls) == 1


async def test_unread_bytes_over_limit_end_the_call_unread_for_longest() -> None:
    """Also while a request of it is under way; what was read counts no longer."""
    calls = QuietCalls("Call", limit=3, timeout_s=None, max_unread_bytes=10)
    opened: asyncio.Queue[QuietCall] = asyncio.Queue()
    tasks = []
    held = []
    for _ in range(2):
        tasks.append(asyncio.create_task(_stay_open(calls, opened)))
        held.append(await opened.get())
        held[-1].begin()
        held[-1].hold(5)
    held[0].read(1)
    async with calls.opened() as other:
        other.hold(2)
        with pytest.raises(EndedQuiet, match="at most 10 unread bytes in all"):
            await tasks[1]

    assert not tasks[0].done()
    tasks[0].cancel()
    await asyncio.wait(tasks)


async def test_room_ends_beyond_its_limit_and_begins_again_below() -> None:
    """What passes the limit is taken: its size is known only then."""
    room = Room(3)
    room.take(3)
    await room.wait()
    room.take(4)
    waiting = asyncio.create_task(room.wait())
    room.take(-3)
    await asyncio.wait([waiting], timeout=0)
    is_full = not waiting.done()
    room.take(-1)
    await waiting

    assert is_full
