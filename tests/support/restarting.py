"""A parent that starts `headrace run` again whenever it ends, and kills it when it is told to."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Self

from tests.support.forked import ForkedHeadrace

RESTART_AFTER_S = 0.1
STOP_DEADLINE_S = 30.0


class Restarting:
    """One process of these stages, always.

    Args:
        stages: as on the command line.
        environment: settings, as `HEADRACE_…` variables.
        directory: what it prints goes there, a file for each life.

    Attributes:
        stages: its.
        restarts: how often it was started again.
        killed: how often this was `kill`'s doing.
        lives: how long each one took, and how it ended.
    """

    def __init__(self, stages: str, environment: dict[str, str], directory: Path) -> None:
        self.stages = stages
        self._environment = {
            **{name: value for name, value in os.environ.items() if "HEADRACE" not in name},
            **environment,
            "HEADRACE_TELEMETRY__HTTP_PORT": "0",
        }
        self._directory = directory
        self._process: ForkedHeadrace | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._stopping = False
        self.restarts = 0
        self.killed = 0
        self.lives: list[str] = []

    async def __aenter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._keeping = asyncio.create_task(self._keep(), name=f"restarting {self.stages}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        assert self._keeping is not None
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await self._keeping
        finally:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
                await self._process.wait()

    async def _keep(self) -> None:
        for life in range(1, 1000):
            began_s = time.monotonic()
            log = self._directory / f"{self.stages}-{life}.log"
            self._process = ForkedHeadrace(["run", self.stages], self._environment, log)
            await self._process.start()
            code = await self._process.wait()
            self.lives.append(f"{time.monotonic() - began_s:.1f} s, exit {code}")
            if self._stopping:
                return
            self.restarts += 1
            await asyncio.sleep(RESTART_AFTER_S)

    def kill(self) -> None:
        """SIGKILL, at whatever it is."""
        if self._process is not None and self._process.returncode is None:
            self.killed += 1
            self._process.kill()

    @property
    def output(self) -> str:
        """Return what all lives have printed."""
        paths = sorted(self._directory.glob(f"{self.stages}-*.log"), key=os.path.getmtime)
        return "\n".join(path.read_text("utf-8", "replace") for path in paths)
