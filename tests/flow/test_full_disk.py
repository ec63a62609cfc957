"""A process whose log lines nobody can store."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import aiohttp
import pytest

from tests.support.conditions import DEADLINE_S, eventually
from tests.support.forked import HEADRACE

MODELS = Path(__file__).parents[2] / "headrace" / "tools" / "demo" / "models"
FULL = Path("/dev/full")


@pytest.fixture
def full() -> Iterator[IO[bytes]]:
    """A file that takes nothing, as on a full disk."""
    with FULL.open("wb") as file:
        yield file


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a device that is always full")
async def test_full_disk_under_log_output_does_not_end_process(
    tmp_path: Path, full: IO[bytes]
) -> None:
    """The process gets ready, and drains and exits 0 when it is told to."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **{name: value for name, value in os.environ.items() if "HEADRACE" not in name},
        "PYTHONUNBUFFERED": "",  # output that could not be written is tried again at the end
        "HEADRACE_MODELS__REPOSITORY": str(MODELS),
        "HEADRACE_TELEMETRY__HTTP_PORT": str(port),
    }
    process = await asyncio.create_subprocess_exec(
        HEADRACE, "run", env=environment, cwd=tmp_path, stdout=full, stderr=full
    )
    try:
        async with aiohttp.ClientSession() as session:

            async def is_ready() -> bool:
                try:
                    async with session.get(f"http://127.0.0.1:{port}/health/ready") as answer:
                        return answer.status == 200
                except aiohttp.ClientConnectionError:
                    return False

            await eventually(is_ready, recheck_s=0.1)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
