"""Ending a timeout of asyncio early."""

from __future__ import annotations

import asyncio


def end_now(within: asyncio.Timeout) -> None:
    """Let a timeout expire in the next turn of the event loop, if it has not expired yet.

    An expired timeout cannot be rescheduled, and its block may take some turns to end.
    """
    if not within.expired():
        within.reschedule(asyncio.get_running_loop().time())
