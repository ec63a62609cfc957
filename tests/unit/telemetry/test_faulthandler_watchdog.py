"""The watchdog ends a process in which Python no longer runs."""

from __future__ import annotations

import asyncio
import sys
import textwrap

import pytest

from tests.support.conditions import DEADLINE_S

PROGRAM = """
import asyncio, ctypes, sys, time
from headrace.telemetry.watchdog import FaulthandlerWatchdog

async def main():
    with FaulthandlerWatchdog(float(sys.argv[1])):
        {body}
    {after}

asyncio.run(main())
"""
HOLDS_THE_LOCK = "ctypes.PyDLL(None).sleep(20)"  # PyDLL keeps the interpreter lock


@pytest.mark.parametrize(
    ("limit_s", "body", "after", "code"),
    [
        ("0.5", HOLDS_THE_LOCK, "pass", 1),
        ("0.5", "time.sleep(20)", "pass", 1),
        ("2", "await asyncio.sleep(5)", "pass", 0),
        ("0.5", "pass", "time.sleep(1.2)", 0),
        ("0", "time.sleep(1.2)", "pass", 0),
    ],
    ids=["holds-the-lock", "blocks-the-loop", "turns", "left", "never"],
)
async def test_faulthandler_ends_process_only_when_loop_is_blocked(
    limit_s: str, body: str, after: str, code: int
) -> None:
    """It says where each thread was."""
    program = textwrap.dedent(PROGRAM).format(body=body, after=after)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, limit_s, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(DEADLINE_S):
        _, stderr = await process.communicate()

    assert process.returncode == code, stderr.decode()
    assert (b"most recent call first" in stderr) == (code == 1)
