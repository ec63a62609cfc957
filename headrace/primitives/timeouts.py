"""Timeouts of asyncio that end before their time."""

from __future__ import annotations

import asyncio


def end_now(within: asyncio.Timeout) -> None:
    """Let a timeout expire in the next turn of the event loop, if it has not expired yet.

    One that has cannot be rescheduled, and what it bounds may need some turns to end.
    """
    if not within.expired():
        within.reschedule(asyncio.get_running_loop().time())
