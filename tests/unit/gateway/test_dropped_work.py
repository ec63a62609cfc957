"""Conversions of requests that are cancelled before a thread comes to them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from headrace.gateway.dropped_work import DroppingConversions
from headrace.tuning import TUNING
from tests.support.conditions import eventually

ONE_THREAD = replace(TUNING.gateway, conversion_threads=1)


class Body:
    """A body to which there can be a weak reference."""

    size = 3


@pytest.fixture
def conversions() -> Iterator[DroppingConversions]:
    """Conversions on one thread."""
    made = DroppingConversions(ONE_THREAD, use_regions=False)
    yield made
    made.close()


async def test_cancelled_conversion_holds_nothing_while_threads_are_busy(
    conversions: DroppingConversions,
) -> None:
    """Its caller has gone; another one that waits as long is converted."""
    begun, release = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        release.wait()

    async def convert() -> int:
        body = Body()
        known.append(weakref.ref(body))
        return await conversions.run(lambda: body.size, takes_long=True)

    known: list[weakref.ref[Body]] = []
    busy = asyncio.create_task(conversions.run(block, takes_long=True))
    await eventually(begun.is_set)
    waiting = [asyncio.create_task(convert()) for _ in range(2)]
    await eventually(lambda: len(known) == 2)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    del waiting[0]  # it knows its frames by the error
    left = [each() is not None for each in known]
    release.set()

    assert left == [False, True]
    assert await waiting[0] == Body.size
    await busy


@pytest.mark.parametrize("takes_long", [False, True])
async def test_error_of_conversion_is_its_callers(
    conversions: DroppingConversions, takes_long: bool
) -> None:
    """On a thread as on the event loop."""

    def fail() -> None:
        raise KeyError("letters")

    with pytest.raises(KeyError, match="letters"):
        await conversions.run(fail, takes_long=takes_long)
