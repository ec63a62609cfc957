"""How a process is told to end."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from headrace.runtime.shutdown import Stop, stop_on_signals
from tests.support.conditions import DEADLINE_S


def test_first_stop_drains_and_second_stop_ends() -> None:
    """One asks for an orderly end, another one for an end at once; more change nothing."""
    stop = Stop()
    seen = []
    for _ in range(4):
        seen.append((stop.requested.is_set(), stop.forced.is_set()))
        stop.request()

    assert seen == [(False, False), (True, False), (True, True), (True, True)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_stop_process(number: signal.Signals) -> None:
    """SIGTERM and SIGINT ask to drain, and ask again to end."""
    stop = Stop()
    async with asyncio.timeout(DEADLINE_S):
        with stop_on_signals(stop):
            os.kill(os.getpid(), number)
            await stop.requested.wait()
            assert not stop.forced.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.forced.wait()


async def test_previous_signal_handling_is_restored_after_context() -> None:
    """Outside of the context signals do what they did before."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    with stop_on_signals(Stop()):
        assert signal.getsignal(signal.SIGTERM) != before[0]

    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
