"""Groups of gRPC calls: under load, calls wait a moment for others and go on together.

In a turn of the event loop gRPC hands over a few calls at most. They would pass the stages in a
chunk of their own, which costs the stages as much as dozens of requests (decision 29).
"""

from __future__ import annotations

import asyncio

from headrace.tuning import GatewayTuning


class WaitRule:
    """Decides which calls wait for others, by whether the last wait was worth its time.

    After a wait that found enough calls, the next call waits as well. After one that did not, the
    next 1, 3, 7, … calls go on at once, up to `most_passed`, and so many do at first. So a caller
    that is alone hardly ever waits, and waiting begins soon after many callers have come.

    Args:
        least_calls: a wait was worth its time if so many calls go on together after it.
        most_passed: most calls that go on at once between two waits.
    """

    def __init__(self, least_calls: int, most_passed: int) -> None:
        self._least_calls = least_calls
        self._most_passed = most_passed
        self._passed_after_wait = self._left_to_pass = most_passed

    def should_wait(self) -> bool:
        """Return whether this call waits; each call asks once."""
        if self._left_to_pass:
            self._left_to_pass -= 1
            return False
        return True

    def note_wait(self, calls: int) -> None:
        """Note a wait after which so many calls go on together."""
        if calls >= self._least_calls:
            self._passed_after_wait = 0
        else:
            self._passed_after_wait = min(2 * self._passed_after_wait + 1, self._most_passed)
        self._left_to_pass = self._passed_after_wait


class CallGroups:
    """Lets calls go on together that are accepted one after the other.

    The first call of a group waits, and takes those with it that come meanwhile. Their number is
    bounded by `gateway.max_in_flight`, as they are counted as under way.
    """

    def __init__(self, tuning: GatewayTuning) -> None:
        self._tuning = tuning
        self._rule = WaitRule(tuning.grouped_least_calls, tuning.grouped_most_passed)
        self._is_waiting = False
        self._others: list[asyncio.Future[None]] = []

    async def join(self) -> None:
        """Return when the call of this task may go on. A call may be cancelled while it waits."""
        if self._is_waiting:
            other = asyncio.get_running_loop().create_future()
            self._others.append(other)
            await other
            return
        if not self._rule.should_wait():
            return
        self._is_waiting = True
        try:
            await self._wait_for_others()
        finally:  # also if the first call is cancelled: the others go on
            self._release()
        await asyncio.sleep(0)  # the others go on in the next turn, and this call with them

    def _release(self) -> None:
        others, self._others = self._others, []
        self._is_waiting = False
        self._rule.note_wait(1 + len(others))
        for other in others:
            if not other.done():  # its call was not cancelled
                other.set_result(None)

    async def _wait_for_others(self) -> None:
        """Wait while others come, for a bounded time."""
        tuning, loop = self._tuning, asyncio.get_running_loop()
        until_s = loop.time() + tuning.grouped_most_s
        seen = -1
        while seen != len(self._others) and loop.time() < until_s:
            seen = len(self._others)
            await asyncio.sleep(tuning.grouped_pause_s)
            # The loop may have been busy with other work meanwhile. A call that has arrived needs
            # some turns until it is here.
            for _ in range(tuning.grouped_turns):
                await asyncio.sleep(0)
