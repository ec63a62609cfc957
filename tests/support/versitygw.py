"""S3 by versitygw, a gateway to a directory, in a process of its own.

It can be killed, and held (SIGSTOP). See https://github.com/versity/versitygw.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Self

import aiohttp

from headrace.tools.local_kafka.broker import free_port
from tests.support.conditions import eventually
from tests.support.s3_bucket import BUCKET, Absence, environment_of
from tests.support.stand_in_server import HOST


class Versitygw:
    """A gateway with an empty bucket, `s3://models`, while its context lasts.

    Args:
        program: see `tools/versitygw`.
        directory: where it keeps its objects and their attributes; made unless it is there.

    Attributes:
        environment: variables with which the library finds it.
    """

    def __init__(self, program: Path, directory: Path) -> None:
        self._program = program
        self._objects, self._attributes = directory / "objects", directory / "attributes"
        self._address = f"{HOST}:{free_port([], HOST)}"
        self.environment = environment_of(f"http://{self._address}")
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        (self._objects / BUCKET).mkdir(parents=True)
        self._attributes.mkdir()
        try:
            await self.come_back()
        except BaseException:
            await self._kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._kill()

    async def go_away(self, absence: Absence) -> None:
        """Be killed, or held if it is to be silent."""
        if absence is Absence.SILENT:
            assert self._process is not None
            self._process.send_signal(signal.SIGSTOP)
        else:
            await self._kill()

    async def come_back(self) -> None:
        """Go on, or start, and wait until it answers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
        else:
            self._process = await asyncio.create_subprocess_exec(
                *(self._program, self._address, self._objects, self._attributes),
                env={
                    **os.environ,
                    "ROOT_ACCESS_KEY": self.environment["AWS_ACCESS_KEY_ID"],
                    "ROOT_SECRET_KEY": self.environment["AWS_SECRET_ACCESS_KEY"],
                    "AWS_REGION": self.environment["AWS_REGION"],
                },
                stdout=asyncio.subprocess.DEVNULL,
            )
        await eventually(self._answers, what="versitygw answers", recheck_s=0.05)

    async def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.returncode is None, f"versitygw ended: {self._process.returncode}"
        try:
            async with aiohttp.ClientSession() as http, http.get(f"http://{self._address}/"):
                return True
        except aiohttp.ClientError:
            return False

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
